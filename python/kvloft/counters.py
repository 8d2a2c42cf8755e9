"""Names and help texts of all store, server and engine metrics.

vLLM's `/metrics` and `kvloft serve --metrics` export these metrics. A test checks that stores,
servers and docs/metrics.md use these names. This module must not import any other kvloft module.
"""

from dataclasses import dataclass
from enum import Flag, auto
from typing import Final


class Scope(Flag):
    """Determines where a metric is exported. `kvloft status --json` also prints metrics that have
    no scope.
    """

    ENGINE = auto()
    """Exported by vLLM's `/metrics` as `vllm:kvloft_NAME`."""
    NAMESPACE = auto()
    """Exported by `kvloft serve --metrics` as `kvloft_NAME` with the label `namespace`."""
    SERVER = auto()
    """Exported by `kvloft serve --metrics` as `kvloft_NAME` without a label."""


_NONE: Final = Scope(0)
_ENGINE: Final = Scope.ENGINE
_SPACE: Final = Scope.NAMESPACE
_BOTH: Final = Scope.ENGINE | Scope.NAMESPACE
_SERVER: Final = Scope.SERVER


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter, or a gauge if ``is_gauge`` is True."""

    name: str
    help_text: str
    scope: Scope
    is_gauge: bool = False


def _counter(name: str, scope: Scope, text: str) -> Metric:
    return Metric(name, f"{text}.", scope)


def _gauge(name: str, scope: Scope, text: str) -> Metric:
    return Metric(name, f"{text}.", scope, is_gauge=True)


METRICS: Final = (
    # Metrics that each engine counts.
    _counter("load_tokens_host", _ENGINE, "Number of prompt tokens loaded from host memory"),
    _counter("load_tokens_disk", _ENGINE, "Number of prompt tokens loaded from disk"),
    _counter(
        "disk_slow_tokens",
        _ENGINE,
        "Number of prompt tokens recomputed because reading from disk was expected to be slower",
    ),
    _counter(
        "load_lost_blocks",
        _ENGINE,
        "Number of blocks that were offered to vLLM but evicted before the load was planned",
    ),
    _counter("loaded_bytes", _ENGINE, "Number of uncompressed bytes loaded, summed over all ranks"),
    _counter(
        "load_seconds", _ENGINE, "Time that loads spent copying, in seconds, summed over all ranks"
    ),
    _counter("saved_chunks", _ENGINE, "Number of chunks saved and published"),
    _counter("saved_bytes", _ENGINE, "Number of uncompressed bytes saved, summed over all ranks"),
    _counter(
        "save_seconds", _ENGINE, "Time that saves spent copying, in seconds, summed over all ranks"
    ),
    _counter(
        "save_dropped_chunks",
        _ENGINE,
        "Number of chunks not saved because no frame was free or the server did not respond",
    ),
    _counter(
        "save_blocked_requests",
        _ENGINE,
        "Number of requests whose saves were stopped because their KV may be wrong or outdated",
    ),
    _counter("save_failed_chunks", _ENGINE, "Number of chunks not saved because the copy failed"),
    _counter(
        "save_misfit_chunks",
        _ENGINE,
        "Number of chunks not saved because they did not fit in a compressed-chunk frame; the "
        "next save uses a full-size frame",
    ),
    _counter(
        "load_breaker_trips",
        _ENGINE,
        "Number of times that saves and loads were paused after failed loads",
    ),
    _counter(
        "verify_failures",
        _ENGINE,
        "Number of chunks that failed verification during a load",
    ),
    _counter(
        "layout_mismatches",
        _ENGINE,
        "Number of chunks not loaded because their memory layout differs from the engine's",
    ),
    _counter("hook_errors", _ENGINE, "Number of errors inside kvloft that were treated as misses"),
    _counter("server_late", _ENGINE, "Number of late responses from the server"),
    _counter(
        "server_late_chunks",
        _ENGINE,
        "Number of chunks whose saves were delayed because the server responded late",
    ),
    _counter("server_lost", _ENGINE, "Number of lost connections to the server"),
    _gauge("server_connected", _ENGINE, "1 while the engine is connected to the server"),
    # Metrics that each store counts. There is one store per engine or, on a server, per namespace.
    _counter("commits", _SPACE, "Number of chunks saved and published"),
    _counter("aborts", _SPACE, "Number of failed saves"),
    _counter("reserve_dropped", _SPACE, "Number of saves dropped because no frame was free"),
    _counter("host_evictions", _BOTH, "Number of chunks evicted from host memory"),
    _counter("disk_evictions", _BOTH, "Number of chunks evicted from disk"),
    _counter(
        "quota_evictions",
        _BOTH,
        "Number of chunks evicted from host memory because their tenant was at its quota",
    ),
    _counter(
        "quota_disk_evictions",
        _BOTH,
        "Number of chunks evicted from disk because their tenant was at its quota",
    ),
    _counter(
        "quota_dropped",
        _BOTH,
        "Number of operations rejected because the tenant was at its quota and all of its chunks "
        "were in use",
    ),
    _counter("expired", _BOTH, "Number of chunks removed because their TTL had expired"),
    _counter("discards", _SPACE, "Number of chunks removed because they were damaged or replaced"),
    _counter("cleared", _SPACE, "Number of chunks removed by clearing the namespace"),
    _counter("evicted", _SPACE, "Number of chunks removed by kvloft evict"),
    _counter("disk_recovered", _NONE, "Number of chunks found on disk when the store was opened"),
    _counter("disk_writes", _SPACE, "Number of chunks written to disk"),
    _counter("disk_bytes_written", _BOTH, "Number of bytes written to disk"),
    _counter("disk_write_us", _NONE, "Time that disk threads spent writing, in microseconds"),
    _counter(
        "disk_write_errors",
        _BOTH,
        "Number of failed disk writes, excluding failures caused by a full disk",
    ),
    _counter("disk_reads", _SPACE, "Number of chunks read from disk"),
    _counter("disk_bytes_read", _BOTH, "Number of bytes read from disk"),
    _counter("disk_read_us", _NONE, "Time that disk threads spent reading, in microseconds"),
    _counter(
        "disk_read_busy_us",
        _NONE,
        "Time during which at least one disk read was pending, in microseconds",
    ),
    _counter("disk_read_errors", _BOTH, "Number of failed disk reads"),
    _counter("disk_verify_failures", _BOTH, "Number of chunks on disk that failed verification"),
    _counter("disk_dropped", _BOTH, "Number of chunks that were never written to disk"),
    _counter(
        "disk_unwritten",
        _BOTH,
        "Number of chunks evicted from host memory before they were written to disk",
    ),
    _counter(
        "disk_removals", _BOTH, "Number of times that the disk directory was removed while in use"
    ),
    _counter("disk_trips", _BOTH, "Number of times that the disk tier's circuit breaker opened"),
    _gauge("frames_total", _BOTH, "Number of frames in host memory"),
    _gauge("host_used_bytes", _BOTH, "Total size of chunks in host memory, in bytes"),
    _gauge("host_raw_bytes", _BOTH, "Total uncompressed size of chunks in host memory, in bytes"),
    _gauge("host_share_bytes", _SPACE, "The namespace's share of host memory, in bytes"),
    _gauge("frames_visible", _BOTH, "Number of frames holding a published chunk"),
    _gauge("frames_reserved", _BOTH, "Number of frames being filled"),
    _gauge("frames_free", _BOTH, "Number of free frames"),
    _gauge("entries", _SPACE, "Number of chunks stored in any tier"),
    _gauge("pins", _BOTH, "Number of chunks pinned by loads"),
    _gauge("read_leases", _SPACE, "Number of prompts with pinned chunks"),
    _gauge("write_leases", _NONE, "Number of reservations not yet committed or aborted"),
    _gauge("reads_pending", _SPACE, "Number of queued disk reads"),
    _gauge("salts", _SPACE, "Number of tenants with chunks"),
    _gauge("disk_used", _BOTH, "Number of chunks on disk"),
    _gauge("disk_used_bytes", _BOTH, "Total size of chunks on disk, in bytes"),
    _gauge("disk_raw_bytes", _BOTH, "Total uncompressed size of chunks on disk, in bytes"),
    _gauge("disk_pending", _SPACE, "Number of queued disk writes"),
    _gauge("disk_slots", _NONE, "Number of slots in the disk files"),
    _gauge("disk_bytes", _SPACE, "Total size of the namespace's disk files, in bytes"),
    _gauge(
        "disk_broken",
        _BOTH,
        "1 while the disk tier's circuit breaker is open or the disk tier is closed",
    ),
    # Metrics that a server counts for each namespace.
    _counter("lookups", _SPACE, "Number of prefix lookups from engines"),
    _counter("lookup_chunks", _SPACE, "Number of chunks looked up"),
    _counter("lookup_chunks_found", _SPACE, "Number of chunks that lookups found in any tier"),
    _counter("load_chunks", _SPACE, "Number of chunks loaded by engines"),
    _counter("save_chunks", _NONE, "Number of chunks saved by engines"),
    _counter(
        "late_calls", _SPACE, "Number of late responses from the server, as reported by engines"
    ),
    _counter(
        "late_chunks",
        _SPACE,
        "Number of chunks whose saves were delayed because the server responded late",
    ),
    _gauge("slabs", _SPACE, "Number of slabs assigned to the namespace"),
    _gauge("share_percent", _NONE, "Fixed share of host memory in percent, if configured"),
    # Metrics of the server as a whole.
    _counter("server_accepted", _SERVER, "Number of accepted connections"),
    _counter(
        "server_joined", _SERVER, "Number of accepted engine connections, including reconnections"
    ),
    _counter("server_refused", _SERVER, "Number of rejected connections"),
    _gauge("host_bytes", _SERVER, "Size of the server's host memory, in bytes"),
    _gauge("slab_bytes", _SERVER, "Slab size, in bytes"),
    _gauge("engines", _SERVER, "Number of connected engines"),
    _gauge("server_host_bytes", _SERVER, "Host memory limit, in bytes"),
    _gauge("server_disk_bytes", _SERVER, "Disk directory size limit, in bytes"),
    _gauge("server_disk_unused", _SERVER, "1 while the disk directory is unusable"),
    _gauge("server_disk_free_bytes", _SERVER, "Free space on the disk's file system, in bytes"),
    _gauge("server_disk_closed_bytes", _SERVER, "Size of closed namespaces on disk, in bytes"),
    _gauge(
        "quarantined_reservations",
        _SERVER,
        "Number of frames that stay reserved until all of a dead engine's processes exit",
    ),
    _gauge(
        "quarantined_leases",
        _NONE,
        "Number of dead engines' leases kept until no process can read their frames",
    ),
)


def exported(scope: Scope) -> list[Metric]:
    """Return the metrics whose scope is ``scope``."""
    return [metric for metric in METRICS if scope in metric.scope]
