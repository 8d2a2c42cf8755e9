"""Formats the tables of `kvloft status` for tiers, hits, tenants and engines, in 80 columns."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from kvloft.cli.admin import counted
from kvloft.config.units import format_ttl, size_text

Status = Mapping[str, Any]
"""The result of `_core.server_status`, or one of its namespaces."""
ID_DIGITS = 16
"""Number of digits of a namespace id that are printed. `clear`, `evict` and `--share` accept any
prefix.
"""
Counts = Mapping[str, Any]
"""An engine's or namespace's counters, by name."""
NO_ENGINE = "No engine has connected yet, so no memory is in use."
MAX_WHOLE = 1_000_000
"""Numbers of at least this size are printed with a unit."""


def count_text(number: int) -> str:
    """Format a number below 10^15 in at most seven characters: "999,999", "1.23 M"."""
    if number < MAX_WHOLE:
        return f"{number:,}"
    value = float(number)
    for unit in ("k", "M", "G"):
        value /= 1000
        if value < 999.5 and unit != "k":
            return f"{value:.3g} {unit}"
    return f"{value / 1000:,.3g} T"


def new_table(first: str, *names: str) -> Table:
    """Return a table with row names in column ``first`` and numbers in the other columns."""
    numbers = (Column(name, justify="right", no_wrap=True) for name in names)
    return Table(
        Column(first, no_wrap=True),
        *numbers,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def title(namespace: str, space: Status, status: Status) -> str:
    """Return a namespace's heading: its id, assigned host memory and share."""
    has = size_text(space["slabs"] * status["slab_bytes"])
    everything = size_text(status["host_bytes"])
    percent = space["stats"].get("share_percent")
    share = f", share {percent}%" if percent is not None else ""
    return f"namespace {namespace[:ID_DIGITS]}: assigned {has} of {everything} host memory{share}"


def field_table(fields: Mapping[str, str] | str) -> Table | Text:
    """Return a table of a namespace's fields, two per row, or ``fields`` itself as text if it is a
    string.
    """
    if isinstance(fields, str):
        return Text(fields)
    table = Table(
        *(Column(overflow="fold") for _ in range(4)), box=None, show_header=False, pad_edge=False
    )
    cells = [Text(str(part)) for field in fields.items() for part in field]
    for at in range(0, len(cells), 4):
        table.add_row(*cells[at : at + 4])
    return table


def disk_unused(status: Status) -> list[str]:
    """Return a message if the server cannot use its disk directory."""
    if not status["stats"]["server_disk_unused"]:
        return []
    disk = status["settings"].get("disk_path", "")
    reason = status["disk_trouble"] or "it is being opened"
    reason = reason.removeprefix(f"disk_path {disk} is not used: ")
    return [f"The disk {disk} is not in use: {reason}."]


def rejected(status: Status) -> list[str]:
    """Return a message for each namespace whose engines the server rejects."""
    return [
        f"The server rejected {counted(each['count'], 'connection')} from engines in namespace "
        f"{each['namespace']}: {each['reason']}. These engines keep retrying."
        for each in status["refusals"]
    ]


def tier_table(space: Status, status: Status) -> Table:
    """Return a table of each tier's chunk counts, size, fill level and queued I/O."""
    stats = space["stats"]
    table = new_table(
        "tier", "chunks", "bytes", "of size", "reading", "writing", "in use", "evicted"
    )
    tiers = {  # counters for the columns chunks, reading, writing, in use, evicted
        "host": ("frames_visible", "", "frames_reserved", "pins", "host_evictions"),
        "disk": ("disk_used", "reads_pending", "disk_pending", "", "disk_evictions"),
    }
    for name, counters in tiers.items():
        used, size = stats[f"{name}_used_bytes"], status["stats"][f"server_{name}_bytes"]
        part = f"{used / size:.1%}" if size else ""
        num, *rest = (count_text(stats[counter]) if counter else "" for counter in counters)
        table.add_row(name, num, size_text(used), part, *rest)
    return table


def broken(space: Status, status: Status) -> list[str]:
    """Return a message if the disk tier is paused, unless `disk_unused` reports the reason."""
    is_paused = space["stats"]["disk_broken"] and not disk_unused(status)
    return ["The disk tier is paused because I/O is failing; retrying."] if is_paused else []


