"""Lookups, hits, loads and saves since a server's start, per engine and in total."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvloft.cli.tables import count_text, new_table

Counts = Mapping[str, Any]
"""Counters of an engine or a namespace, by the server's names."""


def hit_rate(counts: Counts, before: Counts | None = None) -> float | None:
    """Return chunks found divided by chunks looked up since ``before``; None without lookups."""
    names, old = ("lookup_chunks", "lookup_chunks_found"), before or {}
    asked, found = (counts.get(name, 0) - old.get(name, 0) for name in names)
    return found / asked if asked > 0 and found >= 0 else None


def hit_table(space: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Table:
    """Return a table: the namespace, then each engine, with hit rates since ``before``."""
    now = ["now"] if before is not None else []
    table = new_table(
        "chunks", "lookups", "looked up", "found", "hit rate", *now, "loaded", "saved"
    )
    old = {}
    rows = [("all engines", space["stats"], before and before["stats"])]
    if before is not None:
        old = {engine["pid"]: engine for engine in before["engines"] if engine["pid"]}
    rows += [(f"process {each['pid']}", each, old.get(each["pid"])) for each in space["engines"]]
    for name, counts, earlier in rows:
        rates = [hit_rate(counts, earlier)] if before is not None else []
        table.add_row(name, *_cells(counts, rates))
    return table


def late_lines(space: Mapping[str, Any]) -> list[str]:
    """Return a line about late answers and chunks not saved because of them, if any."""
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
