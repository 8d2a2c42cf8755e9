"""`kvloft clear`: have a server forget what it holds, in memory and on disk."""

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
            "Empty a server: nothing that a namespace holds now, in memory or on disk, is found again by any of its engines. They "
            "go on and save anew. A namespace that is on disk only, for no engine came yet, is one of them. Exit status: 0; 1 "
            "where no server answers, or where the answer was not yes: without --yes, it asks on a terminal and clears nothing "
            "elsewhere; 2 where it has several and none is named, or its disk does not say what is there."
        ),
    )
    add_socket(parser)
    parser.add_argument(
        "--namespace", metavar="ID", default="", help="which, as `kvloft status` prints it; needed if there are several"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Clear a namespace; 0, or after a message 1 if no server answers or the user does not agree, 2 if it is not named."""
    from kvloft._core import ConfigError, StoreError, server_forget, server_status

    socket = settings(args).socket
    assert socket is not None
    try:
        if not args.yes:
            server_status(socket)  # no question where none answers
            if not _agrees(socket, args.namespace):
                print("kvloft: nothing is cleared; say --yes to do it without a question", file=sys.stderr)
                return 1
        num_chunks = server_forget(socket, namespace=args.namespace.lower())
    except ConfigError as e:
        print(f"kvloft: {e}", file=sys.stderr)
        return 2
    except StoreError as e:
        return not_answered(e)
    print(f"{num_chunks:,} chunk{'s' if num_chunks != 1 else ''} forgotten")
    return 0


def _agrees(socket: str, namespace: str) -> bool:
    if not sys.stdin.isatty():
        return False
    what = f"namespace {namespace}" if namespace else "everything"
    try:
        return input(f"Forget {what} that the server at {socket} holds? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