def notes(space: Status, disk_problems: list[str]) -> list[str]:
    """Return a line for each reason why chunks are missing, with the number of chunks affected.

    ``disk_problems`` holds the lines that explain why chunks were not written to disk.
    """
    stats, found = space["stats"], []
    if num := stats.get("evicted", 0):
        found.append(f"{counted(num, 'chunk')} removed by `kvloft evict`")
    if num := stats.get("disk_dropped", 0):
        line = f"{counted(num, 'chunk')} never written to disk"
        if (num_slow := stats.get("disk_unwritten", 0)) and not disk_problems:
            line += (
                f"; {num_slow:,} were evicted first because disk writes cannot keep up with saves"
            )
        found.append(line)
    if num := stats.get("late_calls", 0):
        found.append(
            f"Late responses: {count_text(num)}; delayed saves: "
            f"{count_text(stats['late_chunks'])} chunks. Give the server and engines more cores; "
            "a longer server_timeout helps only lookups."
        )
    return found


def whose(tag: str, spaces: list[dict[str, Any]]) -> str:
    """Return a line that says whether the tenant with this tag is in the table."""
    if any(tenant["tag"] == tag for space in spaces for tenant in space["tenants"]):
        return f"The salt's tag is {tag}, marked * below."
    num_listed = [sum(tenant["tag"] is not None for tenant in space["tenants"]) for space in spaces]
    are_all = all(
        space["stats"].get("salts", 0) <= num for space, num in zip(spaces, num_listed, strict=True)
    )
    fact = "has no chunks in open namespaces" if are_all else "is not among the largest"
    return f"The salt's tag is {tag}; the tenant {fact}."


def tenant_table(space: Status, limit: int, marked: str | None = None) -> list[Table | str]:
    """Return a table of the largest tenants, or an empty list if there are no salts or limits."""
    tenants = space["tenants"][:limit]
    limits = ("max_host_bytes", "max_disk_bytes", "ttl_s")
    if not any(
        tenant["tag"] or any(tenant[name] is not None for name in limits) for tenant in tenants
    ):
        return []
    table = new_table("salt's tag", "host", "host quota", "disk", "disk quota", "expires after")
    for tenant in tenants:
        bounds = (tenant["max_host_bytes"], tenant["max_disk_bytes"])
        most = [size_text(each) if each is not None else "" for each in bounds]
        held, on_disk = (size_text(tenant[name]) for name in ("host_bytes", "disk_bytes"))
        ttl = format_ttl(tenant["ttl_s"]) if tenant["ttl_s"] is not None else ""
        tag = tenant["tag"] or "(no salt)"
        table.add_row(f"{tag} *" if tag == marked else tag, held, most[0], on_disk, most[1], ttl)
    more = space["stats"]["salts"] - sum(tenant["tag"] is not None for tenant in tenants)
    return [table, f"and {more:,} smaller tenant{'s' if more > 1 else ''}"] if more > 0 else [table]


def engine_table(space: Status) -> Table | str:
    """Return a table of the connected engines and their reservations and leases."""
    if not space["engines"]:
        return "No engines are connected."
    table = new_table("engine", "connected", "saving", "loading")
    for engine in space["engines"]:
        held = (count_text(engine["reservations"]), count_text(engine["leases"]))
        table.add_row(f"process {engine['pid']}", f"{engine['connected_ms'] / 1000:,.0f} s", *held)
    return table


def hit_rate(counts: Counts, before: Counts | None = None) -> float | None:
    """Return the fraction of looked-up chunks that were found since ``before``, or None if there
    were no lookups.
    """
    names, old = ("lookup_chunks", "lookup_chunks_found"), before or {}
    asked, found = (counts.get(name, 0) - old.get(name, 0) for name in names)
    return found / asked if asked > 0 and found >= 0 else None


def hit_table(space: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Table:
    """Return a table of hits for a namespace and its engines, with the hit rates since ``before``
    if it is given.
    """
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


def _cells(counts: Counts, now: list[float | None]) -> list[str]:
    rates = ["" if rate is None else f"{rate:.1%}" for rate in [hit_rate(counts), *now]]
    asked = [
        count_text(counts[name]) for name in ("lookups", "lookup_chunks", "lookup_chunks_found")
    ]
    return [*asked, *rates, count_text(counts["load_chunks"]), count_text(counts["save_chunks"])]
