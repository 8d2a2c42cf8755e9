"""Lookups, hits, loads and saves of a server's engines, for `kvloft status`: per engine, and in total since the start."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvloft.cli.tables import count_text, new_table

Counts = Mapping[str, Any]
"""Numbers of one engine, or of a namespace, by the server's names."""


def hit_rate(counts: Counts, before: Counts | None = None) -> float | None:
    """Chunks found by chunks asked for in lookups, since ``before``; None where none were asked for."""
    asked, found = ((counts.get(name, 0) - (before or {}).get(name, 0)) for name in ("lookup_chunks", "lookup_chunks_found"))
    return found / asked if asked > 0 and found >= 0 else None


def hit_table(space: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Table:
    """A row for all engines of a namespace and one for each, with the rate since the look ``before`` if there is one."""
    names = ["lookups", "asked for", "found", "hit rate", *(["now"] if before is not None else []), "loaded", "saved"]
    table = new_table("chunks", *names)
    old = {engine["pid"]: engine for engine in before["engines"] if engine["pid"]} if before is not None else {}
    now = [hit_rate(space["stats"], before["stats"])] if before is not None else []
    table.add_row("all so far", *_cells(space["stats"], now))
    for engine in space["engines"]:
        now = [hit_rate(engine, old.get(engine["pid"]))] if before is not None else []
        table.add_row(f"process {engine['pid']}", *_cells(engine, now))
    return table


def late_lines(space: Mapping[str, Any]) -> list[str]:
    """One line if engines had answers too late, with the chunks that were not saved for that, and what to do."""
    num_calls, num_chunks = space["stats"]["late_calls"], space["stats"]["late_chunks"]
    if not num_calls:
        return []
    late = f"Late answers: {count_text(num_calls)}; chunks not saved because of them: {count_text(num_chunks)}."
    return [f"{late} The server or the engines lack CPU time; a larger server_timeout helps."]


def _cells(counts: Counts, now: list[float | None]) -> list[str]:
    rates = ["" if rate is None else f"{rate:.1%}" for rate in [hit_rate(counts), *now]]
    asked = [count_text(counts[name]) for name in ("lookups", "lookup_chunks", "lookup_chunks_found")]
    return [*asked, *rates, count_text(counts["load_chunks"]), count_text(counts["save_chunks"])]
