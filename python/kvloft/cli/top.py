"""`kvloft top`: what a server does, again and again, with rates since the look before. Reads only."""

import argparse
import contextlib
import itertools
import json
import time
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from kvloft.cli.hits import hit_rate, hit_table
from kvloft.cli.overview import disk_full, figures, lines
from kvloft.cli.rules import rules
from kvloft.cli.serve import add_socket, not_answered, settings
from kvloft.cli.tables import (
    NO_ENGINE,
    broken,
    disk_unused,
    engine_table,
    given_up,
    new_table,
    tenant_table,
    tier_table,
    title,
    unwritten,
)  # fmt: skip
from kvloft.config import parse_seconds

MIN_INTERVAL_S: Final = 0.1
MAX_TENANTS: Final = 5
RATES: Final = {
    "asked for": "lookup_chunks",
    "found": "lookup_chunks_found",
    "loaded": "load_chunks",
    "saved": "commits",
    "evicted from host": "host_evictions",
    "written to disk": "disk_writes",
    "read from disk": "disk_reads",
    "evicted from disk": "disk_evictions",
    "evicted for a quota": "quota_evictions",
    "too old": "expired",
    "saves without a frame": "reserve_dropped",
}
"""What a person calls it, and the counter of chunks that it is."""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "top",
        help="watch a server: tiers, rates, engines",
        description=(
            "Watch a server: its limits, what each namespace holds, chunks and GB a second and hit rates since the look before, "
            "and engines. Ctrl-C ends it. Exit status: 0, or 1 once no server answers."
        ),
    )
    add_socket(parser)
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="TIME", help="between two looks (1s)")
    parser.add_argument("--count", type=_count, default=None, metavar="N", help="end after N looks")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each look, one a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show it until Ctrl-C or ``--count``; 0, or 1 after a line on stderr where no server answers."""
    from kvloft._core import ConfigError, StoreError, server_status

    socket = settings(args).socket
    assert socket is not None
    before: tuple[float, dict[str, Any]] | None = None
    console = Console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not args.json else None
    try:
        with live or contextlib.nullcontext():
            for nth in itertools.count(1):
                status = server_status(socket)
                now = time.monotonic()
                rates = rates_of(status, now - before[0], before[1]) if before is not None else {}
                old = before[1] if before is not None else None
                if args.json:
                    print(json.dumps(_row(status, rates, old)), flush=True)
                elif live is not None:
                    live.update(fitted(picture(status, rates, old, socket), console), refresh=True)
                else:
                    console.print(picture(status, rates, old, socket))
                if nth == args.count:
                    return 0
                before = now, status
                time.sleep(args.interval)
    except (ConfigError, StoreError) as e:
        return not_answered(e)
    except KeyboardInterrupt:
        return 0
    raise AssertionError("an endless count ended")


def rates_of(status: dict[str, Any], seconds: float, before: dict[str, Any]) -> dict[bytes, dict[str, float]]:
    """Chunks a second by ``RATES``' names, of each namespace; nothing of a store that began anew."""
    olds = {space["namespace"]: space["stats"] for space in before["namespaces"]}
    rates = {}
    for space in status["namespaces"]:
        new, old = space["stats"], olds.get(space["namespace"])
        if old is not None and all(new.get(name, 0) >= old.get(name, 0) for name in RATES.values()):
            grown = {shown: new.get(name, 0) - old.get(name, 0) for shown, name in RATES.items()}
            rates[space["namespace"]] = {shown: num / max(seconds, MIN_INTERVAL_S) for shown, num in grown.items()}
    return rates


def gb_per_s(rates: dict[str, float], frame_bytes: int) -> dict[str, float]:
    """10^9 bytes a second of what was loaded and saved."""
    return {name: rates[name] * frame_bytes / 1e9 for name in ("loaded", "saved") if name in rates}


