"""kvloft's numbers in vLLM's own stats and Prometheus metrics.

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
    "load_lost_blocks": "Blocks promised to vLLM whose frames were gone",
    "loaded_bytes": "Bytes scattered into paged KV, all ranks",
    "load_seconds": "Seconds spent loading, all ranks",
    "saved_chunks": "Chunks saved and visible",
    "saved_bytes": "Bytes gathered from paged KV, all ranks",
    "save_seconds": "Seconds spent saving, all ranks",
    "save_dropped_chunks": "Saves dropped because no frame could be had at once",
    "save_failed_chunks": "Saves that failed while copying",
    "load_breaker_trips": "Times that loads and saves were paused because loads failed",
    "verify_failures": "Chunks that failed their check when loaded",
    "layout_mismatches": "Chunks that another engine saved with another memory layout; they are kept",
    "hook_errors": "Errors inside kvloft that were turned into misses",
    "host_evictions": "Chunks evicted from host memory",
    "disk_evictions": "Chunks evicted from disk",
    "quota_evictions": "Chunks of those evicted from host memory that left because their salt had its quota",
    "quota_disk_evictions": "Chunks of those evicted from disk that left because their salt had its quota",
    "quota_dropped": "Tries to save, load or write a chunk while its salt had its quota, all of it in use",
    "expired": "Chunks forgotten because they were saved too long ago",
    "disk_bytes_written": "Bytes written to disk",
    "disk_bytes_read": "Bytes read from disk",
    "disk_write_errors": "Writes to disk that failed",
    "disk_read_errors": "Reads from disk that failed",
    "disk_verify_failures": "Chunks on disk whose bytes were not what their key says",
    "disk_removals": "Times that the disk directory was removed while it was in use",
    "disk_trips": "Times that the disk tier was left alone after errors or a hang",
    "disk_dropped": "Chunks that never reached disk: it had no room, or they left host before",
    "disk_unwritten": "Chunks evicted from host memory before they were written to disk",
    "server_late": "Calls that the server did not answer in time",
    "server_late_chunks": "Chunks not saved because the server did not answer in time",
    "server_lost": "Times that the server was gone",
}
GAUGES: dict[str, str] = {
    "frames_total": "Frames in host memory",
    "frames_visible": "Frames that hold a visible chunk",
    "frames_reserved": "Frames being written",
    "frames_free": "Frames that hold nothing",
    "pins": "Chunks pinned by readers",
    "disk_used": "Chunks on disk",
    "disk_broken": "1 while the disk tier is left alone after errors or a hang",
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
