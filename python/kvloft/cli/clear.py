"""`kvloft clear`: removes all chunks of a namespace of a server, in memory and on disk."""

import argparse
import sys
from typing import Any

from kvloft.cli.serve import add_socket, not_answered, settings


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "clear",
        help="empty a server's memory and disk",
        description=(
            "Remove all chunks of a namespace, in memory and on disk. Engines continue and save new chunks. Namespaces without an "
            "engine, which are on disk only, can be cleared, too. Without --yes, the command asks for confirmation on a terminal, "
            "and clears nothing elsewhere. Exit status: 0; 1 if no server answers or the user does not confirm; 2 if there are "
            "several namespaces and --namespace is missing, or if the disk cannot be listed."
        ),
    )
    add_socket(parser)
    parser.add_argument(
        "--namespace", metavar="ID", default="", help="the namespace, as printed by `kvloft status`; required if there are several"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Clear a namespace. Returns 0, or prints a message and returns 1 (no server, not confirmed) or 2 (namespace missing)."""
    from kvloft._core import ConfigError, StoreError, server_forget, server_status

    socket = settings(args).socket
    assert socket is not None
    try:
        if not args.yes:
            server_status(socket)  # ask only if a server answers
            if not _agrees(socket, args.namespace):
                print("kvloft: nothing was cleared; use --yes to clear without confirmation", file=sys.stderr)
                return 1
        num_chunks = server_forget(socket, namespace=args.namespace.lower())
    except ConfigError as e:
        print(f"kvloft: {e}", file=sys.stderr)
        return 2
    except StoreError as e:
        return not_answered(e)
    print(f"{num_chunks:,} chunk{'s' if num_chunks != 1 else ''} removed")
    return 0


def _agrees(socket: str, namespace: str) -> bool:
    if not sys.stdin.isatty():
        return False
    what = f"namespace {namespace}" if namespace else "all chunks"
    try:
        return input(f"Remove {what} from the server at {socket}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
