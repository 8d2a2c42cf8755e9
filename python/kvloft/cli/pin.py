"""`kvloft pin`: have a server keep what belongs to one tenant, or a namespace's memory."""

import argparse
import json
import sys
from typing import Any, Final

from kvloft.cli.evict import add_whose, given_salt
from kvloft.cli.serve import add_socket, not_answered, settings
from kvloft.config import size_text

DESCRIPTION: Final = """\
Keep a tenant: what a server holds of requests with one cache_salt, now and
later, with any LoRA adapter, is not evicted for other requests of its model.
At most half of a model's memory and of its disk is kept so; beyond that, what
was used least recently goes. Without a salt, a model's namespace keeps its
share of memory when its engines are gone.
"""
EPILOG: Final = """\
  kvloft pin --socket PATH --salt-file secret.txt
  kvloft pin --socket PATH --salt-file secret.txt --off
  kvloft pin --socket PATH --namespace 3f9a
  kvloft pin --socket PATH --off

Pins are of namespaces that are open, which `kvloft status` shows, and end with
the server or with --off; --off without a salt ends all. While something of a
namespace is pinned, it stays open and has its share of memory without an
engine, too. What another namespace's share takes is given up, pinned or not:
it stays on disk. `kvloft evict` takes what is pinned.

Exit status: 0, also with --off of what was not pinned, which it says; 1 if no
server answers; 2 for a wrong argument, or where no engine has opened a
namespace yet that could be pinned.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "pin",
        help="keep what a server holds of one tenant from eviction",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_socket(parser)
    add_whose(parser)
    parser.add_argument("--off", action="store_true", help="keep it no more")
    parser.add_argument("--json", action="store_true", help="print JSON (sizes in bytes)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Pin or unpin and print what is pinned; 0, or after a message 1 if no server answers, 2 if no open namespace is meant."""
    from kvloft._core import ConfigError as RefusedError
    from kvloft._core import StoreError, server_pin

    socket, salt = settings(args).socket, given_salt(args)
    assert socket is not None
    try:
        done = server_pin(socket, namespace=args.namespace.lower(), salt=salt, on=not args.off)
    except RefusedError as e:
        print(f"kvloft: {e}", file=sys.stderr)
        return 2
    except StoreError as e:
        return not_answered(e)
    print(json.dumps(done) if args.json else _sentence(done, is_memory=salt is None, is_off=args.off))
    return 0


def _sentence(done: dict[str, int], *, is_memory: bool, is_off: bool) -> str:
    salts, spaces = done["salts"], done["namespaces"]
    where = f"{spaces:,} namespace{'s' if spaces != 1 else ''}"
    if is_off and not done["changed"]:
        return f"nothing was pinned in {where}" if is_memory else f"the salt was not pinned in {where}"
    if is_off:
        return f"nothing is pinned any more in {where}" if is_memory else f"the salt is not pinned any more in {where}"
    if is_memory:
        return f"{where} pinned; without engines, too, {'it keeps its' if spaces == 1 else 'they keep their'} share of memory"
    if not done["host_bytes"] and not done["disk_bytes"]:
        return f"the salt is pinned in {where}, which hold{'s' if spaces == 1 else ''} nothing with it yet"
    sizes = f"{size_text(done['host_bytes'])} of host memory and {size_text(done['disk_bytes'])} on disk"
    return f"{salts:,} salt{'s are' if salts != 1 else ' is'} pinned in {where}: {sizes}"
