"""Implements `kvloft status --watch`, which prints tables with rates, or JSON, on each refresh."""

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

from kvloft.cli.admin import limits_text
from kvloft.cli.overview import as_json, disk_full, disk_problems, lines
from kvloft.cli.tables import (
    NO_ENGINE,
    broken,
    disk_unused,
    engine_table,
    hit_rate,
    hit_table,
    new_table,
    notes,
    rejected,
    tenant_table,
    tier_table,
    title,
)
from kvloft.config.units import HintError, parse_seconds
from kvloft.errors import LateError

INTERVAL_S: Final = 1.0
TIMEOUT_S: Final = 5.0
"""Timeout for the server's response on each refresh."""
MIN_INTERVAL_S: Final = 0.1
MAX_TENANTS: Final = 5
RATES: Final = {
    "looked up": "lookup_chunks",
    "found": "lookup_chunks_found",
    "loaded": "load_chunks",
    "saved": "commits",
    "evicted from host": "host_evictions",
    "written to disk": "disk_writes",
    "read from disk": "disk_reads",
    "evicted from disk": "disk_evictions",
    "evicted for a quota": "quota_evictions",
    "expired": "expired",
    "saves without a frame": "reserve_dropped",
}
"""Maps each rate to its counter."""


def watch(socket: str, args: argparse.Namespace, tag: str | None = None) -> int:
    """Print the server's state every ``args.interval`` seconds, and return 0.

    Returns on Ctrl-C or after ``args.count`` refreshes. If the server does not respond in time,
    prints a line and retries on the next refresh. Raises ConfigError if the server rejects the
    request, and StoreError if there is no server.
    """
    from kvloft._core import server_status

    output, answered_s = _Output(is_json=args.json), time.monotonic()
    before: dict[str, Any] | None = None
    with contextlib.suppress(KeyboardInterrupt), output.live or contextlib.nullcontext():
        for nth in itertools.count(1):
            try:
                status, now = server_status(socket, timeout_s=TIMEOUT_S), time.monotonic()
            except LateError:
                output.print_late(time.monotonic() - answered_s)
            else:
                rates = rates_of(status, now - answered_s, before) if before is not None else {}
                row = look_json(status, rates, before, tag)
                output.print_state(row, picture(status, rates, before, socket, tag))
                before, answered_s = status, now
            if nth == args.count:
                break
            time.sleep(args.interval or INTERVAL_S)
    return 0


class _Output:
    """Prints each refresh, in place if the terminal supports cursor movement."""

    def __init__(self, *, is_json: bool) -> None:
        self._console, self._is_json, self._last = Console(), is_json, Group()
        has_cursor = self._console.is_terminal and not self._console.is_dumb_terminal
        can_redraw = has_cursor and not is_json
        self.live = Live(console=self._console, auto_refresh=False) if can_redraw else None

    def print_state(self, row: dict[str, Any], drawn: Group) -> None:
        self._last = drawn
        self._print(row, drawn)

    def print_late(self, seconds: float) -> None:
        """Print the time since the last response and, on a terminal, the last state below it."""
        late = f"The server has not responded for {seconds:.0f} s; it is stopped or busy."
        drawn = Group(late, self._last) if self.live is not None else Group(late)
        self._print({"problems": [late]}, drawn)

    def _print(self, row: dict[str, Any], drawn: Group) -> None:
        if self._is_json:
            print(json.dumps(row), flush=True)
        elif self.live is not None:
            self.live.update(fitted(drawn, self._console), refresh=True)
        else:
            self._console.print(drawn)


def rates_of(
    status: dict[str, Any], seconds: float, before: dict[str, Any]
) -> dict[bytes, dict[str, float]]:
    """Return the rates, in chunks per second, for each namespace that was already open in
    ``before``.
    """
    olds, rates = _by_name(before), {}
    for space in status["namespaces"]:
        new, old = space["stats"], olds.get(space["namespace"])
        if old is None or not new:  # the namespace is new or still being opened
            continue
        grown = {
            shown: new.get(name, 0) - old["stats"].get(name, 0) for shown, name in RATES.items()
        }
        if min(grown.values()) >= 0:
            passed_s = max(seconds, MIN_INTERVAL_S)
            rates[space["namespace"]] = {shown: num / passed_s for shown, num in grown.items()}
    return rates


def chunk_bytes(space: dict[str, Any]) -> float:
    """Return a namespace's average chunk size in host memory, in bytes."""
    stats: dict[str, int] = space["stats"]
    num = stats["frames_total"] - stats["frames_free"]
    return stats["host_used_bytes"] / num if num else float(max(space["frame_sizes"]))


