"""Formats the first lines of `kvloft status`: health, host memory, disk, engines and hit rate.

All figures come from one `_core.server_status` call. The server measures the file system's free
space every few seconds.
"""

from collections import Counter
from typing import Any, Final

from kvloft.cli.admin import NONE, counted
from kvloft.cli.tables import Status, broken, disk_unused, hit_rate, rejected
from kvloft.config.units import size_text

GROWTH_BYTES: Final = 64 << 20
"""Disk files grow in steps of about this size."""


def figures(status: Status) -> dict[str, Any]:
    """Return the figures for --json.

    The figures are the stored and uncompressed sizes of the chunks in host memory, the size of the
    disk files, both size limits, the disk path, its file system's free space (None if unknown), the
    number of engines, the overall hit rate, and a sentence for each problem.
    """
    stats, spaces = status["stats"], [space for space in status["namespaces"] if space["stats"]]
    path = status["settings"].get("disk_path", NONE)
    sums = Counter[str]()
    for space in spaces:
        sums.update(space["stats"])
    found = {
        "host_used_bytes": sums["host_used_bytes"],
        "host_raw_bytes": sums["host_raw_bytes"],
        "host_size_bytes": stats["server_host_bytes"],
        "disk_path": path if path != NONE else None,
        "disk_files_bytes": sums["disk_bytes"] + stats.get("server_disk_closed_bytes", 0),
        "disk_size_bytes": stats["server_disk_bytes"],
        "disk_free_bytes": stats.get("server_disk_free_bytes"),
        "engines": sum(len(space["engines"]) for space in status["namespaces"]),
        "hit_rate": hit_rate(sums),
    }
    fails = {line for space in spaces for line in broken(space, status)}
    problems = [*disk_unused(status), *disk_full(status, found), *rejected(status), *sorted(fails)]
    return found | {"problems": problems}


def as_json(status: Status, tag: str | None = None) -> dict[str, Any]:
    """Return the output of --json: the status, `figures`, hit rates, and the salt's tag, if any."""
    spaces = [
        space | {"namespace": space["namespace"].hex(), "hit_rate": hit_rate(space["stats"])}
        for space in status["namespaces"]
    ]
    tagged = {"salt_tag": tag} if tag is not None else {}
    return {**status, **figures(status), "namespaces": spaces, **tagged}


def lines(status: Status, socket: str) -> list[str]:
    """Return the lines to print: the server's health, its problems, and one line per figure."""
    found, num_spaces = figures(status), len(status["namespaces"])
    problems, num_engines = found["problems"], found["engines"]
    well = f"has {counted(len(problems), 'problem')}" if problems else "is healthy"
    in_spaces = f", in {counted(num_spaces, 'namespace')}" if num_spaces else ""
    return [
        f"The kvloft server at unix:{socket} {well}{':' if problems else '.'}",
        *problems,
        f"host memory: {_host(found)}",
        f"disk: {_disk(status, found)}",
        *([f"disk path: {found['disk_path']}"] if found["disk_path"] is not None else []),
        f"engines: {num_engines:,} connected{in_spaces}",
        f"hit rate: {_hits(status, found['hit_rate'])}",
    ]


def disk_full(status: Status, found: dict[str, Any] | None = None) -> list[str]:
    """Return a message if the file system is full but the directory is below its size limit."""
    found = found or figures(status)
    free, left = found["disk_free_bytes"], found["disk_size_bytes"] - found["disk_files_bytes"]
    if free is None or free >= min(left, GROWTH_BYTES):
        return []
    disk = found["disk_path"] or "the disk tier"
    what = f"The file system holding {disk} is full ({size_text(free)} free)"
    return [f"{what}: new chunks replace old chunks on disk or are dropped."]


def disk_problems(space: Status, status: Status) -> list[str]:
    """Return a line for each problem with the disk: not in use, full, or paused."""
    return [*disk_unused(status), *disk_full(status), *broken(space, status)]


def _part(used: int, size: int) -> str:
    return f"{size_text(used)} of {size_text(size)} ({used / max(size, 1):.1%})"


def _host(found: dict[str, Any]) -> str:
    used, raw = found["host_used_bytes"], found["host_raw_bytes"]
    more = f"; {size_text(raw)} uncompressed ({raw / used:.2f}x)" if raw > used > 0 else ""
    return f"{_part(used, found['host_size_bytes'])} used{more}"


def _disk(status: Status, found: dict[str, Any]) -> str:
    if not found["disk_size_bytes"]:
        return "none"
    if disk_unused(status):
        return f"not in use; limit {size_text(found['disk_size_bytes'])}"
    free = ""
    if found["disk_free_bytes"] is not None:
        free = f"; its file system has {size_text(found['disk_free_bytes'])} free"
    return f"{_part(found['disk_files_bytes'], found['disk_size_bytes'])} in files{free}"


def _hits(status: Status, rate: float | None) -> str:
    if rate is None:
        return "no lookups yet"
    asked = sum(space["stats"].get("lookup_chunks", 0) for space in status["namespaces"])
    return f"{rate:.1%} of {asked:,} chunks looked up"
