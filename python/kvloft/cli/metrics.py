"""`kvloft serve --metrics`: the server's numbers for Prometheus, at http://HOST:PORT/metrics.

Reads what `kvloft status` reads, when it is asked; knows nothing of the store but names of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvloft.errors import ConfigError
from kvloft.version import BUILD_INFO_HELP, BUILD_LABELS

# Of each namespace, with a label that says which; then of the server.
COUNTERS: Final = {
    "commits": "Chunks saved and visible",
    "aborts": "Saves that came to nothing",
    "reserve_dropped": "Saves that found no frame",
    "host_evictions": "Chunks evicted from host memory",
    "disk_evictions": "Chunks evicted from disk",
    "quota_evictions": "Chunks of those evicted from host memory that left because their salt had its quota",
    "quota_disk_evictions": "Chunks of those evicted from disk that left because their salt had its quota",
    "quota_dropped": "Tries to save, load or write a chunk while its salt had its quota, all of it in use",
    "expired": "Chunks forgotten because they were saved too long ago",
    "discards": "Chunks forgotten because they were wrong, or replaced",
    "cleared": "Chunks forgotten because an engine or a person asked for it",
    "evicted": "Chunks evicted because a person asked for it",
    "disk_writes": "Chunks written to disk",
    "disk_bytes_written": "Bytes written to disk",
    "disk_reads": "Chunks read from disk",
    "disk_bytes_read": "Bytes read from disk",
    "disk_write_errors": "Writes to disk that failed",
    "disk_read_errors": "Reads from disk that failed",
    "disk_verify_failures": "Chunks on disk whose bytes were not what their key says",
    "disk_dropped": "Chunks that never reached disk",
    "disk_unwritten": "Chunks evicted from host memory before they were written to disk",
    "disk_removals": "Times that the disk directory was removed while it was in use",
    "disk_trips": "Times that the disk tier was left alone after errors or a hang",
    "lookups": "Questions of engines how much of a prompt is there",
    "lookup_chunks": "Chunks that they asked for",
    "lookup_chunks_found": "Chunks of those that were there, in any tier",
    "load_chunks": "Chunks that engines took to load them",
    "late_calls": "Calls that the server did not answer in time, as counted by the engines",
    "late_chunks": "Chunks not saved because the server did not answer in time",
}
GAUGES: Final = {
    "frames_total": "Frames in the slabs that it has of host memory",
    "frames_share": "Frames that it may have while other namespaces want memory, too",
    "frames_visible": "Frames that hold a visible chunk",
    "frames_reserved": "Frames being written",
    "frames_free": "Frames that hold nothing",
    "entries": "Chunks that can be found, in any tier",
    "pins": "Chunks pinned by readers",
    "read_leases": "Prompts whose chunks are pinned",
    "reads_pending": "Chunks that wait to be read from disk",
    "salts": "Salts that have something here",
    "disk_used": "Chunks on disk",
    "disk_pending": "Chunks on their way to disk",
    "disk_bytes": "Bytes of its files on disk",
    "disk_broken": "1 while the disk tier is left alone after errors or a hang",
}
SERVER_COUNTERS: Final = {
    "server_accepted": "Connections that were accepted",
    "server_joined": "Engines that connected, again after each break",
    "server_refused": "Connections that were refused",
}
SERVER_GAUGES: Final = {
    "server_host_bytes": "Bytes of host memory that the server may take",
    "server_disk_bytes": "Bytes that the disk directory may take",
    "server_disk_unused": "1 while the disk directory is another's, or cannot be used for another reason",
    "server_disk_free_bytes": "Bytes free in the disk directory's file system, while the server has that directory",
    "server_disk_closed_bytes": "Bytes that namespaces have on disk which are not open",
    "quarantined_reservations": "Frames kept until nothing can write to them",
}
LABEL: Final = "namespace"


def address(text: str) -> tuple[str, int]:
    """Host and port of ``PORT`` or ``HOST:PORT``; only this machine may ask where no host is named. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"--metrics {text!r} names no port; say --metrics 9180, or 0.0.0.0:9180 for other machines too.")
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(where: tuple[str, int], status: Callable[[], dict[str, Any]]) -> tuple[str, Callable[[], None]]:
    """Answer at ``where`` with what ``status`` says; returns the URL and what ends it. Raises ConfigError if it cannot listen."""
    # Here and not above: no other command needs it.
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    try:
        server, thread = start_http_server(where[1], where[0], registry)
    except (OSError, UnicodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "this is no name of a host"
        raise ConfigError(f"--metrics cannot listen at {where[0]}:{where[1]} ({reason}); name another host or port.") from e

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    return f"http://{host}:{server.server_port}/metrics", end


class _Collector:
    """What prometheus_client asks for numbers."""

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
                    if name in space["stats"]:  # once its store is open
                        family.add_metric([label], space["stats"][name])
                yield family
        for name, text in (("frame_bytes", "Bytes of one frame"), ("slabs", "Slabs of host memory that it has")):
            family = GaugeMetricFamily(f"kvloft_{name}", f"{text}.", labels=[LABEL])
            for label, space in spaces:
                family.add_metric([label], space[name])
            yield family
        for families, names in ((CounterMetricFamily, SERVER_COUNTERS), (GaugeMetricFamily, SERVER_GAUGES)):
            for name, text in names.items():
                if name in status["stats"]:  # of a disk, once it was looked at
                    yield families(f"kvloft_{name}", f"{text}.", value=status["stats"][name])
        build = GaugeMetricFamily("kvloft_build_info", BUILD_INFO_HELP, labels=list(BUILD_LABELS))
        build.add_metric(list(BUILD_LABELS.values()), 1)
        yield build
        yield GaugeMetricFamily("kvloft_host_bytes", "Bytes of host memory.", value=status["host_bytes"])
        yield GaugeMetricFamily("kvloft_slab_bytes", "Bytes of a slab of it.", value=status["slab_bytes"])
        num_engines = sum(len(space["engines"]) for _, space in spaces)
        yield GaugeMetricFamily("kvloft_engines", "Engines that are connected.", value=num_engines)