def _row(status: dict[str, Any], rates: dict[bytes, dict[str, float]], before: dict[str, Any] | None) -> dict[str, Any]:
    olds = _by_name(before)

    def shown(space: dict[str, Any]) -> dict[str, Any]:
        own, old = rates.get(space["namespace"], {}), olds.get(space["namespace"])
        more = {"namespace": space["namespace"].hex(), "chunks_per_s": own, "gb_per_s": gb_per_s(own, space["frame_bytes"])}
        more |= {"hit_rate": hit_rate(space["stats"])}
        more |= {"hit_rate_now": hit_rate(space["stats"], old["stats"]) if old is not None else None}
        return space | more

    return status | figures(status) | {"namespaces": [shown(space) for space in status["namespaces"]]}


def _by_name(status: dict[str, Any] | None) -> dict[bytes, dict[str, Any]]:
    return {space["namespace"]: space for space in status["namespaces"]} if status is not None else {}


def fitted(drawn: RenderableType, console: Console) -> RenderableType:
    """As much of it as the screen is high, and a line that says how much more there is."""
    lines = console.render_lines(drawn, pad=False)
    while lines and not "".join(segment.text for segment in lines[-1]).strip():
        lines.pop()
    num_more = len(lines) - console.height
    if num_more <= 0:
        return SegmentLines(lines, new_lines=True)
    told = Text(f"{num_more + 1} more rows: make the window taller, or use --json", no_wrap=True, overflow="ellipsis")
    return Group(SegmentLines(lines[: console.height - 1], new_lines=True), told)


def picture(
    status: dict[str, Any], rates: dict[bytes, dict[str, float]], before: dict[str, Any] | None = None, socket: str = ""
) -> RenderableType:
    """Tables of one look, with hit rates since the look ``before``, below a line of limits, which ends where the screen does."""
    spaces, olds = [space for space in status["namespaces"] if space["stats"]], _by_name(before)
    bounds = rules(status["settings"])
    limits = [Text(f"Limits: {bounds}", no_wrap=True, overflow="ellipsis")] if bounds else []
    if not spaces:
        return Group(*limits, *(Text(line) for line in (*lines(status, socket), NO_ENGINE)))
    limits += [Text(line) for line in (*disk_unused(status), *disk_full(status))]
    each = [(space, rates.get(space["namespace"], {}), olds.get(space["namespace"])) for space in spaces]
    return Group(*limits, *(_picture_of(space, status, own, old) for space, own, old in each))


def _picture_of(
    space: dict[str, Any], status: dict[str, Any], rates: dict[str, float], before: dict[str, Any] | None
) -> RenderableType:
    """What matters most comes first: a screen may end before the rest."""
    told = (*given_up(space), *unwritten(space), *broken(space, status))
    flow = [_flow(rates, space["frame_bytes"])] if rates else []
    below = (engine_table(space), *tenant_table(space, MAX_TENANTS))
    tables = (tier_table(space, status), *told, *flow, hit_table(space, before), *below)
    return Group(title(space["namespace"].hex(), space, status), *(part for table in tables for part in (table, "")))


def _flow(rates: dict[str, float], frame_bytes: int) -> Table:
    """Two rates a row: one alone would be half of a screen of 24 rows."""
    table = new_table("a second", "chunks", "GB")
    table.add_column("a second", no_wrap=True)
    for name in ("chunks", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    cells = [(shown, f"{rate:,.0f}", f"{rate * frame_bytes / 1e9:,.3f}") for shown, rate in rates.items()]
    half = (len(cells) + 1) // 2
    for left, right in itertools.zip_longest(cells[:half], cells[half:], fillvalue=()):
        table.add_row(*left, *right)
    return table


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := parse_seconds(text)) >= MIN_INTERVAL_S:
            return seconds
    raise argparse.ArgumentTypeError(f"expected a number of seconds from {MIN_INTERVAL_S:g}, or a time up to 1h, not {text!r}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, not {text!r}")
    return int(text)
