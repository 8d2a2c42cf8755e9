"""`kvloft status`: what a server does now. Reads only."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloft.cli.hits import hit_rate, hit_table
from kvloft.cli.inspect import describe
from kvloft.cli.serve import add_socket, not_answered, settings
from kvloft.config import size_text


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "status",
        help="show what a server does",
        description=(
            "Show what a server does: memory, disk and engines of each namespace, and what they asked for and found. "
            "Exit status: 0, or 1 where none answers."
        ),
    )
    add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables (sizes in bytes)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what the server does; returns 0, or 1 after a message on stderr if no server answers."""
    from kvloft._core import ConfigError, StoreError, server_status

    socket = settings(args).socket
    assert socket is not None
    try:
        status = server_status(socket)
    except (ConfigError, StoreError) as e:
        return not_answered(e)
    for space in status["namespaces"]:
        space["namespace"] = space["namespace"].hex()
        space["hit_rate"] = hit_rate(space["stats"])
    if args.json:
        print(json.dumps(status, indent=2))
        return 0
    _print(status, Console())
    return 0


def _print(status: dict[str, Any], console: Console) -> None:
    if not status["namespaces"]:
        console.print("No engine has connected yet, so no memory is taken.")
    for space in status["namespaces"]:
        _print_namespace(space, status, console)
    kept = status["stats"]["quarantined_reservations"]
    if kept:
        console.print(f"{kept} frames of engines that went without a word are kept until nothing can write to them.")


def _print_namespace(space: dict[str, Any], status: dict[str, Any], console: Console) -> None:
    stats, frame_bytes = space["stats"], space["frame_bytes"]
    console.print(f"namespace {space['namespace'][:16]}: {describe(space['description'])}", highlight=False, markup=False)
    if not stats:
        console.print("It is being opened.")
        return
    has, everything = size_text(space["slabs"] * status["slab_bytes"]), size_text(status["host_bytes"])
    console.print(f"has {has} of {everything} host memory", highlight=False)
    used = size_text(stats["frames_visible"] * frame_bytes)
    tiers = Table("tier", "chunks", "bytes", "to be read", "being written", "pinned", "evicted")
    host = ("frames_reserved", "pins", "host_evictions")
    tiers.add_row("host", str(stats["frames_visible"]), used, "", *(str(stats[name]) for name in host))
    on_disk = size_text(stats["disk_used"] * frame_bytes)
    queues = (str(stats["reads_pending"]), str(stats["disk_pending"]))
    tiers.add_row("disk", str(stats["disk_used"]), on_disk, *queues, "", str(stats["disk_evictions"]))
    console.print(tiers)
    if stats["pinned"]:
        kept = (size_text(stats[name] * frame_bytes) for name in ("kept_host", "kept_disk"))
        held, on_disk_too = kept
        salts = stats["kept_salts"]
        what = f"{salts} salt{'s' if salts != 1 else ''} pinned: {held} in memory, {on_disk_too} on disk"
        console.print(what if salts else "It is pinned: it keeps its share of memory without engines.", highlight=False)
    engines = Table("engine", "connected for", "reservations", "leases")
    for engine in space["engines"]:
        seconds = f"{engine['connected_ms'] / 1000:.0f} s"
        engines.add_row(f"process {engine['pid']}", seconds, str(engine["reservations"]), str(engine["leases"]))
    console.print(engines if space["engines"] else "No engine is connected.")
    console.print(hit_table(space))