def gb_per_s(rates: dict[str, float], space: dict[str, Any]) -> dict[str, float]:
    """Return the load and save rates in GB/s (10^9 bytes per second)."""
    each = chunk_bytes(space) / 1e9 if rates else 0.0
    return {name: rates[name] * each for name in ("loaded", "saved") if name in rates}


def look_json(
    status: dict[str, Any],
    rates: dict[bytes, dict[str, float]],
    before: dict[str, Any] | None,
    tag: str | None = None,
) -> dict[str, Any]:
    """Return the fields of `kvloft status --json`, with rates and hit rates since ``before``."""
    olds, shown = _by_name(before), as_json(status, tag)
    for space, row in zip(status["namespaces"], shown["namespaces"], strict=True):
        own, old = rates.get(space["namespace"], {}), olds.get(space["namespace"])
        row |= {"chunks_per_s": own, "gb_per_s": gb_per_s(own, space)}
        row["hit_rate_now"] = hit_rate(space["stats"], old["stats"]) if old is not None else None
    return shown


def _by_name(status: dict[str, Any] | None) -> dict[bytes, dict[str, Any]]:
    return {space["namespace"]: space for space in (status or {"namespaces": ()})["namespaces"]}


def fitted(drawn: RenderableType, console: Console) -> RenderableType:
    """Return the rows that fit on the screen. The last row shows the number of hidden rows."""
    lines = console.render_lines(drawn, pad=False)
    while lines and not "".join(segment.text for segment in lines[-1]).strip():
        lines.pop()
    num_more = len(lines) - console.height
    if num_more <= 0:
        return SegmentLines(lines, new_lines=True)
    more = Text(
        f"{num_more + 1} more rows: make the window taller, or use --json",
        no_wrap=True,
        overflow="ellipsis",
    )
    return Group(SegmentLines(lines[: console.height - 1], new_lines=True), more)


def picture(
    status: dict[str, Any],
    rates: dict[bytes, dict[str, float]],
    before: dict[str, Any] | None = None,
    socket: str = "",
    tag: str | None = None,
) -> Group:
    """Return the tables for one refresh, preceded by rows for the limits and any problems."""
    spaces, olds = [space for space in status["namespaces"] if space["stats"]], _by_name(before)
    bounds = limits_text(status["settings"])
    limits = [Text(f"Limits: {bounds}", no_wrap=True, overflow="ellipsis")] if bounds else []
    if not spaces:
        return Group(*limits, *(Text(line) for line in (*lines(status, socket), NO_ENGINE)))
    limits += [Text(line) for line in (*disk_unused(status), *disk_full(status), *rejected(status))]
    pictures = (
        _picture_of(space, status, rates.get(space["namespace"], {}), olds, tag) for space in spaces
    )
    return Group(*limits, *pictures)


def _picture_of(
    space: dict[str, Any],
    status: dict[str, Any],
    rates: dict[str, float],
    olds: dict[bytes, dict[str, Any]],
    tag: str | None,
) -> RenderableType:
    """Return a namespace's tables in order of importance, because a short screen cuts off the last
    tables.
    """
    flow = [_flow(rates, chunk_bytes(space))] if rates else []
    tables: list[Table | str] = [
        tier_table(space, status),
        *notes(space, disk_problems(space, status)),
        *broken(space, status),
        *flow,
        hit_table(space, olds.get(space["namespace"])),
        engine_table(space),
        *tenant_table(space, MAX_TENANTS, tag),
    ]
    spaced = (part for table in tables for part in (table, ""))
    return Group(title(space["namespace"].hex(), space, status), *spaced)


def _flow(rates: dict[str, float], frame_bytes: float) -> Table:
    """Return a table with two rates per row, so that all rates fit in half of a 24-row screen."""
    table = new_table("per second", "chunks", "GB")
    table.add_column("per second", no_wrap=True)
    for name in ("chunks", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    cells = [
        (shown, f"{rate:,.0f}", f"{rate * frame_bytes / 1e9:,.3f}") for shown, rate in rates.items()
    ]
    half = (len(cells) + 1) // 2
    for left, right in itertools.zip_longest(cells[:half], cells[half:], fillvalue=()):
        table.add_row(*left, *right)
    return table


def interval(text: str) -> float:
    """Parse --interval. Raises ArgumentTypeError."""
    try:
        if (seconds := parse_seconds(text)) >= MIN_INTERVAL_S:
            return seconds
    except HintError as e:
        raise argparse.ArgumentTypeError(f"{text} {e}") from None
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"expected an interval between {MIN_INTERVAL_S:g}s and 1h, got {text!r}"
    )


def count(text: str) -> int:
    """Parse --count. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)
