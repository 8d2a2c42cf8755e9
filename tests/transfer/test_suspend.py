"""Tests the pages of a sleeping engine: copies complete before pages are unmapped, pages are not
accessed until they are mapped again, and saves and loads work afterwards.
"""

import pytest
from idle_mover import IdleMover
from test_worker import CACHES, PART_BYTES, SHAPE, assert_all_failed, plan_of, worker_for

from kvloft import _core
from kvloft.transfer.mover import Finished
from kvloft.transfer.worker import WorkerCore


@pytest.fixture
def store() -> _core.Session:
    return _core.Session(frame_bytes=PART_BYTES, host_bytes=PART_BYTES * 4, namespace=bytes(32))


def run(worker: WorkerCore, store: _core.Session) -> None:
    worker.begin(plan_of(store))
    worker.run_saves()
    worker.run_loads()


def test_no_page_is_touched_between_suspend_and_resume(store: _core.Session) -> None:
    worker = worker_for()
    worker.begin(plan_of(store)._replace(loads=()))
    worker.run_saves()
    for _ in range(2):
        worker.suspend()
    report = worker.take_report()
    assert report is not None and report.saved == (11,), "saves in flight must be reported as usual"
    pages = [tensor.clone() for tensor in CACHES.values()]
    run(worker, store)
    assert_all_failed(worker)
    assert all(
        (a == b).all() or a.isnan().any() for a, b in zip(pages, CACHES.values(), strict=True)
    )
    for _ in range(2):
        worker.resume()
    worker.begin(plan_of(store)._replace(loads=()))
    worker.run_saves()
    report = worker.take_report()
    assert report is not None and report.saved == (11,)


def test_copies_in_flight_end_first(store: _core.Session) -> None:
    log: list[str] = []

    class Watched(IdleMover):
        def drain(self) -> Finished:
            log.append("drained")
            return super().drain()

        def close(self) -> None:
            log.append("closed")

    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Watched())
    worker.register([CACHES], 7, "test")
    run(worker, store)
    worker.suspend()
    assert log == ["drained"], "the mover and its pinned memory must be kept"
    worker.resume()
    worker.shutdown()
    assert log == ["drained", "closed"]


def test_an_engine_that_never_moved_a_page_can_sleep_too(store: _core.Session) -> None:
    worker = worker_for()
    worker.suspend()
    run(worker, store)
    assert_all_failed(worker)
    worker.resume()
    worker.begin(plan_of(store)._replace(loads=()))
    worker.run_saves()
    report = worker.take_report()
    assert report is not None and report.saved == (11,)


@pytest.mark.parametrize("how", ["shutdown", "register", "stop and resume"])
def test_the_mover_stays_closed_during_sleep(store: _core.Session, how: str) -> None:
    closed: list[str] = []

    class Watched(IdleMover):
        def close(self) -> None:
            closed.append("mine")

    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Watched())
    worker.register([CACHES], 7, "test")
    run(worker, store)
    worker.suspend()
    if how == "shutdown":
        worker.shutdown()
    elif how == "register":
        worker.register([CACHES], 7, "test")
    else:
        worker.stop("other weights")
        worker.resume()
        run(worker, store)
        worker.take_report()
    assert closed == ["mine"]


def test_a_sleeping_worker_reports_no_frame_as_usable_before_it_is_registered(
    store: _core.Session,
) -> None:
    """The first saves after wake-up can use every frame that was reported to the scheduler side as
    usable. Saves to unregistered frames would fail.
    """
    mover = IdleMover()
    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: mover)
    worker.register([CACHES], 7, "test")
    told = []

    def hear() -> None:
        if (report := worker.take_report()) is not None:
            told.append(report.usable_bytes)

    mover.usable_bytes = 1
    worker.begin(plan_of(store)._replace(saves=(), loads=()))
    hear()
    worker.suspend()
    hear()
    mover.usable_bytes = 2  # registration continues
    hear()
    worker.resume()
    worker.begin(plan_of(store)._replace(saves=(), loads=()))
    hear()
    assert told == [(0, 1), (0, 2)]


@pytest.mark.parametrize("was_used", [True, False])
def test_frames_that_need_no_pinning_stay_usable_through_a_sleep(
    was_used: bool, store: _core.Session
) -> None:
    """If no frame were usable, chunks could not be read from disk and would be misses."""
    worker = worker_for()
    if was_used:
        worker.begin(plan_of(store)._replace(saves=(), loads=()))
    worker.suspend()
    assert worker.take_report() is None
    worker.resume()
    worker.begin(plan_of(store)._replace(saves=(), loads=()))
    assert worker.take_report() is None


def test_a_worker_that_stops_while_frames_are_pinned_calls_no_others_usable(
    store: _core.Session,
) -> None:
    mover = IdleMover()
    mover.usable_bytes = 1
    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: mover)
    worker.register([CACHES], 7, "test")
    worker.begin(plan_of(store)._replace(saves=(), loads=()))
    assert (report := worker.take_report()) is not None and report.usable_bytes == (0, 1)
    worker.stop("other weights")
    assert worker.take_report() is None
