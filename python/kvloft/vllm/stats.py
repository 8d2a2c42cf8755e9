"""kvloft's metrics in vLLM's statistics and Prometheus export.

One flat dict of numbers crosses the processes: counters add up, gauges (``GAUGES``) take the newest value. Only the
scheduler half sets gauges, so aggregation over ranks never meets two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvloft.version import BUILD_INFO_HELP, BUILD_LABELS

COUNTERS: dict[str, str] = {
    "load_tokens_host": "Tokens loaded from host memory",
    "load_tokens_disk": "Tokens loaded from disk",
    "load_lost_blocks": "Blocks offered to vLLM whose chunk was evicted before the load was planned",
    "loaded_bytes": "Bytes loaded into paged KV, all ranks",
    "load_seconds": "Seconds spent loading, all ranks",
    "saved_chunks": "Chunks saved and published",
    "saved_bytes": "Bytes saved from paged KV, all ranks",
    "save_seconds": "Seconds spent saving, all ranks",
    "save_dropped_chunks": "Saves dropped because no frame was free or the server did not answer",
    "save_failed_chunks": "Saves whose copy failed",
    "load_breaker_trips": "Times that loads and saves were paused because loads failed",
    "verify_failures": "Chunks that failed verification when loaded",
    "layout_mismatches": "Chunks saved by an engine with another memory layout; not loaded, and kept",
    "hook_errors": "Errors inside kvloft that were turned into misses",
    "host_evictions": "Chunks evicted from host memory",
    "disk_evictions": "Chunks evicted from disk",
    "quota_evictions": "Chunks evicted from host memory because their tenant was at its quota",
    "quota_disk_evictions": "Chunks evicted from disk because their tenant was at its quota",
    "quota_dropped": "Operations rejected because the tenant was at its quota and all of its chunks were in use",
    "expired": "Chunks removed because their time to live had passed",
    "disk_bytes_written": "Bytes written to disk",
    "disk_bytes_read": "Bytes read from disk",
    "disk_write_errors": "Failed disk writes",
    "disk_read_errors": "Failed disk reads",
    "disk_verify_failures": "Chunks on disk that failed verification",
    "disk_removals": "Times that the disk directory was removed while in use",
    "disk_trips": "Times that the circuit breaker of the disk opened after errors or a hang",
    "disk_dropped": "Chunks never written to disk, because it was full or they were evicted first",
    "disk_unwritten": "Chunks evicted from host memory before they were written to disk",
    "server_late": "Requests that the server did not answer in time",
    "server_late_chunks": "Chunks not saved because the server did not answer in time",
    "server_lost": "Lost connections to the server",
}
GAUGES: dict[str, str] = {
    "frames_total": "Frames in host memory",
    "frames_visible": "Frames with a published chunk",
    "frames_reserved": "Frames being written",
    "frames_free": "Free frames",
    "pins": "Chunks pinned by loads",
    "disk_used": "Chunks on disk",
    "disk_broken": "1 while the circuit breaker of the disk is open after errors or a hang",
}


@dataclass
class KVLoftStats(KVConnectorStats):
    """Numbers of one interval; see ``COUNTERS`` and ``GAUGES``."""

    def reset(self) -> None:
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 4) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not self.data


class KVLoftPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvloft_*``: one counter or gauge for each name, labelled like vLLM's own."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        # With several API servers, every process exports its copy of a gauge: the newest value is the engine's.
        newest = {"multiprocess_mode": "mostrecent"}
        for names, cls, more in ((COUNTERS, self._counter_cls, {}), (GAUGES, self._gauge_cls, newest)):
            for name, help_text in names.items():
                metric = cls(name=f"vllm:kvloft_{name}", documentation=f"{help_text}.", labelnames=labelnames, **more)
                self._metrics[name] = {engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()}
        build = self._gauge_cls(
            name="vllm:kvloft_build_info", documentation=BUILD_INFO_HELP, labelnames=[*labelnames, *BUILD_LABELS], **newest
        )
        for values in per_engine_labelvalues.values():
            build.labels(*values, *BUILD_LABELS.values()).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name, {}).get(engine_idx)
            if metric is None:
                continue
            if name in GAUGES:
                metric.set(value)
            elif value > 0:
                metric.inc(value)
