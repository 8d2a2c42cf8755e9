"""Tests, on an emulated GPU, that the first pieces of saves and loads are small on an idle link."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

import numpy as np
import torch
from batches import batch_of
from emulated_gpu import Gpu, emulated
from gpu_support import Frames, Paged, copies_of, load, make_mover, part_bytes_for, per_layer, save
from piece_model import frames_of

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import jobs
from kvloft.transfer.cuda import mover as mover_module
from kvloft.transfer.cuda import saves as saves_module
from kvloft.transfer.cuda.jobs import Load, Mark, WaitingLoad
from kvloft.transfer.cuda.mover import CudaMover
from kvloft.transfer.cuda.shared import NUM_MARKS

PER_PIECE, BLOCKS = 6, 120


class Rig:
    """A mover with first pieces of 2 and 3 chunks and later pieces of 6 chunks.

    Records the number of chunks in each piece, in the order in which pieces are sent.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(mover_module, "ramp", lambda *_: (2, 3))
        patch.setattr(mover_module, "SLOTS_AHEAD", 100)
        self.paged: Paged = per_layer(2, BLOCKS, 900)
        self.paged.randomize(1)
        frames = Frames(BLOCKS, part_bytes_for(self.paged.block_bytes))
        self.mover: CudaMover = make_mover(self.paged, frames, 1, ring=(2, PER_PIECE * 4096))
        self.sizes: list[int] = []
        for lane in (self.mover.save_lane, self.mover.load_lane):
            patch.setattr(lane, "submit", self.noted(lane.submit))

    def noted(self, submit: Any) -> Any:
        def noting(piece: Any, **more: Any) -> Any:
            assert frames_of(piece) == sorted(frames_of(piece)), (
                "adjacent frames were not combined into one copy"
            )
            self.sizes.append(piece.num_segments)
            return submit(piece, **more)

        return noting

    def sent(self) -> list[int]:
        sizes, self.sizes[:] = list(self.sizes), []
        return sizes

    def submit_saves(self, *counts: int) -> list[int]:
        self.mover.begin_step(())
        places = iter(range(BLOCKS))
        plans = [[next(places) for _ in range(count)] for count in counts]
        self.mover.submit_saves(
            [
                SavePlan(ReqId("s"), batch_of(copies_of(plan, [[p] for p in plan], plan[0] + 1)))
                for plan in plans
            ]
        )
        return self.sent()

    def submit_loads(self, *counts: int) -> list[int]:
        self.mover.begin_step((), has_loads=True)
        places = iter(range(BLOCKS))
        plans = [[next(places) for _ in range(count)] for count in counts]
        loads = [copies_of(plan, [[p + 60] for p in plan], plan[0] + 1) for plan in plans]
        self.mover.submit_loads(
            [LoadPlan(ReqId("l"), i, batch_of(copies)) for i, copies in enumerate(loads)]
        )
        return self.sent()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with emulated(5) as gpu:
        yield gpu


@pytest.fixture
def rig(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.mover.close()


def test_saves_begin_with_few_chunks_on_an_idle_link_only(rig: Rig) -> None:
    assert rig.submit_saves(20) == [2, 3, 6, 6, 3]
    assert rig.submit_saves(20) == [6, 6, 6, 2], (
        "the link is busy for longer than it takes to prepare a piece"
    )
    rig.mover.drain()
    assert rig.submit_saves(3, 17) == [2, 3, 6, 6, 3]
    rig.mover.drain()
    assert rig.submit_saves(PER_PIECE) == [PER_PIECE], "nothing may follow the only piece"
    rig.mover.drain()
    assert rig.submit_saves(PER_PIECE + 1) == [2, 3, 2]


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ([20], [2, 3, 6, 6, 2, 1]),
        ([1, 19], [2, 3, 6, 6, 2, 1]),
        ([17], [2, 3, 6, 5, 1]),
        ([7, 7, 7, 7], [2, 3, 6, 6, 6, 4, 1]),
        ([PER_PIECE], [PER_PIECE]),
        ([1, 2, 3], [PER_PIECE]),
        ([1, 1, 1, 1, 1, 2], [2, 5]),
    ],
)
def test_loads_begin_with_few_chunks_of_any_request(
    rig: Rig, counts: list[int], sizes: list[int]
) -> None:
    save(rig.mover, copies_of(range(60), [[block] for block in range(60)]))
    rig.sent()
    for _ in range(2):  # in the second iteration, the link is idle again
        assert rig.submit_loads(*counts) == sizes
        done = rig.mover.drain()
        assert (
            sorted(result.load_id for result in done.loads) == list(range(len(counts)))
            and not done.bad_blocks
        )
        rig.sent()
    assert torch.equal(
        rig.paged.payload(range(60, 60 + sum(counts))), rig.paged.payload(range(sum(counts)))
    )


