"""Entry point of the `kvloft` command. Each command is a module with `add_parser(subparsers)` and `run(args) -> int`."""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from kvloft import __version__
from kvloft.bench import command as bench
from kvloft.cli import check, clear, config, evict, inspect, pin, serve, status, top, verify
from kvloft.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (2 for a wrong setting or argument, as argparse does)."""
    own, flags = check.split_flags(list(sys.argv[1:] if argv is None else argv))
    args = build_parser().parse_args(own, argparse.Namespace(flags=flags))
    try:
        return int(args.run(args))
    except ConfigError as e:
        print(f"kvloft: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough; without this, Python complains again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        print(f"kvloft: the output cannot be written ({e.strerror})", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvloft",
        description="Serve one cache to several engines; look at settings, models, the disk tier and speed on a GPU.",
    )
    parser.add_argument("--version", action="version", version=f"kvloft {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (config, check, serve, status, top, clear, evict, pin, inspect, verify, bench):
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
