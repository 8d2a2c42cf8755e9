"""Names and help texts of all counters and gauges: the one table of stores, servers and engines.

The code that counts uses these names; vLLM's `/metrics`, `kvloft serve --metrics` and
`docs/metrics.md` take them from here. A test compares all four with a running server. It must not
import anything of kvloft.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Flag, auto
from typing import Final


class Scope(Flag):
    """Where a number is exported. `kvloft status --json` also prints numbers without a scope."""

    ENGINE = auto()
    """vLLM's `/metrics`: `vllm:kvloft_NAME`."""
    NAMESPACE = auto()
    """`kvloft serve --metrics`: `kvloft_NAME` with the label `namespace`."""
    SERVER = auto()
    """`kvloft serve --metrics`: `kvloft_NAME` without a label."""


_NONE: Final = Scope(0)
_ENGINE: Final = Scope.ENGINE
_SPACE: Final = Scope.NAMESPACE
_BOTH: Final = Scope.ENGINE | Scope.NAMESPACE
_SERVER: Final = Scope.SERVER


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter, which only grows, or a gauge."""

    name: str
    help_text: str
    scope: Scope
    is_gauge: bool = False


def _counters(rows: dict[str, tuple[Scope, str]]) -> Iterator[Metric]:
    return (Metric(name, f"{text}.", scope) for name, (scope, text) in rows.items())


def _gauges(rows: dict[str, tuple[Scope, str]]) -> Iterator[Metric]:
    return (Metric(name, f"{text}.", scope, is_gauge=True) for name, (scope, text) in rows.items())


METRICS: Final = (
    # Counted by engines.
    *_counters(
        {
            "load_tokens_host": (_ENGINE, "Tokens loaded from host memory"),
            "load_tokens_disk": (_ENGINE, "Tokens loaded from disk"),
            "load_lost_blocks": (_ENGINE, "Blocks offered to vLLM whose chunk was evicted before the load was planned"),
            "loaded_bytes": (_ENGINE, "Bytes loaded into paged KV, all ranks"),
            "load_seconds": (_ENGINE, "Seconds spent loading, all ranks"),
            "saved_chunks": (_ENGINE, "Chunks saved and published"),
            "saved_bytes": (_ENGINE, "Bytes saved from paged KV, all ranks"),
            "save_seconds": (_ENGINE, "Seconds spent saving, all ranks"),
            "save_dropped_chunks": (_ENGINE, "Saves dropped because no frame was free or the server did not answer"),
            "save_failed_chunks": (_ENGINE, "Saves whose copy failed"),
            "load_breaker_trips": (_ENGINE, "Times that loads and saves were paused because loads failed"),
            "verify_failures": (_ENGINE, "Chunks that failed verification when loaded"),
            "layout_mismatches": (_ENGINE, "Chunks saved by an engine with another memory layout; not loaded, and kept"),
            "hook_errors": (_ENGINE, "Errors inside kvloft that were turned into misses"),
            "server_late": (_ENGINE, "Requests that the server did not answer in time"),
            "server_late_chunks": (_ENGINE, "Chunks not saved because the server did not answer in time"),
            "server_lost": (_ENGINE, "Lost connections to the server"),
        }
    ),
    # Counted by each store: an engine's own, or a namespace of a server.
    *_counters(
        {
            "commits": (_SPACE, "Chunks saved and published"),
            "aborts": (_SPACE, "Saves that failed"),
            "reserve_dropped": (_SPACE, "Saves dropped because no frame was free"),
            "host_evictions": (_BOTH, "Chunks evicted from host memory"),
            "disk_evictions": (_BOTH, "Chunks evicted from disk"),
            "quota_evictions": (_BOTH, "Chunks evicted from host memory because their tenant was at its quota"),
            "quota_disk_evictions": (_BOTH, "Chunks evicted from disk because their tenant was at its quota"),
            "quota_dropped": (
                _BOTH,
                "Operations rejected because the tenant was at its quota and all of its chunks were in use",
            ),
            "expired": (_BOTH, "Chunks removed because their time to live had passed"),
            "discards": (_SPACE, "Chunks removed because they were damaged or replaced"),
            "cleared": (_SPACE, "Chunks removed by clearing the namespace"),
            "evicted": (_SPACE, "Chunks removed by kvloft evict"),
            "disk_recovered": (_NONE, "Chunks found on disk when the store was opened"),
            "disk_writes": (_SPACE, "Chunks written to disk"),
            "disk_bytes_written": (_BOTH, "Bytes written to disk"),
            "disk_write_us": (_NONE, "Microseconds that disk threads spent writing"),
            "disk_write_errors": (_BOTH, "Failed disk writes"),
            "disk_reads": (_SPACE, "Chunks read from disk"),
            "disk_bytes_read": (_BOTH, "Bytes read from disk"),
            "disk_read_us": (_NONE, "Microseconds that disk threads spent reading"),
            "disk_read_busy_us": (_NONE, "Microseconds in which at least one chunk was queued for reading from disk"),
            "disk_read_errors": (_BOTH, "Failed disk reads"),
            "disk_verify_failures": (_BOTH, "Chunks on disk that failed verification"),
            "disk_dropped": (_BOTH, "Chunks never written to disk, because it was full or they were evicted first"),
            "disk_unwritten": (_BOTH, "Chunks evicted from host memory before they were written to disk"),
            "disk_removals": (_BOTH, "Times that the disk directory was removed while in use"),
            "disk_trips": (_BOTH, "Times that the circuit breaker of the disk opened after errors or a hang"),
        }
    ),
    *_gauges(
        {
            "frames_total": (_BOTH, "Frames in host memory"),
            "frames_share": (_SPACE, "Frames in the namespace's share of host memory"),
            "frames_visible": (_BOTH, "Frames with a published chunk"),
            "frames_reserved": (_BOTH, "Frames being written"),
            "frames_free": (_BOTH, "Free frames"),
            "entries": (_SPACE, "Chunks stored, in any tier"),
            "pins": (_BOTH, "Chunks pinned by loads"),
            "read_leases": (_SPACE, "Prompts with pinned chunks"),
            "write_leases": (_NONE, "Reservations that are not committed or aborted"),
            "reads_pending": (_SPACE, "Chunks queued for reading from disk"),
            "salts": (_SPACE, "Tenants with chunks"),
            "disk_used": (_BOTH, "Chunks on disk"),
            "disk_pending": (_SPACE, "Chunks queued for writing to disk"),
            "disk_slots": (_NONE, "Slots in the files on disk"),
            "disk_bytes": (_SPACE, "Bytes of the namespace's files on disk"),
            "disk_broken": (_BOTH, "1 while the circuit breaker of the disk is open after errors or a hang"),
        }
    ),
    # Counted by a server for each namespace.
    *_counters(
        {
            "lookups": (_SPACE, "Prefix lookups from engines"),
            "lookup_chunks": (_SPACE, "Chunks looked up"),
            "lookup_chunks_found": (_SPACE, "Chunks found by lookups, in any tier"),
            "load_chunks": (_SPACE, "Chunks loaded by engines"),
            "save_chunks": (_NONE, "Chunks saved by engines"),
            "late_calls": (_SPACE, "Requests that the server did not answer in time, as counted by engines"),
            "late_chunks": (_SPACE, "Chunks not saved because the server did not answer in time"),
        }
    ),
    *_gauges(
        {
            "frame_bytes": (_SPACE, "Bytes of one frame"),
            "slabs": (_SPACE, "Slabs of host memory assigned"),
            "share_percent": (_NONE, "Fixed share of host memory, if one is set"),
        }
    ),
    # Counted by a server as a whole.
    *_counters(
        {
            "server_accepted": (_SERVER, "Connections accepted"),
            "server_joined": (_SERVER, "Engines that joined, including reconnections"),
            "server_refused": (_SERVER, "Connections refused"),
        }
    ),
    *_gauges(
        {
            "host_bytes": (_SERVER, "Bytes of host memory"),
            "slab_bytes": (_SERVER, "Bytes of one slab"),
            "engines": (_SERVER, "Connected engines"),
            "server_host_bytes": (_SERVER, "Limit of host memory in bytes"),
            "server_disk_bytes": (_SERVER, "Limit of the disk directory in bytes"),
            "server_disk_unused": (_SERVER, "1 while the server cannot use its disk directory"),
            "server_disk_free_bytes": (_SERVER, "Free bytes in the file system of the disk directory"),
            "server_disk_closed_bytes": (_SERVER, "Bytes of closed namespaces on disk"),
            "quarantined_reservations": (_SERVER, "Frames reserved until no process can write to them"),
            "quarantined_leases": (_NONE, "Leases of lost engines, kept until no process can read their frames"),
        }
    ),
)
"""All counters and gauges."""


def exported(scope: Scope) -> list[Metric]:
    """Return the metrics that are exported in ``scope``."""
    return [metric for metric in METRICS if scope in metric.scope]
