"""`kvloft serve --metrics`: exports the server's metrics to Prometheus at http://HOST:PORT/metrics.

Reads the data of `kvloft status` on each request; it must not depend on the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvloft.errors import ConfigError
from kvloft.version import BUILD_INFO_HELP, BUILD_LABELS

# Metrics of a namespace, with a label; then those of the server.
COUNTERS: Final = {
    "commits": "Chunks saved and published",
    "aborts": "Saves that failed",
    "reserve_dropped": "Saves dropped because no frame was free",
    "host_evictions": "Chunks evicted from host memory",
    "disk_evictions": "Chunks evicted from disk",
    "quota_evictions": "Chunks evicted from host memory because their tenant was at its quota",
    "quota_disk_evictions": "Chunks evicted from disk because their tenant was at its quota",
    "quota_dropped": "Operations rejected because the tenant was at its quota and all of its chunks were in use",
    "expired": "Chunks removed because their time to live had passed",
    "discards": "Chunks removed because they were damaged or replaced",
    "cleared": "Chunks removed by clearing the namespace",
    "evicted": "Chunks removed by kvloft evict",
    "disk_writes": "Chunks written to disk",
    "disk_bytes_written": "Bytes written to disk",
    "disk_reads": "Chunks read from disk",
    "disk_bytes_read": "Bytes read from disk",
    "disk_write_errors": "Failed disk writes",
    "disk_read_errors": "Failed disk reads",
    "disk_verify_failures": "Chunks on disk that failed verification",
    "disk_dropped": "Chunks never written to disk",
    "disk_unwritten": "Chunks evicted from host memory before they were written to disk",
    "disk_removals": "Times that the disk directory was removed while in use",
    "disk_trips": "Times that the circuit breaker of the disk opened after errors or a hang",
    "lookups": "Prefix lookups from engines",
    "lookup_chunks": "Chunks looked up",
    "lookup_chunks_found": "Chunks found by lookups, in any tier",
    "load_chunks": "Chunks loaded by engines",
    "late_calls": "Requests that the server did not answer in time, as counted by engines",
    "late_chunks": "Chunks not saved because the server did not answer in time",
}
GAUGES: Final = {
    "frames_total": "Frames in the namespace's slabs",
    "frames_share": "Frames in the namespace's share of host memory",
    "frames_visible": "Frames with a published chunk",
    "frames_reserved": "Frames being written",
    "frames_free": "Free frames",
    "entries": "Chunks stored, in any tier",
    "pins": "Chunks pinned by loads",
    "read_leases": "Prompts with pinned chunks",
    "reads_pending": "Chunks queued for reading from disk",
    "salts": "Tenants with chunks",
    "disk_used": "Chunks on disk",
    "disk_pending": "Chunks queued for writing to disk",
    "disk_bytes": "Bytes of the namespace's files on disk",
    "disk_broken": "1 while the circuit breaker of the disk is open after errors or a hang",
}
SERVER_COUNTERS: Final = {
    "server_accepted": "Connections accepted",
    "server_joined": "Engines that joined, including reconnections",
    "server_refused": "Connections refused",
}
SERVER_GAUGES: Final = {
    "server_host_bytes": "Limit of host memory in bytes",
    "server_disk_bytes": "Limit of the disk directory in bytes",
    "server_disk_unused": "1 while the server cannot use its disk directory",
    "server_disk_free_bytes": "Free bytes in the file system of the disk directory",
    "server_disk_closed_bytes": "Bytes of closed namespaces on disk",
    "quarantined_reservations": "Frames reserved until no process can write to them",
}
LABEL: Final = "namespace"


def address(text: str) -> tuple[str, int]:
    """Parse ``PORT`` or ``HOST:PORT``; without a host, 127.0.0.1. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"--metrics {text!r} has no port; use --metrics 9180, or 0.0.0.0:9180 for access from other machines.")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(where: tuple[str, int], status: Callable[[], dict[str, Any]]) -> tuple[str, Callable[[], None]]:
    """Export ``status`` at ``where``; returns the URL and a function that stops it. Raises ConfigError if it cannot listen."""
    # No other command needs this import.
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    try:
        server, thread = start_http_server(where[1], where[0], registry)
    except (OSError, UnicodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "invalid host name"
        raise ConfigError(f"--metrics cannot listen at {where[0]}:{where[1]} ({reason}); use another host or port.") from e

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    return f"http://{host}:{server.server_port}/metrics", end


class _Collector:
    """The collector of prometheus_client."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status()
        spaces = [(space["namespace"].hex()[:16], space) for space in status["namespaces"]]
        for families, names in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in names.items():
                family = families(f"kvloft_{name}", f"{text}.", labels=[LABEL])
                for label, space in spaces:
                    if name in space["stats"]:  # once the store is open
                        family.add_metric([label], space["stats"][name])
                yield family
        for name, text in (("frame_bytes", "Bytes of one frame"), ("slabs", "Slabs of host memory assigned")):
            family = GaugeMetricFamily(f"kvloft_{name}", f"{text}.", labels=[LABEL])
            for label, space in spaces:
                family.add_metric([label], space[name])
            yield family
        for families, names in ((CounterMetricFamily, SERVER_COUNTERS), (GaugeMetricFamily, SERVER_GAUGES)):
            for name, text in names.items():
                if name in status["stats"]:  # disk figures appear after the first measurement
                    yield families(f"kvloft_{name}", f"{text}.", value=status["stats"][name])
        build = GaugeMetricFamily("kvloft_build_info", BUILD_INFO_HELP, labels=list(BUILD_LABELS))
        build.add_metric(list(BUILD_LABELS.values()), 1)
        yield build
        yield GaugeMetricFamily("kvloft_host_bytes", "Bytes of host memory.", value=status["host_bytes"])
        yield GaugeMetricFamily("kvloft_slab_bytes", "Bytes of one slab.", value=status["slab_bytes"])
        num_engines = sum(len(space["engines"]) for _, space in spaces)
        yield GaugeMetricFamily("kvloft_engines", "Connected engines.", value=num_engines)
