"""`kvloft status`: what a server does now. Reads only."""

import argparse
import json
from typing import Any, Final

from rich.console import Console

from kvloft.cli.evict import add_salt, given_salt, salt_tag
from kvloft.cli.hits import hit_rate, hit_table, late_lines
from kvloft.cli.inspect import fields_of
from kvloft.cli.overview import figures, lines
from kvloft.cli.rules import rules
from kvloft.cli.serve import add_socket, not_answered, settings
from kvloft.cli.tables import (
    ID_DIGITS,
    NO_ENGINE,
    engine_table,
    field_table,
    given_up,
    tenant_table,
    tier_table,
    title,
    unwritten,
    whose,
)  # fmt: skip

MAX_TENANTS: Final = 16


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "status",
        help="show what a server does",
        description=(
            "Show what a server does: first whether it is well, how much of host memory and disk is used, engines and hit rate; "
            "then memory, disk and engines of each namespace, and what they asked for and found; last what its KV depends on. "
            "Salts are listed by their tags, which do not tell them; one that is given is marked. "
            "Exit status: 0; 1 where none answers; 2 for a wrong argument."
        ),
    )
    add_socket(parser)
    add_salt(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables (sizes in bytes)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what the server does; returns 0, or 1 after a message on stderr if no server answers."""
    from kvloft._core import ConfigError, StoreError, server_status

    socket, salt = settings(args).socket, given_salt(args)
    assert socket is not None
    try:
        status = server_status(socket)
    except (ConfigError, StoreError) as e:
        return not_answered(e)
    for space in status["namespaces"]:
        space["namespace"] = space["namespace"].hex()
        space["hit_rate"] = hit_rate(space["stats"])
    tag = salt_tag(salt) if salt is not None else None
    if args.json:
        print(json.dumps(status | figures(status) | ({"salt_tag": tag} if tag is not None else {}), indent=2))
        return 0
    _print(status, socket, Console(), tag)
    return 0


def _print(status: dict[str, Any], socket: str, console: Console, tag: str | None = None) -> None:
    spaces = status["namespaces"]
    bounds = rules(status["settings"])
    more = [*([f"Limits: {bounds}"] if bounds else []), *([whose(tag, spaces)] if tag is not None else [])]
    for line in (*lines(status, socket), *more, *([] if spaces else [NO_ENGINE])):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for space in spaces:
        console.print()
        _print_namespace(space, status, console, tag)
    kept = status["stats"]["quarantined_reservations"]
    if kept:
        console.print(f"{kept} frames of engines that went without a word are kept until nothing can write to them.")
    for space in spaces:
        console.print()
        console.print(f"KV of namespace {space['namespace'][:ID_DIGITS]} depends on:", highlight=False, markup=False)
        console.print(field_table(fields_of(space["description"])))
        console.print(f"whole name: {space['namespace']}", highlight=False, markup=False)


def _print_namespace(space: dict[str, Any], status: dict[str, Any], console: Console, tag: str | None) -> None:
    console.print(title(space["namespace"], space, status), highlight=False, markup=False)
    fields = fields_of(space["description"])
    if isinstance(fields, dict) and "model" in fields:
        console.print(f"  model {fields['model']}", highlight=False, markup=False, soft_wrap=True)
    if not space["stats"]:
        console.print("It is being opened.")
        return
    reports = (*given_up(space), *unwritten(space), *late_lines(space))
    above = (tier_table(space, status), *reports, hit_table(space))
    for nth, part in enumerate((*above, engine_table(space), *tenant_table(space, MAX_TENANTS, tag))):
        if nth:
            console.print()
        console.print(part)
