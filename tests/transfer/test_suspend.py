"""A sleeping engine's pages: copies end before they go, nothing touches them until they are back, and all is as before then."""

from dataclasses import replace

import pytest
from test_worker import CACHES, PART_BYTES, SHAPE, assert_all_failed, plan_of, worker_for

from kvloft import _core
from kvloft.transfer.mover import BrokenMover, Finished
from kvloft.transfer.worker import WorkerCore


@pytest.fixture
def store() -> _core.Store:
    return _core.Store(frame_bytes=PART_BYTES, host_bytes=PART_BYTES * 4, namespace=bytes(32))


def run(worker: WorkerCore, store: _core.Store, step: int) -> None:
    worker.begin(plan_of(store, step))
    worker.run_saves()
    worker.run_loads()


def test_no_page_is_touched_between_suspend_and_resume(store: _core.Store) -> None:
    worker = worker_for()
    worker.begin(replace(plan_of(store), loads=()))
    worker.run_saves()
    for _ in range(2):
        worker.suspend()
    report = worker.take_report()
    assert report is not None and report.saved == (11,), "what was in flight is reported as before"
    pages = [tensor.clone() for tensor in CACHES.values()]
    run(worker, store, 2)
    assert_all_failed(worker)
    assert all((a == b).all() or a.isnan().any() for a, b in zip(pages, CACHES.values(), strict=True))
    for _ in range(2):
        worker.resume()
    worker.begin(replace(plan_of(store, 3), loads=()))
    worker.run_saves()
    report = worker.take_report()
    assert report is not None and report.saved == (11,)


def test_copies_in_flight_end_first(store: _core.Store) -> None:
    log: list[str] = []

    class Watched(BrokenMover):
        def drain(self) -> Finished:
            log.append("drained")
            return super().drain()

        def close(self) -> None:
            log.append("closed")

    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Watched("never moves"))
    worker.register(CACHES, 7, "test")
    run(worker, store, 1)
    worker.suspend()
    assert log == ["drained"], "a mover with its pinned memory is kept"
    worker.resume()
    worker.shutdown()
    assert log == ["drained", "closed"]


def test_an_engine_that_never_moved_a_page_can_sleep_too(store: _core.Store) -> None:
    worker = worker_for()
    worker.suspend()
    run(worker, store, 1)
    assert_all_failed(worker)
    worker.resume()
    worker.begin(replace(plan_of(store, 2), loads=()))
    worker.run_saves()
    report = worker.take_report()
    assert report is not None and report.saved == (11,)


@pytest.mark.parametrize("how", ["shutdown", "register", "stop and resume"])
def test_whatever_comes_while_it_sleeps_its_mover_is_closed_once_and_stays_so(store: _core.Store, how: str) -> None:
    closed: list[str] = []

    class Watched(BrokenMover):
        def close(self) -> None:
            closed.append(self.reason)

    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Watched("mine"))
    worker.register(CACHES, 7, "test")
    run(worker, store, 1)
    worker.suspend()
    if how == "shutdown":
        worker.shutdown()
    elif how == "register":
        worker.register(CACHES, 7, "test")
    else:
        worker.stop("other weights")
        worker.resume()
        run(worker, store, 2)
        worker.take_report()
    assert closed == ["mine"]
