"""Tests WorkerCore, which runs the plan of a step on a mover. Hooks are idempotent, each report is
returned once, and a broken mover causes only misses.
"""

import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import batch_of
from idle_mover import IdleMover
from paged_kv import Sizes, carve

from kvloft import _core
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.plan import LoadPlan, SavePlan, StepPlan, StepReport
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.store import arena_of
from kvloft.transfer.arena_watch import GRACE_S
from kvloft.transfer.frames import FrameWindow, part_bytes_for
from kvloft.transfer.layout import LayoutError, PagedLayout
from kvloft.transfer.mover import Finished, Mover
from kvloft.transfer.worker import ALL_BYTES, WorkerCore

CACHES = carve("LBHNC", Sizes())
BLOCK_BYTES = sum(t[0].numel() * t.element_size() for t in CACHES.values())
PART_BYTES = part_bytes_for(BLOCK_BYTES)
SHAPE = CacheShape((GroupShape(16, part_bytes=PART_BYTES),))


@pytest.fixture
def store() -> _core.Session:
    return _core.Session(frame_bytes=PART_BYTES, host_bytes=PART_BYTES * 4, namespace=bytes(32))


def worker_for(caches: dict[str, torch.Tensor] = CACHES) -> WorkerCore:
    worker = WorkerCore(SHAPE, rank=0)
    worker.register([caches], 7, "test")
    return worker


def copy_of(frame: int, block: int, ticket: int = -1) -> ChunkCopy:
    return ChunkCopy(frame, ChunkKey(bytes([frame]) * 32), 1, 0, (BlockId(block),), Ticket(ticket))


def plan_of(store: _core.Session) -> StepPlan:
    """Return a plan that saves block 1 and loads frame 0 into block 2."""
    arena = arena_of(store, SHAPE)
    loads = (LoadPlan(ReqId("l"), 5, batch_of([copy_of(0, 2)])),)
    return StepPlan(arena, loads, (SavePlan(ReqId("s"), batch_of([copy_of(0, 1, 11)])),))


def test_each_hook_may_be_called_again_within_a_step(store: _core.Session) -> None:
    worker = worker_for()
    worker.begin(plan_of(store)._replace(loads=()))
    for _ in range(3):
        worker.run_saves()
        worker.run_loads()
    report = worker.take_report()
    assert report is not None
    assert report.saved == (11,)
    assert worker.take_report() is None
    assert worker.take_totals().num_bytes_saved == BLOCK_BYTES
    assert worker.take_totals().num_bytes_saved == 0


def test_a_load_is_reported_to_the_scheduler_side_after_the_engine(
    store: _core.Session,
) -> None:
    worker = worker_for()
    worker.begin(plan_of(store))
    worker.run_saves()
    worker.run_loads()
    report = worker.take_report()
    assert report is not None
    assert not report.loads
    assert worker.take_finished_loads() == ({"l"}, set())
    assert worker.take_finished_loads() == (set(), set())
    report = worker.take_report()
    assert report is not None
    assert [result.load_id for result in report.loads] == [5]
    assert worker.take_report() is None


def test_copies_finished_by_a_drain_are_reported(store: _core.Session) -> None:
    worker = worker_for()
    worker.begin(plan_of(store))
    worker.run_saves()
    worker.run_loads()
    worker.drain()
    assert worker.take_finished_loads() == ({"l"}, set())
    report = worker.take_report()
    assert report is not None
    assert report.saved == (11,) and [result.load_id for result in report.loads] == [5]


def test_bad_blocks_come_no_later_than_the_request(store: _core.Session) -> None:
    worker = worker_for()
    worker.begin(plan_of(store)._replace(saves=()))  # frame 0 was never sealed
    worker.run_loads()
    assert worker.take_finished_loads() == ({"l"}, {2})
    report = worker.take_report()
    assert report is not None
    assert [why for result in report.loads for _, why in result.bad_keys] == ["unsealed"]


def test_saves_skipped_by_a_step_fail_in_the_next(
    store: _core.Session,
) -> None:
    worker = worker_for()
    worker.begin(plan_of(store)._replace(loads=()))
    worker.begin(StepPlan())
    worker.run_saves()
    report = worker.take_report()
    assert report is not None
    assert (report.saved, report.failed) == ((), (11,))


def test_steps_without_a_plan_do_nothing(store: _core.Session) -> None:
    worker = worker_for()
    worker.run_loads()
    worker.run_saves()
    worker.begin(StepPlan())
    worker.run_loads()
    worker.run_saves()
    assert worker.take_report() is None
    worker.shutdown()


