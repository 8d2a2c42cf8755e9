"""Exports kvloft's metrics through vLLM's statistics and Prometheus.

Processes exchange statistics as flat dicts of numbers. Counters are summed, and gauges keep the
newest value. Only the scheduler side sets gauges, so each gauge has a single source.
"""

from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvloft.counters import Scope, exported
from kvloft.version import BUILD_INFO_HELP, BUILD_LABELS

COUNTERS: Final = tuple(metric.name for metric in exported(Scope.ENGINE) if not metric.is_gauge)
GAUGES: Final = tuple(metric.name for metric in exported(Scope.ENGINE) if metric.is_gauge)
CONNECTED: Final = "server_connected"
"""A gauge that has no sample in embedded mode, because 0 means that the server connection is lost.
"""


@dataclass
class KVLoftStats(KVConnectorStats):
    """One interval's statistics, keyed by the names in ``COUNTERS`` and ``GAUGES``."""

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
    """The Prometheus metrics ``vllm:kvloft_*``, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        self._label_values = per_engine_labelvalues
        # With multiple API servers, every process exports a copy of each gauge; only the newest
        # copy is valid.
        newest = {"multiprocess_mode": "mostrecent"}
        for metric in exported(Scope.ENGINE):
            cls, more = (self._gauge_cls, newest) if metric.is_gauge else (self._counter_cls, {})
            family = cls(
                name=f"vllm:kvloft_{metric.name}",
                documentation=metric.help_text,
                labelnames=labelnames,
                **more,
            )
            if metric.name == CONNECTED:
                self._connected = family
                continue
            self._metrics[metric.name] = {
                engine: family.labels(*values) for engine, values in per_engine_labelvalues.items()
            }
        build = self._gauge_cls(
            name="vllm:kvloft_build_info",
            documentation=BUILD_INFO_HELP,
            labelnames=[*labelnames, *BUILD_LABELS],
            **newest,
        )
        for values in per_engine_labelvalues.values():
            build.labels(*values, *BUILD_LABELS.values()).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if CONNECTED in transfer_stats_data and engine_idx in self._label_values:
            labels = self._label_values[engine_idx]
            self._connected.labels(*labels).set(transfer_stats_data[CONNECTED])
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name, {}).get(engine_idx)
            if metric is None:
                continue
            if name in GAUGES:
                metric.set(value)
            elif value > 0:
                metric.inc(value)
