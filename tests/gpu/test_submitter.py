"""Tests the submitter thread without a GPU. The thread sends a copy after the awaited event has
completed, sleeps while no copy is queued, and exits when it is closed.
"""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.submitter import Submitter

WAIT_S = 20.0 * float(os.environ.get("TEST_PACE", "1"))
"""Timeout for an expected event, in seconds."""


class Lane:
    """Counts queued and sent copies. The test completes the events."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queued = 0
        self.sent = threading.Semaphore(0)
        self.passed = threading.Semaphore(0)
        self.waiting = threading.Semaphore(0)
        self.fails = False

    def synchronize(self) -> None:
        self.waiting.release()
        assert self.passed.acquire(timeout=WAIT_S)
        if self.fails:
            raise driver.CudaError("cuEventSynchronize: error 700")

    def awaited(self) -> "Lane | None":
        return self if self.queued else None

    def feed(self) -> None:
        assert self.lock.acquire(blocking=False), "called without the lock"
        self.lock.release()
        self.queued -= 1
        self.sent.release()

    def queue(self, submitter: Submitter, count: int = 1) -> None:
        with self.lock:
            self.queued += count
            submitter.wake()


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Lane:
    monkeypatch.setattr(driver, "current_context", lambda: None)
    monkeypatch.setattr(driver, "use_context", lambda _: None)
    return Lane()


@pytest.fixture
def submitter(lane: Lane) -> Iterator[Submitter]:
    submitter = Submitter("test", lane.lock, lane)  # type: ignore[arg-type]
    yield submitter
    lane.passed.release(100)
    submitter.close()


def test_sends_once_for_each_event_that_passes(lane: Lane, submitter: Submitter) -> None:
    lane.queue(submitter, 3)
    for _ in range(3):
        assert lane.waiting.acquire(timeout=WAIT_S)
        assert not lane.sent.acquire(blocking=False), "sent before the event completed"
        lane.passed.release()
        assert lane.sent.acquire(timeout=WAIT_S)
    assert lane.queued == 0 and not lane.waiting.acquire(timeout=0.05)
    lane.queue(submitter)
    lane.passed.release()
    assert lane.sent.acquire(timeout=WAIT_S), "the submitter did not wake up again"


def test_the_lock_is_free_while_it_waits(lane: Lane, submitter: Submitter) -> None:
    lane.queue(submitter)
    assert lane.waiting.acquire(timeout=WAIT_S)
    assert lane.lock.acquire(timeout=WAIT_S)
    lane.lock.release()


def test_an_event_that_fails_is_left_to_the_sender(lane: Lane, submitter: Submitter) -> None:
    lane.fails = True
    lane.queue(submitter)
    lane.passed.release()
    assert lane.sent.acquire(timeout=WAIT_S)


def test_close_ends_a_thread_that_sleeps_and_one_that_waits(lane: Lane) -> None:
    submitter = Submitter("asleep", lane.lock, lane)  # type: ignore[arg-type]
    submitter.close()
    submitter = Submitter("waiting", lane.lock, lane)  # type: ignore[arg-type]
    lane.queue(submitter, 5)
    assert lane.waiting.acquire(timeout=WAIT_S)
    closes = threading.Thread(target=submitter.close)
    closes.start()
    while not submitter._closing:
        time.sleep(0.001)
    assert closes.is_alive(), "close() did not wait for the event"
    lane.passed.release()
    closes.join()
    assert lane.queued == 4
    assert not [thread for thread in threading.enumerate() if thread.name in ("asleep", "waiting")]
