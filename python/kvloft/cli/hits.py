"""Lookups, hits, loads and saves of a server's engines, for `kvloft status`: per engine, and in
total since the start.
"""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvloft.cli.tables import count_text, new_table

Counts = Mapping[str, Any]
"""Counters of an engine or a namespace, by the server's names."""


def hit_rate(counts: Counts, before: Counts | None = None) -> float | None:
    """Return chunks found divided by chunks looked up since ``before``; None without lookups."""
    asked, found = (
        (counts.get(name, 0) - (before or {}).get(name, 0))
        for name in ("lookup_chunks", "lookup_chunks_found")
    )
    return found / asked if asked > 0 and found >= 0 else None


def hit_table(space: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Table:
    """Return a table with a row for the namespace and one per engine, with the hit rate since
    ``before`` if given.
    """
    names = [
        "lookups",
        "looked up",
        "found",
        "hit rate",
        *(["now"] if before is not None else []),
        "loaded",
        "saved",
    ]
    table = new_table("chunks", *names)
    old = (
        {engine["pid"]: engine for engine in before["engines"] if engine["pid"]}
        if before is not None
        else {}
    )
    now = [hit_rate(space["stats"], before["stats"])] if before is not None else []
    table.add_row("all engines", *_cells(space["stats"], now))
    for engine in space["engines"]:
        now = [hit_rate(engine, old.get(engine["pid"]))] if before is not None else []
        table.add_row(f"process {engine['pid']}", *_cells(engine, now))
    return table


def late_lines(space: Mapping[str, Any]) -> list[str]:
    """Return a line with late answers, the chunks not saved because of them, and the fix; empty
    without late answers.
    """
    num_calls, num_chunks = space["stats"]["late_calls"], space["stats"]["late_chunks"]
    if not num_calls:
        return []
    late = (
        f"Late answers: {count_text(num_calls)}; chunks not saved because of them: "
        f"{count_text(num_chunks)}."
    )
    return [f"{late} The server or the engines lack CPU time; a larger server_timeout helps."]


def _cells(counts: Counts, now: list[float | None]) -> list[str]:
    rates = ["" if rate is None else f"{rate:.1%}" for rate in [hit_rate(counts), *now]]
    asked = [
        count_text(counts[name]) for name in ("lookups", "lookup_chunks", "lookup_chunks_found")
    ]
    return [*asked, *rates, count_text(counts["load_chunks"]), count_text(counts["save_chunks"])]
