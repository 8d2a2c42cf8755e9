"""`kvloft evict`: have a server give up what belongs to one tenant, or what it has in memory."""

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
Forget a tenant: what a server holds of requests with one cache_salt, with any
LoRA adapter and of any model, in memory and on disk, also of models that no
engine serves now. It is not found again, not even after a restart. With
--host-only, give up host memory instead: of that tenant, or of all.
"""
EPILOG: Final = """\
  kvloft evict --socket PATH --salt-file secret.txt
  printf %s "$SALT" | kvloft evict --socket PATH --salt-file -
  kvloft evict --socket PATH --namespace 3f9a --host-only

Other users of this machine can read a command line, so --salt-file is for
salts that are secrets. The salt is hashed here: the server and its logs do not
get it.

Stop the tenant's requests first: what a running one saves later is there
again. Chunks that are being loaded can no longer be found, and their memory
is free when the load ends; with --host-only they stay. The bytes themselves
stay in memory and in files until they are overwritten, but nothing leads to
them. What engines keep on their GPUs is vLLM's.

Exit status: 0, also where nothing with that salt is held; 1 if no server
answers or something is left, such as on a disk that fails; 2 for a wrong
argument.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "evict",
        help="forget what a server holds of one tenant",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_socket(parser)
    add_whose(parser)
    parser.add_argument("--host-only", action="store_true", help="give up host memory only; chunks on disk are still found")
    parser.add_argument("--json", action="store_true", help="print JSON (sizes in bytes)")
    parser.set_defaults(run=run)


def add_whose(parser: argparse.ArgumentParser) -> None:
    """What says whose chunks are meant."""
    parser.add_argument("--namespace", metavar="ID", default="", type=_utf8, help="only this model's, as `kvloft status` prints it")
    add_salt(parser)


def add_salt(parser: argparse.ArgumentParser) -> None:
    """What says which salt is meant."""
    salt = parser.add_mutually_exclusive_group()
    salt.add_argument("--salt", type=_utf8, help="the cache_salt of the tenant's requests")
    salt.add_argument("--salt-file", metavar="FILE", help="a file that holds it; - for stdin. One newline at its end is left out")


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8") from None
    return text


def given_salt(args: argparse.Namespace) -> str | None:
    """The salt of the command line or of the file that it names. Raises ConfigError."""
    if args.salt_file is None:
        salt: str | None = args.salt
    else:
        try:
            raw = sys.stdin.buffer.read() if args.salt_file == "-" else Path(args.salt_file).read_bytes()
        except OSError as e:
            raise ConfigError(f"--salt-file {args.salt_file}: cannot be read ({e.strerror}).") from None
        salt = read_salt(raw, f"--salt-file {args.salt_file}")
    if salt == "":
        raise ConfigError("the salt is empty, and no request can have an empty one.")
    return salt


def salt_tag(salt: str) -> str:
    """What stands for a salt where a server tells of tenants: 16 hex digits, the same in each namespace."""
    from kvloft._core import root_key

    return root_key(bytes(32), None, salt)[-8:].hex()


def run(args: argparse.Namespace) -> int:
    """Evict and print what went; 0, or after a message 1 if no server answers or something is left, 2 if nothing is meant."""
    from kvloft._core import ConfigError as RefusedError
    from kvloft._core import StoreError, server_evict

    socket, salt = settings(args).socket, given_salt(args)
    assert socket is not None
    if salt is None and not args.host_only:
        raise ConfigError("say --salt-file or --salt for a tenant, or --host-only; `kvloft clear` empties a namespace.")
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
        print(f"nothing with that salt is held{' in host memory' if args.host_only else ''}, so there is nothing to evict")
    else:
        print(_sentence(done, args.host_only))
    if done["complete"]:
        return 0
    print("kvloft: something is left: the disk does not answer, or a namespace is being opened; run this again", file=sys.stderr)
    return 1


def _sentence(done: dict[str, Any], host_only: bool) -> str:
    chunks, in_use, spaces = (f"{done[name]:,}" for name in ("chunks", "in_use", "namespaces"))
    what = f"{chunks} chunk{'s' if done['chunks'] != 1 else ''} evicted"
    freed = f"{size_text(done['host_bytes'])} of host memory"
    freed += "" if host_only else f" and {size_text(done['disk_bytes'])} on disk"
    text = f"{what} in {spaces} namespace{'s' if done['namespaces'] != 1 else ''}: {freed}"
    if done["in_use"]:
        text += f"; {in_use} in use, {'which stay' if host_only else 'freed when that ends'}"
    return text
