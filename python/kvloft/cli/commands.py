"""Parses the `kvloft` command line and runs the command.

Each command module's `add_parser(subparsers)` sets ``run``, which takes the parsed arguments, runs
the command and returns its exit status.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from kvloft.cli import warn
from kvloft.errors import NOT_WRITTEN, ConfigError, StoreError


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse ``argv``, or this process's arguments if ``argv`` is None. Exit with status 2 on an
    unknown argument.
    """
    own, flags = split_flags(list(sys.argv[1:] if argv is None else argv) or ["--help"])
    try:
        args, rest = build_parser(own[0] if own else None).parse_known_args(
            own, argparse.Namespace(flags=flags)
        )
    except SystemExit as e:
        if e.code:
            raise
        raise SystemExit(_written(lambda _: 0, argparse.Namespace(status=0))) from None  # --help
    except OSError as e:
        raise SystemExit(_written(partial(_again, e), argparse.Namespace(status=0))) from None
    if rest:
        _refuse(args.parser, rest)
    return args


def _again(error: OSError, _: argparse.Namespace) -> NoReturn:
    raise error


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error if it cannot print its help text. By default, argparse ignores
    the error.
    """

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


class _Version(argparse.Action):
    """Prints the version and git revision, which are compiled into the extension."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and git revision")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from kvloft.version import BUILD

        # argparse prints its help through this method.
        parser._print_message(f"kvloft {BUILD}\n", sys.stdout)  # noqa: SLF001
        parser.exit()


def run(args: argparse.Namespace) -> int:
    """Run a command and return its exit status, which is 2 for an invalid setting."""
    return _written(args.run, args)


def _written(do: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run ``do``, flush its output and return the exit status.

    A command with long output sets ``args.status`` before printing, so that the exit status is
    correct even if the reader closes the pipe early.
    """
    try:
        args.status = do(args)
        sys.stdout.flush()  # if Python's flush at exit fails, the exit status is 120
        return int(args.status)
    except ConfigError as e:
        warn(str(e))
        return 2
    except StoreError as e:
        from kvloft.cli.connection import report_no_answer

        return report_no_answer(e, args)
    except SystemExit as e:  # rich raises this if the pipe is closed
        if not isinstance(e.__context__, BrokenPipeError):
            raise
        return int(args.status)
    except BrokenPipeError:
        # The reader (head, less) closed the pipe. Prevent Python from reporting this again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(args.status)
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        warn(f"cannot write the output ({e.strerror})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(args.status) or NOT_WRITTEN


def _refuse(parser: argparse.ArgumentParser, unknown: list[str]) -> NoReturn:
    """Print the command's usage and the first unknown argument, and exit with status 2."""
    import difflib  # imported lazily: slow to import and needed only here
    import re

    name = unknown[0].partition("=")[0]
    like = difflib.get_close_matches(name, re.findall(r"--[a-z-]+", parser.format_usage()), 1)
    parser.error(f"unknown argument: {name}" + (f"; did you mean {like[0]}?" if like else ""))


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `kvloft check` at the first ``--``, which precedes vLLM's flags.

    Otherwise, argparse would mistake the first vLLM flag for a kvloft argument.
    """
    if argv[:1] != ["check"] or "--" not in argv:
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def build_parser(name: str | None = None) -> argparse.ArgumentParser:
    """Return a parser for all commands, or just for `serve` if ``name`` is "serve"."""
    parser = _Parser(
        prog="kvloft",
        allow_abbrev=False,
        description=(
            "Run a shared KV cache for vLLM engines, inspect settings, models and the disk tier, "
            "and measure GPU copy bandwidth."
        ),
        epilog=(
            "Exit status: 2 for an invalid argument or setting, 4 if the output cannot be written; "
            "see COMMAND --help."
        ),
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _commands(name):
        command.add_parser(subparsers)
    for own in subparsers.choices.values():
        own.allow_abbrev = False  # for example, --evict must not mean --eviction
        own.set_defaults(parser=own, status=0)
    return parser


def _commands(name: str | None) -> Iterator[Any]:
    """Yield the command modules in the order of the help text."""
    if name == "serve":  # engines wait for the server, so skip the other commands' slow imports
        from kvloft.cli import serve

        yield serve
        return
    from kvloft.bench import command as bench
    from kvloft.cli import admin, check, config, inspect, serve, size, status, verify

    yield from (config, size, check, serve, status, admin, inspect, verify, bench)
