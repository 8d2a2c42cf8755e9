"""Names and help texts of all counters and gauges: the one table of stores, servers and engines.

The code that counts uses these names; vLLM's `/metrics`, `kvloft serve --metrics` and
`docs/metrics.md` take them from here. A test compares all four with a running server. It must not
import anything of kvloft.
"""

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


def _counter(name: str, scope: Scope, text: str) -> Metric:
    return Metric(name, f"{text}.", scope)


def _gauge(name: str, scope: Scope, text: str) -> Metric:
    return Metric(name, f"{text}.", scope, is_gauge=True)


METRICS: Final = (
    # Counted by engines.
    _counter("load_tokens_host", _ENGINE, "Tokens loaded from host memory"),
    _counter("load_tokens_disk", _ENGINE, "Tokens loaded from disk"),
    _counter(
        "disk_slow_tokens",
        _ENGINE,
        "Tokens on disk that were computed, because reading them was expected to take longer",
    ),
    _counter(
        "load_lost_blocks",
        _ENGINE,
        "Blocks offered to vLLM whose chunk was evicted before the load was planned",
    ),
    _counter("loaded_bytes", _ENGINE, "Bytes loaded into paged KV, all ranks"),
    _counter("load_seconds", _ENGINE, "Seconds spent loading, all ranks"),
    _counter("saved_chunks", _ENGINE, "Chunks saved and published"),
    _counter("saved_bytes", _ENGINE, "Bytes saved from paged KV, all ranks"),
    _counter("save_seconds", _ENGINE, "Seconds spent saving, all ranks"),
    _counter(
        "save_dropped_chunks",
        _ENGINE,
        "Saves dropped because no frame was free or the server did not answer",
    ),
    _counter("save_failed_chunks", _ENGINE, "Saves whose copy failed"),
    _counter(
        "save_misfit_chunks",
        _ENGINE,
        "Chunks that compressed too little for their frames; saved in full frames from then on",
    ),
    _counter(
        "load_breaker_trips", _ENGINE, "Times that loads and saves were paused because loads failed"
    ),
    _counter("verify_failures", _ENGINE, "Chunks that failed verification when loaded"),
    _counter(
        "layout_mismatches",
        _ENGINE,
        "Chunks saved by an engine with another memory layout; not loaded, and kept",
    ),
    _counter("hook_errors", _ENGINE, "Errors inside kvloft that were turned into misses"),
    _counter("server_late", _ENGINE, "Requests that the server did not answer in time"),
    _counter(
        "server_late_chunks", _ENGINE, "Chunks not saved because the server did not answer in time"
    ),
    _counter("server_lost", _ENGINE, "Lost connections to the server"),
    # Counted by each store: an engine's own, or a namespace of a server.
    _counter("commits", _SPACE, "Chunks saved and published"),
    _counter("aborts", _SPACE, "Saves that failed"),
    _counter("reserve_dropped", _SPACE, "Saves dropped because no frame was free"),
    _counter("host_evictions", _BOTH, "Chunks evicted from host memory"),
    _counter("disk_evictions", _BOTH, "Chunks evicted from disk"),
    _counter(
        "quota_evictions",
        _BOTH,
        "Chunks evicted from host memory because their tenant was at its quota",
    ),
    _counter(
        "quota_disk_evictions",
        _BOTH,
        "Chunks evicted from disk because their tenant was at its quota",
    ),
    _counter(
        "quota_dropped",
        _BOTH,
        "Operations rejected because the tenant was at its quota and all of its chunks were in use",
    ),
    _counter("expired", _BOTH, "Chunks removed because their time to live had passed"),
    _counter("discards", _SPACE, "Chunks removed because they were damaged or replaced"),
    _counter("cleared", _SPACE, "Chunks removed by clearing the namespace"),
    _counter("evicted", _SPACE, "Chunks removed by kvloft evict"),
    _counter("disk_recovered", _NONE, "Chunks found on disk when the store was opened"),
    _counter("disk_writes", _SPACE, "Chunks written to disk"),
    _counter("disk_bytes_written", _BOTH, "Bytes written to disk"),
    _counter("disk_write_us", _NONE, "Microseconds that disk threads spent writing"),
    _counter("disk_write_errors", _BOTH, "Failed disk writes"),
    _counter("disk_reads", _SPACE, "Chunks read from disk"),
    _counter("disk_bytes_read", _BOTH, "Bytes read from disk"),
    _counter("disk_read_us", _NONE, "Microseconds that disk threads spent reading"),
    _counter(
        "disk_read_busy_us",
        _NONE,
        "Microseconds in which at least one chunk was queued for reading from disk",
    ),
    _counter("disk_read_errors", _BOTH, "Failed disk reads"),
    _counter("disk_verify_failures", _BOTH, "Chunks on disk that failed verification"),
    _counter(
        "disk_dropped",
        _BOTH,
        "Chunks never written to disk, because it was full or they were evicted first",
    ),
    _counter(
        "disk_unwritten", _BOTH, "Chunks evicted from host memory before they were written to disk"
    ),
    _counter("disk_removals", _BOTH, "Times that the disk directory was removed while in use"),
    _counter(
        "disk_trips",
        _BOTH,
        "Times that the circuit breaker of the disk opened after errors or a hang",
    ),
    _gauge("frames_total", _BOTH, "Frames in host memory"),
    _gauge("host_used_bytes", _BOTH, "Bytes of host memory that hold chunks"),
    _gauge("host_raw_bytes", _BOTH, "Bytes that these chunks would take uncompressed"),
    _gauge("host_share_bytes", _SPACE, "Bytes of the namespace's share of host memory"),
    _gauge("frames_visible", _BOTH, "Frames with a published chunk"),
    _gauge("frames_reserved", _BOTH, "Frames being written"),
    _gauge("frames_free", _BOTH, "Free frames"),
    _gauge("entries", _SPACE, "Chunks stored, in any tier"),
    _gauge("pins", _BOTH, "Chunks pinned by loads"),
    _gauge("read_leases", _SPACE, "Prompts with pinned chunks"),
    _gauge("write_leases", _NONE, "Reservations that are not committed or aborted"),
    _gauge("reads_pending", _SPACE, "Chunks queued for reading from disk"),
    _gauge("salts", _SPACE, "Tenants with chunks"),
    _gauge("disk_used", _BOTH, "Chunks on disk"),
    _gauge("disk_used_bytes", _BOTH, "Bytes of chunks on disk"),
    _gauge("disk_raw_bytes", _BOTH, "Bytes that these chunks would take uncompressed"),
    _gauge("disk_pending", _SPACE, "Chunks queued for writing to disk"),
    _gauge("disk_slots", _NONE, "Slots in the files on disk"),
    _gauge("disk_bytes", _SPACE, "Bytes of the namespace's files on disk"),
    _gauge(
        "disk_broken",
        _BOTH,
        "1 while the circuit breaker of the disk is open after errors or a hang",
    ),
    # Counted by a server for each namespace.
    _counter("lookups", _SPACE, "Prefix lookups from engines"),
    _counter("lookup_chunks", _SPACE, "Chunks looked up"),
    _counter("lookup_chunks_found", _SPACE, "Chunks found by lookups, in any tier"),
    _counter("load_chunks", _SPACE, "Chunks loaded by engines"),
    _counter("save_chunks", _NONE, "Chunks saved by engines"),
    _counter(
        "late_calls",
        _SPACE,
        "Requests that the server did not answer in time, as counted by engines",
    ),
    _counter("late_chunks", _SPACE, "Chunks not saved because the server did not answer in time"),
    _gauge("slabs", _SPACE, "Slabs of host memory assigned"),
    _gauge("share_percent", _NONE, "Fixed share of host memory, if one is set"),
    # Counted by a server as a whole.
    _counter("server_accepted", _SERVER, "Connections accepted"),
    _counter("server_joined", _SERVER, "Engines that joined, including reconnections"),
    _counter("server_refused", _SERVER, "Connections refused"),
    _gauge("host_bytes", _SERVER, "Bytes of host memory"),
    _gauge("slab_bytes", _SERVER, "Bytes of one slab"),
    _gauge("engines", _SERVER, "Connected engines"),
    _gauge("server_host_bytes", _SERVER, "Limit of host memory in bytes"),
    _gauge("server_disk_bytes", _SERVER, "Limit of the disk directory in bytes"),
    _gauge("server_disk_unused", _SERVER, "1 while the server cannot use its disk directory"),
    _gauge(
        "server_disk_free_bytes", _SERVER, "Free bytes in the file system of the disk directory"
    ),
    _gauge("server_disk_closed_bytes", _SERVER, "Bytes of closed namespaces on disk"),
    _gauge(
        "quarantined_reservations", _SERVER, "Frames reserved until no process can write to them"
    ),
    _gauge(
        "quarantined_leases",
        _NONE,
        "Leases of lost engines, kept until no process can read their frames",
    ),
)
"""All counters and gauges."""


def exported(scope: Scope) -> list[Metric]:
    """Return the metrics that are exported in ``scope``."""
    return [metric for metric in METRICS if scope in metric.scope]
