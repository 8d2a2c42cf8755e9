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
            "Empty a server: nothing that it holds now, in memory or on disk, is found again by any of its engines. They go on and "
            "save anew. Exit status: 0, or 1 where no server answers."
        ),
    )
    add_socket(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Clear the server; returns 0, or 1 after a message on stderr if no server answers or the user does not agree."""
    from kvloft._core import ConfigError, StoreError, server_forget

    socket = settings(args).socket
    assert socket is not None
    if not args.yes and not _agrees(socket):
        print("kvloft: nothing is cleared; say --yes to do it without a question", file=sys.stderr)
        return 1
    try:
        num_chunks = server_forget(socket)
    except (ConfigError, StoreError) as e:
        return not_answered(e)
    print(f"{num_chunks:,} chunk{'s' if num_chunks != 1 else ''} forgotten")
    return 0


def _agrees(socket: str) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(f"Forget everything that the server at {socket} holds? [y/N] ").strip().lower() in ("y", "yes")
