"""`kvloft evict`: removes the chunks of one tenant from a server, or evicts chunks from its host memory."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from kvloft.cli.serve import add_socket, not_answered, settings
from kvloft.config import size_text
from kvloft.errors import ConfigError
from kvloft.limits import read_salt

DESCRIPTION: Final = """\
Remove a tenant: all chunks of requests with one cache_salt, for every LoRA
adapter and every model, in memory and on disk, including models without an
engine. They are not found again, even after a restart. With --host-only, evict
chunks from host memory only, of that tenant or of all tenants.
"""
EPILOG: Final = """\
  kvloft evict --socket PATH --salt-file secret.txt
  printf %s "$SALT" | kvloft evict --socket PATH --salt-file -
  kvloft evict --socket PATH --namespace 3f9a --host-only

Other users of this machine can read a command line, so use --salt-file for
secret salts. The CLI hashes the salt locally: neither the server nor its logs
receive it.

Stop the tenant's requests first: chunks that they save later are stored again.
Chunks that are being loaded can no longer be found, and their memory is freed
when the load ends; with --host-only they stay. The bytes stay in memory and in
files until they are overwritten, but no index entry refers to them. KV in the
engines' GPUs is not affected.

Exit status: 0, also if there is no chunk with that salt; 1 if no server answers
or something remains, for example on a failing disk; 2 for a wrong argument.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "evict",
        help="remove one tenant from a server",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_socket(parser)
    add_whose(parser)
    parser.add_argument("--host-only", action="store_true", help="evict from host memory only; chunks on disk are still found")
    parser.add_argument("--json", action="store_true", help="print JSON (sizes in bytes)")
    parser.set_defaults(run=run)


def add_whose(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select chunks."""
    parser.add_argument(
        "--namespace", metavar="ID", default="", type=_utf8, help="only this namespace, as printed by `kvloft status`"
    )
    add_salt(parser)


def add_salt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a salt."""
    salt = parser.add_mutually_exclusive_group()
    salt.add_argument("--salt", type=_utf8, help="the cache_salt of the tenant's requests")
    salt.add_argument(
        "--salt-file", metavar="FILE", help="a file that contains the salt; - for stdin. One newline at its end is ignored"
    )


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8") from None
    return text


def given_salt(args: argparse.Namespace) -> str | None:
    """Return the salt from --salt or --salt-file. Raises ConfigError."""
    if args.salt_file is None:
        salt: str | None = args.salt
    else:
        try:
            raw = sys.stdin.buffer.read() if args.salt_file == "-" else Path(args.salt_file).read_bytes()
        except OSError as e:
            raise ConfigError(f"--salt-file {args.salt_file}: cannot be read ({e.strerror}).") from None
        salt = read_salt(raw, f"--salt-file {args.salt_file}")
    if salt == "":
        raise ConfigError("the salt is empty; no request has an empty cache_salt.")
    return salt


def salt_tag(salt: str) -> str:
    """Return the tag that identifies a salt in a server's output: 16 hex digits, equal in each namespace."""
    from kvloft._core import root_key

    return root_key(bytes(32), None, salt)[-8:].hex()


def run(args: argparse.Namespace) -> int:
    """Evict and print the result. Returns 0; 1 if no server answers or something remains; 2 for a wrong argument."""
    from kvloft._core import ConfigError as RefusedError
    from kvloft._core import StoreError, server_evict

    socket, salt = settings(args).socket, given_salt(args)
    assert socket is not None
    if salt is None and not args.host_only:
        raise ConfigError("use --salt-file or --salt to select a tenant, or --host-only; `kvloft clear` empties a namespace.")
    try:
        done = server_evict(socket, namespace=args.namespace.lower(), salt=salt, host_only=args.host_only)
    except RefusedError as e:
        print(f"kvloft: {e}", file=sys.stderr)
        return 2
    except StoreError as e:
        return not_answered(e)
    has_nothing = salt is not None and done["complete"] and not done["chunks"] and not done["in_use"]
    if args.json:
        print(json.dumps(done))
    elif has_nothing:
        print(f"there are no chunks with that salt{' in host memory' if args.host_only else ''}")
    else:
        print(_sentence(done, args.host_only))
    if done["complete"]:
        return 0
    print(
        "kvloft: some chunks remain: the disk does not respond, or a namespace is being opened; run the command again",
        file=sys.stderr,
    )
    return 1


def _sentence(done: dict[str, Any], host_only: bool) -> str:
    chunks, in_use, spaces = (f"{done[name]:,}" for name in ("chunks", "in_use", "namespaces"))
    what = f"{chunks} chunk{'s' if done['chunks'] != 1 else ''} evicted"
    freed = f"{size_text(done['host_bytes'])} of host memory"
    freed += "" if host_only else f" and {size_text(done['disk_bytes'])} on disk"
    text = f"{what} in {spaces} namespace{'s' if done['namespaces'] != 1 else ''}: {freed}"
    if done["in_use"]:
        text += f"; {in_use} in use, {'which stay' if host_only else 'freed when their loads end'}"
    return text
