"""Implements `kvloft status`, which prints a server's state once, or repeatedly with --watch."""

import argparse
import json
from typing import Any, Final

from rich.console import Console

from kvloft.cli import warn
from kvloft.cli.admin import add_salt, limits_text, read_salt_argument, salt_tag
from kvloft.cli.connection import add_socket, socket_of
from kvloft.cli.inspect import fields_of
from kvloft.cli.overview import as_json, disk_problems, lines
from kvloft.cli.tables import (
    ID_DIGITS,
    NO_ENGINE,
    engine_table,
    field_table,
    hit_table,
    notes,
    tenant_table,
    tier_table,
    title,
    whose,
)
from kvloft.cli.watch import count, interval, watch
from kvloft.errors import ConfigError

MAX_TENANTS: Final = 16


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "status",
        help="show a server's state",
        description=(
            "Show a server's state: problems, host memory and disk usage, engines and hit rate, "
            "then each namespace's tiers, engines, lookups and hits. Tenants are listed by tag, "
            "which does not reveal the salt; --salt-file marks that salt's tag. With --watch, "
            "refresh until Ctrl-C, and also show chunks per second, GB per second and hit rates "
            "since the previous refresh. Exit status: 0 success; 1 no server responds; 2 invalid "
            "argument."
        ),
    )
    add_socket(parser)
    add_salt(parser)
    parser.add_argument("--watch", action="store_true", help="refresh until Ctrl-C and show rates")
    parser.add_argument(
        "--interval",
        type=interval,
        metavar="TIME",
        help="with --watch: time between refreshes (default: 1s)",
    )
    parser.add_argument(
        "--count", type=count, metavar="N", help="with --watch: exit after N refreshes"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also print all properties that determine each namespace's KV",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON (sizes in bytes); with --watch, one object per line",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the server's state and return 0, or 1 if the server rejects the request.

    Raises ConfigError for invalid arguments, and StoreError if no server responds.
    """
    from kvloft._core import server_status

    if not args.watch and (args.interval is not None or args.count is not None):
        raise ConfigError("--interval and --count require --watch.")
    socket, salt = socket_of(args), read_salt_argument(args)
    tag = salt_tag(salt) if salt is not None else None
    try:
        if args.watch:
            return watch(socket, args, tag)
        status = server_status(socket)
    except ConfigError as e:
        # For example, the server and this command have different versions.
        warn(str(e))
        return 1
    if args.json:
        print(json.dumps(as_json(status, tag), indent=2))
    else:
        _print(status, socket, Console(highlight=False, markup=False), tag, is_verbose=args.verbose)
    return 0


def _print(
    status: dict[str, Any],
    socket: str,
    console: Console,
    tag: str | None = None,
    *,
    is_verbose: bool = False,
) -> None:
    spaces = [space | {"namespace": space["namespace"].hex()} for space in status["namespaces"]]
    bounds = limits_text(status["settings"])
    more = [
        *([f"Limits: {bounds}"] if bounds else []),
        *([whose(tag, spaces)] if tag is not None else []),
    ]
    for line in (*lines(status, socket), *more, *([] if spaces else [NO_ENGINE])):
        console.print(line, soft_wrap=True)
    for space in spaces:
        console.print()
        _print_namespace(space, status, console, tag)
    if kept := status["stats"]["quarantined_reservations"]:
        console.print(
            f"Frames of dead engines, reserved until no process can write to them: {kept:,}"
        )
    for space in spaces if is_verbose else ():
        console.print()
        console.print(f"KV of namespace {space['namespace'][:ID_DIGITS]} depends on:")
        console.print(field_table(fields_of(space["description"])))
        console.print(f"full id: {space['namespace']}")


def _print_namespace(
    space: dict[str, Any], status: dict[str, Any], console: Console, tag: str | None
) -> None:
    console.print(title(space["namespace"], space, status))
    fields = fields_of(space["description"])
    if isinstance(fields, dict) and "model" in fields:
        console.print(f"  model {fields['model']}", soft_wrap=True)
    if not space["stats"]:
        console.print("This namespace is still opening.")
        return
    found = notes(space, disk_problems(space, status))
    above = (tier_table(space, status), *found, hit_table(space), engine_table(space))
    for nth, part in enumerate((*above, *tenant_table(space, MAX_TENANTS, tag))):
        if nth:
            console.print()
        console.print(part)
