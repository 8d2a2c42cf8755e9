"""Tests that each log line of the store appears once in vLLM's log, with the namespace."""

import logging
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloft.config.sources import load_config
from kvloft.machine import refuse_here
from kvloft.vllm.scheduler_half import SchedulerHalf
from kvloft.vllm.store_log import StoreLog


def test_events_are_logged_once(logged: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    events: list[list[tuple[str, bool]]] = [
        [("recreating /cache/x: its superblock is damaged", True), ("pausing writes", True)],
        [],
        [("it is back", False)],
    ]
    half: Any = object.__new__(SchedulerHalf)
    half._store = SimpleNamespace(take_events=iter(events).__next__, stats=dict, close=lambda: None)
    half._leave_server = half._poller = None
    half._adapters = SimpleNamespace(close=lambda: None)
    half._log = StoreLog(half._store, bytes(range(32)))
    half.core = SimpleNamespace(counters=Counter(x=1), close=lambda: None)
    half.hook_errors, half._quiet_steps, half._last = 0, 0, {}
    half._log.log_events()
    half.take_stats()
    half.close()
    assert [(r.message, r.levelname) for r in logged()] == [
        (f"kvloft: {text} (namespace 0001020304050607)", "WARNING" if is_problem else "INFO")
        for text, is_problem in (*events[0], *events[2])
    ]


def test_a_disk_that_cannot_be_written_is_no_mistake_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    refuse_here(load_config({"disk_path": str(tmp_path / "disk")}, {}))


def test_repetitions_of_an_event_are_logged_once(
    logged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hangs, ends = ("disk tier: not responding", True), ("disk tier: responding again", False)
    events = iter([[hangs, hangs], [hangs], [ends, ends], [hangs]])
    log = StoreLog(SimpleNamespace(take_events=events.__next__), bytes(32))
    for _ in range(4):
        log.log_events()
    texts = [record.getMessage() for record in logged()]
    assert [text[8:].split(" (")[0] for text in texts] == [hangs[0], ends[0], hangs[0]]