def test_saves_are_sent_in_the_order_of_frames(rig: Rig) -> None:
    """`Rig.noted` checks the order."""
    rig.mover.begin_step(())
    backwards = copies_of(range(20)[::-1], [[block] for block in range(20)])
    rig.mover.submit_saves([SavePlan(ReqId("s"), batch_of(backwards))])
    assert sorted(rig.mover.drain().saved) == list(range(1, 21))
    assert rig.sent() == [2, 3, 6, 6, 3]


def test_finished_saves_leave_room_for_more(
    rig: Rig, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing collects finished pieces between two steps if no piece is waiting."""
    monkeypatch.setattr(saves_module, "MAX_PIECES", 5)
    assert rig.submit_saves(20) == [2, 3, 6, 6, 3]
    flights = list(rig.mover._saves.in_flight)
    gpu.run_until(lambda: all(flight.sent.done.is_done() for flight in flights))
    assert rig.submit_saves(20) == [2, 3, 6, 6, 3]
    done = rig.mover.drain()
    assert (len(done.saved), done.failed) == (40, [])


def test_a_save_with_an_invalid_block_fails_only_its_job(rig: Rig) -> None:
    copies = list(copies_of(range(20), [[block] for block in range(20)]))
    copies[0] = copies[0]._replace(blocks=(BlockId(BLOCKS),))
    rig.mover.begin_step(())
    rig.mover.submit_saves([SavePlan(ReqId("s"), batch_of(copies))])
    rig.mover.begin_step([BlockId(block) for block in range(20)])
    done = rig.mover.drain()
    assert (sorted(done.saved), sorted(done.failed)) == (list(range(3, 21)), [1, 2])


def test_other_connectors_may_write_blocks_after_a_wait(rig: Rig) -> None:
    rig.submit_saves(40)
    reads = [flight.sent.read for flight in rig.mover._saves.in_flight]
    assert not all(read.is_done() for read in reads)
    rig.mover.wait_for_saves([BlockId(0), BlockId(39)])
    assert all(read.is_done() for read in reads)


def test_a_wait_for_blocks_ends_with_the_last_save_that_reads_them(rig: Rig) -> None:
    rig.submit_saves(40)  # the first job has two chunks
    for block, num_jobs in ((0, 1), (1, 1), (2, 2)):
        events = rig.mover._saves.submit_gathers_of(np.array([block]))
        assert events[-1] is rig.mover._saves.in_flight[num_jobs - 1].sent.read
        assert len(events) == num_jobs


def test_rejected_saves_are_reported_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = copies_of(range(20), [[block] for block in range(20)])
    plan = SavePlan(ReqId("s"), batch_of(copies))
    with monkeypatch.context() as patch:
        patch.setattr(saves_module, "MAX_PIECES", 3)
        rig.mover.begin_step(())
        rig.mover.submit_saves([plan])
        done = rig.mover.drain()
    assert (sorted(done.saved), sorted(done.failed)) == (list(range(1, 12)), list(range(12, 21)))
    with monkeypatch.context() as patch:
        part = rig.mover._shared.kinds[0].memory.frame_bytes
        patch.setattr(
            rig.mover._shared,
            "registered",
            SimpleNamespace(is_complete=False, is_over=True, num_registered_bytes=7 * part),
        )
        rig.mover.submit_saves([plan])
        done = rig.mover.drain()
    assert (sorted(done.saved), sorted(done.failed)) == (list(range(1, 6)), list(range(6, 21))), (
        "pieces must contain only pinned frames"
    )
    rig.mover._break("injected by the test")
    rig.mover.submit_saves([plan])
    assert (done := rig.mover.drain()).saved == [] and sorted(done.failed) == list(range(1, 21))


def test_an_impossible_load_fails_no_other_load(rig: Rig) -> None:
    """The loads share a piece. Only the loads with an invalid block id fail."""
    save(rig.mover, copies_of(range(60), [[block] for block in range(60)]))
    wanted = [
        ("a", (0, 70), (1, 71)),
        ("b", (2, 72), (3, 10**6)),
        ("c", (4, 74), (5, 75)),
        ("d", (0, BLOCKS)),
    ]
    plans = [
        LoadPlan(
            ReqId(name),
            i,
            batch_of(copies_of([frame], [[block]], frame + 1)[0] for frame, block in moved),
        )
        for i, (name, *moved) in enumerate(wanted)
    ]
    rig.mover.begin_step((), has_loads=True)
    rig.mover.submit_loads(plans)
    done = rig.mover.drain()
    assert {result.load_id: len(result.bad_keys) for result in done.loads} == {
        0: 0,
        1: 2,
        2: 0,
        3: 1,
    }
    assert done.bad_blocks == {72, 10**6, BLOCKS}
    assert torch.equal(rig.paged.payload([70, 71, 74, 75]), rig.paged.payload([0, 1, 4, 5]))
    rig.mover.begin_step(())
    assert len(rig.mover._shared.spare_marks) >= NUM_MARKS, "marks leak"


def test_loads_of_other_steps_do_not_shrink_the_first_piece(rig: Rig) -> None:
    """The first piece cannot contain chunks from loads of other steps."""
    plans = [LoadPlan(ReqId("l"), i, batch_of(copies_of(range(4), [[0]] * 4))) for i in range(2)]
    loads = [Load(plan, 4) for plan in plans]
    rig.mover._loads.waiting.extend(
        WaitingLoad(x, 0, x.plan.chunks, Mark(mover_module.driver.Event(), [])) for x in loads
    )
    _, taken, _, owners = rig.mover._loads._take()
    assert len(taken) == 4 and owners == [(loads[0], 4)]
    rig.mover._loads.waiting.clear()


def test_nothing_is_sorted_before_the_first_piece_is_out() -> None:
    class Watched:
        longest = 0

        def __len__(self) -> int:
            return len(batch)

        def __getitem__(self, index: Any) -> Any:
            found = batch[index]
            Watched.longest = max(Watched.longest, len(found))
            return found

    batch, copies = batch_of(copies_of(range(100), [[0]] * 100)), Watched()
    plan = LoadPlan(ReqId("l"), 0, copies)  # type: ignore[arg-type]
    waiting = WaitingLoad(Load(plan, 100), 0, copies, None)  # type: ignore[arg-type]
    for room in (2, 4):
        waiting.take(room, per_piece=PER_PIECE, is_last=True)
        assert Watched.longest == room
    waiting.take(PER_PIECE, per_piece=PER_PIECE, is_last=True)
    waiting.take(PER_PIECE, per_piece=PER_PIECE, is_last=True)
    assert Watched.longest == jobs.SORTED_PIECES * PER_PIECE


def test_loads_behind_others_that_still_run_are_full_pieces(rig: Rig) -> None:
    save(rig.mover, copies_of(range(60), [[block] for block in range(60)]))
    rig.sent()
    assert rig.submit_loads(20)[:2] == [2, 3]
    assert rig.submit_loads(20)[:2] == [6, 6]
    rig.mover.drain()


@given(
    num=st.integers(1, 300),
    per_piece=st.integers(1, 12),
    rooms=st.lists(st.integers(1, 12), min_size=1),
    seed=st.randoms(),
)
def test_a_load_hands_out_each_chunk_once_in_the_order_of_frames(
    num: int, per_piece: int, rooms: list[int], seed: Any
) -> None:
    copies = copies_of(seed.sample(range(1000), num), [[0]] * num)
    plan = LoadPlan(ReqId("l"), 0, batch_of(copies))
    waiting = WaitingLoad(Load(plan, num), 0, plan.chunks, None)
    handed: list[ChunkCopy] = []
    while waiting.num_left:
        room = min(rooms[len(handed) % len(rooms)], per_piece)
        taken = waiting.take(room, per_piece=per_piece, is_last=True)
        assert 1 <= len(taken) <= room and list(taken) == sorted(taken, key=lambda copy: copy.frame)
        handed += taken
        assert waiting.num_left == num - len(handed)
    assert sorted(handed) == sorted(copies)
    window = jobs.SORTED_PIECES * per_piece
    late = handed[2 * per_piece :]
    assert sum(a.frame > b.frame for a, b in pairwise(late)) <= 2 * (num // window + 2)


def test_the_compute_stream_is_the_one_that_is_current_now(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine can switch streams between steps. Marks in other streams have no effect (I2)."""
    mover = Rig(monkeypatch).mover
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mover_module.driver.Stream, "view", lambda handle: SimpleNamespace(handle=handle)
        )
        for handle in (7, 9, 9, 7):
            patch.setattr(mover_module, "_current_stream", lambda _, handle=handle: handle)
            assert mover._compute().handle == handle
    assert not load(mover, ()).bad_blocks
    mover.close()