def assert_all_failed(worker: WorkerCore) -> None:
    """Check that the save and the load of `plan_of` are reported as failed and that the load's
    block must be computed.
    """
    assert worker.take_finished_loads() == ({"l"}, {2})
    report = worker.take_report()
    assert report is not None
    assert (report.saved, report.failed) == ((), (11,))
    assert [(r.bad_keys, r.failed) for r in report.loads] == [((), True)], (
        "no frame may be reported as bad"
    )


def test_a_mover_that_cannot_be_created_fails_copies_only(
    store: _core.Session, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_for()
    plan = plan_of(store)
    assert plan.arena is not None
    for _ in range(2):
        worker.begin(plan._replace(arena=replace(plan.arena, path="/nowhere")))
        worker.run_loads()
        worker.run_saves()
        assert_all_failed(worker)
    assert len([r for r in caplog.records if "cannot copy KV" in r.message]) == 1


@pytest.mark.parametrize("kept", [1, PART_BYTES // BLOCK_BYTES + 1])
def test_frames_must_hold_a_chunk_of_every_group(
    store: _core.Session, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a group with more blocks than the other groups."""
    worker = WorkerCore(
        replace(SHAPE, groups=(GroupShape(16 * kept), GroupShape(16, kept))), rank=0
    )
    worker.register([CACHES, CACHES], 7, "test")
    plan = plan_of(store)
    assert plan.arena is not None
    arena = replace(plan.arena, groups=(SHAPE.groups[0],) * 2)
    worker.begin(plan._replace(arena=arena, loads=(), saves=()))
    assert ("cannot copy KV" in caplog.text) is (kept > 1)


@pytest.mark.parametrize("error", [TypeError, BaseException], ids=["any error", "a panic in Rust"])
def test_every_load_is_reported_after_any_error(
    store: _core.Session, error: type[BaseException]
) -> None:
    def make(layout: PagedLayout, frames: object) -> IdleMover:
        raise error

    worker = WorkerCore(SHAPE, rank=0, make_mover=make)
    worker.register([CACHES], 7, "test")
    with pytest.raises(error):
        worker.begin(plan_of(store))
    for run in (worker.run_saves, worker.run_loads):
        with pytest.raises(error):
            run()
    assert worker.take_finished_loads() == ({"l"}, {2})
    report = worker.take_report()
    assert report is not None
    assert (report.failed, [load.failed for load in report.loads]) == ((11,), [True])


def test_registering_again_ends_the_mover_of_the_old_pages(store: _core.Session) -> None:
    closed: list[IdleMover] = []

    class Watched(IdleMover):
        def close(self) -> None:
            closed.append(self)

    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Watched())
    for num_before in range(3):
        worker.register([CACHES], 7, "test")
        assert len(set(map(id, closed))) == len(closed) == num_before
        worker.begin(plan_of(store))


def test_a_plan_before_registration_fails_copies_only(store: _core.Session) -> None:
    worker = WorkerCore(SHAPE, rank=0)
    worker.begin(plan_of(store))
    worker.run_saves()
    report = worker.take_report()
    assert report is not None
    assert report.failed == (11,)


def test_registering_rejects_unreadable_tensors() -> None:
    with pytest.raises(LayoutError):
        worker_for({"layer": torch.zeros(8, 2)})


def test_another_mover_can_be_plugged_in(store: _core.Session) -> None:
    made: list[PagedLayout] = []

    def make(layout: PagedLayout, frames: object) -> IdleMover:
        made.append(layout)
        return IdleMover()

    worker = WorkerCore(SHAPE, rank=0, make_mover=make)
    worker.register([CACHES], 7, "test")
    worker.begin(plan_of(store))
    worker.run_saves()
    worker.run_loads()
    assert len(made) == 1


def test_a_mover_is_told_of_loads_before_the_forward_pass(store: _core.Session) -> None:
    """vLLM submits loads only after the forward pass, but loads should not wait for this pass."""
    heard: list[bool] = []

    class Listening(IdleMover):
        def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
            heard.append(has_loads)

    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Listening())
    worker.register([CACHES], 7, "test")
    worker.begin(plan_of(store))
    worker.begin(plan_of(store)._replace(loads=()))
    assert heard == [True, False]


def test_saves_of_blocks_that_a_sibling_may_write_end_before_the_step_begins(
    store: _core.Session,
) -> None:
    heard: list[Any] = []

    class Listening(IdleMover):
        def wait_for_saves(self, blocks: Sequence[BlockId]) -> None:
            heard.append(list(blocks))

        def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
            heard.append("begin")

    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Listening())
    worker.register([CACHES], 7, "test")
    worker.begin(plan_of(store)._replace(sibling_blocks=(BlockId(3),)))
    worker.begin(plan_of(store))
    assert heard == [[3], "begin", "begin"]


def test_the_number_of_a_step_with_prompt_tokens_is_reported(store: _core.Session) -> None:
    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: IdleMover())
    worker.register([CACHES], 7, "test")
    numbers = []
    for number in (1, 2, None):
        worker.begin(plan_of(store)._replace(saves=(), loads=(), prompt_step=number))
        report = worker.take_report()
        numbers.append(report.prompt_step if report is not None else "no report")
    assert numbers == [1, 2, "no report"]


def test_usable_bytes_are_reported_when_they_change(store: _core.Session) -> None:
    class Pinning(IdleMover):
        usable_bytes = 0

    mover = Pinning()
    worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: mover)
    worker.register([CACHES], 7, "test")
    worker.begin(plan_of(store)._replace(saves=(), loads=()))
    told = []
    for mover.usable_bytes in (0, 0, 5, 5, None, None):
        report = worker.take_report()
        told.append(report.usable_bytes if report is not None else None)
    assert told == [(0, 0), None, (0, 5), None, (0, ALL_BYTES), None]


def test_a_plan_of_another_arena_ends_the_mover_of_the_one_before(store: _core.Session) -> None:
    events: list[str] = []

    class Pinning(IdleMover):
        usable_bytes = 2

        def drain(self) -> Finished:
            events.append("drain")
            return Finished(saved=[Ticket(11)])

        def close(self) -> None:
            events.append("close")

    def make(_: PagedLayout, frames: FrameWindow) -> Pinning:
        events.append("make")
        return Pinning()

    worker = WorkerCore(SHAPE, rank=0, make_mover=make)
    worker.register([CACHES], 7, "test")
    other = _core.Session(frame_bytes=PART_BYTES, host_bytes=PART_BYTES * 4, namespace=bytes(32))
    for session in (store, store, other, other):
        worker.begin(plan_of(session)._replace(arena=arena_of(session, SHAPE), loads=(), saves=()))
        events.append("step")
    assert events == ["make", "step", "step", "drain", "close", "make", "step", "step"]
    report = worker.take_report()
    assert report is not None
    assert (report.saved, report.usable_bytes) == ((11,), (0, 2))


def test_memory_of_a_new_arena_is_not_touched_by_old_plans(
    store: _core.Session,
) -> None:
    """A path can be reused for a different arena."""
    worker = worker_for()
    plan = plan_of(store)
    right = arena_of(store, SHAPE)
    assert right is not None
    for arena in (
        replace(right, id=right.id + 1),
        replace(right, path="/proc/self/fd/999999", id=7),
    ):
        worker.begin(plan._replace(arena=arena))
        worker.run_saves()
        worker.run_loads()
        assert_all_failed(worker)
    worker.begin(plan._replace(arena=right, loads=()))
    worker.run_saves()
    report = worker.take_report()
    assert report is not None
    assert report.saved == (11,), "the right arena must be used again"


def test_a_stopped_worker_moves_nothing(store: _core.Session) -> None:
    worker = worker_for()
    worker.begin(plan_of(store))
    worker.run_saves()
    worker.stop("test")
    report = worker.take_report()
    assert report is not None
    assert report.saved == (11,), "saves in flight must be reported as usual"
    worker.register([CACHES], 7, "test")
    worker.begin(plan_of(store))
    worker.run_saves()
    worker.run_loads()
    assert_all_failed(worker)


class TestLifeline:
    """Tests the lifeline: the server does not reuse an engine's frames while any process keeps the
    engine's lifeline open.
    """

    @staticmethod
    def new_pipe() -> tuple[int, int, tuple[str, int]]:
        read, write = os.pipe()
        return read, write, (f"/proc/self/fd/{write}", os.fstat(write).st_ino)

    @staticmethod
    def is_closed(read: int) -> bool:
        poll = select.poll()
        poll.register(read, 0)
        return bool(poll.poll(0))

    def begin(
        self, worker: WorkerCore, store: _core.Session, lifeline: tuple[str, int]
    ) -> StepReport | None:
        plan = plan_of(store)._replace(loads=())
        arena = replace(plan.arena or pytest.fail("no arena"), lifeline=lifeline, id=store.arena_id)
        worker.begin(plan._replace(arena=arena))
        worker.run_saves()
        return worker.take_report()

    def test_it_is_open_until_the_worker_writes_to_no_frame(self, store: _core.Session) -> None:
        read, write, lifeline = self.new_pipe()
        worker = worker_for()
        report = self.begin(worker, store, lifeline)
        assert report is not None
        assert report.saved == (11,)
        os.close(write)
        assert not self.is_closed(read)
        worker.shutdown()
        assert self.is_closed(read)
        os.close(read)

    @pytest.mark.parametrize("is_reused", [False, True])
    def test_a_worker_without_its_scheduler_maps_nothing(
        self, store: _core.Session, is_reused: bool
    ) -> None:
        read, write, (path, inode) = self.new_pipe()
        if not is_reused:
            os.close(write)
        worker = worker_for()
        report = self.begin(worker, store, (path, inode + is_reused))
        assert report is not None
        assert (report.saved, report.failed) == ((), (11,))
        if is_reused:
            os.close(write)
        assert self.is_closed(read), "no other file may be kept open"
        os.close(read)

    def test_an_idle_worker_unmaps_the_arena_of_a_lost_server(self, store: _core.Session) -> None:
        def num_mappings() -> int:
            maps = Path("/proc/self/maps").read_text().splitlines()
            return sum(line.split()[4] == str(store.arena_id) for line in maps)

        num_before = num_mappings()
        read, write, lifeline = self.new_pipe()
        worker = worker_for()
        self.begin(worker, store, lifeline)
        os.close(write)
        arena = worker._plan.arena
        worker.begin(plan_of(store)._replace(saves=(), arena=arena))
        os.close(read)
        time.sleep(1.5 * GRACE_S)
        assert num_mappings() > num_before, "this step's loads can still succeed"
        worker.run_loads()
        worker.take_finished_loads()
        report = worker.take_report()
        assert report is not None and not report.loads[0].failed
        deadline = time.monotonic() + 60
        while num_mappings() > num_before:
            assert time.monotonic() < deadline, "nothing was unmapped"
            time.sleep(0.01)
        worker.begin(plan_of(store)._replace(arena=arena))
        worker.run_saves()
        worker.run_loads()
        assert_all_failed(worker)
        read, write, lifeline = self.new_pipe()
        report = self.begin(worker, store, lifeline)
        assert report is not None and report.saved == (11,), "a new server"
        os.close(read)
        os.close(write)

    def test_a_slow_release_delays_no_save_and_keeps_the_lifeline(
        self, store: _core.Session
    ) -> None:
        may_close, is_closing = threading.Event(), threading.Event()

        class Slow(IdleMover):
            def close(self) -> None:
                is_closing.set()
                may_close.wait(60)

        movers: list[Mover] = [Slow(), IdleMover()]
        worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: movers.pop(0))
        worker.register([CACHES], 7, "test")
        (read, write, first), (_, _, second) = self.new_pipe(), self.new_pipe()
        self.begin(worker, store, first)
        lost = worker._lifeline
        os.close(write)
        os.close(read)
        assert is_closing.wait(60), "the server has exited"
        report = self.begin(worker, store, second)
        assert report is not None and report.failed == (11,), "there is no second mover"
        assert lost is not None and lost._fd is not None, (
            "the first mover may still write to frames"
        )
        threading.Timer(0.2, may_close.set).start()
        worker.begin(plan_of(store)._replace(saves=()))
        worker.run_loads()
        assert worker.take_finished_loads()[0] == set(), "the load waits for the second mover"
        assert lost._fd is None and not movers
        worker.shutdown()

    def test_the_lifeline_stays_open_if_the_mover_cannot_be_closed(
        self, store: _core.Session
    ) -> None:
        class Stuck(IdleMover):
            def close(self) -> None:
                raise RuntimeError("a CUDA error")

        read, write, lifeline = self.new_pipe()
        worker = WorkerCore(SHAPE, rank=0, make_mover=lambda _, __: Stuck())
        worker.register([CACHES], 7, "test")
        self.begin(worker, store, lifeline)
        kept = worker._lifeline
        os.close(write)
        worker.shutdown()
        assert not self.is_closed(read), "copies may still write to frames"
        assert kept is not None
        kept.close()
        os.close(read)

    def test_another_connection_to_the_same_memory_changes_the_lifeline_and_keeps_the_mover(
        self, store: _core.Session
    ) -> None:
        pipes = [self.new_pipe() for _ in range(2)]
        worker = worker_for()
        self.begin(worker, store, pipes[0][2])
        mover, lost = worker._mover, worker._lifeline
        os.close(pipes[0][0])  # the connection is lost, but the server runs
        time.sleep(GRACE_S / 4)
        self.begin(worker, store, pipes[1][2])
        assert worker._mover is mover is not None
        assert lost is not None and lost._fd is None
        for _, write, _ in pipes:
            os.close(write)
        read = pipes[1][0]
        assert not self.is_closed(read)
        worker.shutdown()
        assert self.is_closed(read)
        os.close(read)
