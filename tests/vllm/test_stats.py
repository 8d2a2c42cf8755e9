"""Tests statistics across processes: counters are summed, gauges use the newest value, and every
name has a Prometheus metric.
"""

import logging
from collections import Counter as Counts
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvloft.version import BUILD_LABELS
from kvloft.vllm.connector import KVLoftConnector
from kvloft.vllm.scheduler_half import SchedulerHalf
from kvloft.vllm.stats import CONNECTED, COUNTERS, GAUGES, KVLoftStats
from kvloft.vllm.store_log import StoreLog


def test_counters_add_and_gauges_take_the_newest() -> None:
    total = KVLoftStats({"saved_chunks": 2, "pins": 5}).aggregate(
        KVLoftStats({"saved_chunks": 3, "pins": 1, "disk_used": 9})
    )
    assert total.data == {"saved_chunks": 5, "pins": 1, "disk_used": 9}
    assert total.reduce() == {"saved_chunks": 5, "pins": 1, "disk_used": 9}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_stats_survive_the_trip_to_the_api_server() -> None:
    assert KVLoftConnector.build_kv_connector_stats({"saved_chunks": 2}).data == {"saved_chunks": 2}
    assert KVLoftConnector.build_kv_connector_stats().is_empty()


class FakeStore:
    """A store whose counters the test sets."""

    def __init__(self) -> None:
        self.numbers = dict.fromkeys((*COUNTERS, *GAUGES), 0)

    def take_events(self) -> list[tuple[str, bool]]:
        return []

    def stats(self) -> dict[str, int]:
        return dict(self.numbers)


@pytest.fixture
def half() -> Any:
    """Return the part of a scheduler side that the statistics need."""
    half: Any = object.__new__(SchedulerHalf)
    half._last, half._quiet_steps, half.hook_errors = {}, 0, 0
    half._store, half.core = FakeStore(), SimpleNamespace(counters=Counts())
    half._log = StoreLog(half._store, bytes(32))
    return half


def counted(half: Any, **more: int) -> None:
    half.core.counters["saved_chunks"] += 1
    for name, number in more.items():
        half._store.numbers[name] += number
    half.take_stats()


def test_a_namespace_plans_with_its_share_or_its_used_frames(half: Any) -> None:
    counted_on: list[int] = []
    half.core.count_on = counted_on.append
    half._store.numbers.pop("host_share_bytes", None)
    counted(half)
    assert counted_on == [], "no server has reported the size"
    half._store.numbers["host_share_bytes"] = 8
    counted(half, host_used_bytes=3)
    counted(half, host_used_bytes=9)
    assert counted_on == [8, 12]


def test_damage_on_disk_is_logged_once(
    half: Any, caplog: pytest.LogCaptureFixture, logged: Any
) -> None:
    with caplog.at_level(logging.WARNING, "kvloft"):
        counted(half)
        assert not logged()
        for _ in range(3):
            counted(half, disk_verify_failures=2)
    (record,) = logged()
    assert "2 chunks on disk failed verification" in record.getMessage()


@pytest.mark.parametrize("name", ["disk_dropped", "disk_write_errors"])
def test_a_disk_that_accepts_nothing_is_logged(
    half: Any, name: str, caplog: pytest.LogCaptureFixture, logged: Any
) -> None:
    with caplog.at_level(logging.WARNING, "kvloft"):
        counted(half, disk_bytes_written=4096, **{name: 3})
        assert not logged(), "a slow disk drops some chunks and stores others"
        for _ in range(3):
            counted(half, **{name: 3})
    (record,) = logged()
    assert "disk write succeeded (3 chunks lost" in record.getMessage()


def test_tokens_left_on_a_slow_disk_are_logged_once(
    half: Any, caplog: pytest.LogCaptureFixture, logged: Any
) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvloft"):
        for _ in range(3):
            half.core.counters["disk_slow_tokens"] += 64
            half.take_stats()
    (record,) = [
        each for each in logged() if "because reading the KV from disk" in each.getMessage()
    ]
    assert "64 tokens" in record.getMessage() and record.levelno == logging.INFO


def exporter(registry: CollectorRegistry) -> Any:

    def bound(cls: type) -> object:
        return lambda **settings: cls(**settings, registry=registry)

    types = {Counter: bound(Counter), Gauge: bound(Gauge), Histogram: bound(Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return KVLoftConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})


def test_every_name_reaches_prometheus() -> None:
    registry = CollectorRegistry()
    metrics = exporter(registry)
    metrics.observe(dict.fromkeys((*COUNTERS, *GAUGES), 3))
    metrics.observe({"saved_chunks": 4, "pins": 1, "no_such_name": 9})
    value = registry.get_sample_value
    assert value("vllm:kvloft_saved_chunks_total", {"engine": "0"}) == 7
    assert value("vllm:kvloft_pins", {"engine": "0"}) == 1
    assert all(value(f"vllm:kvloft_{name}_total", {"engine": "0"}) for name in COUNTERS)
    assert all(value(f"vllm:kvloft_{name}", {"engine": "0"}) for name in GAUGES)
    assert value("vllm:kvloft_build_info", {"engine": "0", **BUILD_LABELS}) == 1


def test_an_embedded_engine_exports_no_connection() -> None:
    registry = CollectorRegistry()
    metrics = exporter(registry)

    def connected() -> float | None:
        return registry.get_sample_value("vllm:kvloft_server_connected", {"engine": "0"})

    metrics.observe({"saved_chunks": 1, "pins": 0})
    assert connected() is None, "a 0 would raise the alert for a lost server"
    for value in (1, 0):
        metrics.observe({CONNECTED: value})
        assert connected() == value
