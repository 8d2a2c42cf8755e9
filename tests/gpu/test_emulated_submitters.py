"""Tests submitters on the emulated GPU: copies are sent without polling and arrive in the correct
place.
"""

import os
import queue
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

import torch
from batches import batch_of
from emulated_gpu import emulated
from gpu_support import Frames, copies_of, make_mover, part_bytes_for, per_layer

from kvloft.seam.ids import BlockId, ReqId, Ticket
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import jobs
from kvloft.transfer.cuda.lanes import Sent
from kvloft.transfer.cuda.pieces import Piece
from kvloft.transfer.cuda.shared import NUM_MARKS

DEADLINE_S = 20.0 * float(os.environ.get("TEST_PACE", "1"))
BLOCKS = 300


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the submitters did not send the copy"
        time.sleep(2e-3)


@pytest.mark.parametrize(
    ("num_chunks", "num_slots", "slot_pages"),
    [(1, 2, 1), (2, 1, 5), (127, 2, 40), (128, 3, 5), (129, 2, 200)],
)
def test_submitters_send_copies_without_polls(
    num_chunks: int, num_slots: int, slot_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloft.transfer.cuda.mover.SLOTS_AHEAD", 2)
    chance = random.Random(num_chunks)
    with emulated(num_chunks):
        paged = per_layer(2, BLOCKS, 900)
        paged.randomize(num_chunks)
        before = paged.snapshot()
        frames = Frames(BLOCKS, part_bytes_for(paged.block_bytes))
        mover = make_mover(paged, frames, 1, ring=(num_slots, slot_pages * 4096))
        mover.wait_registered()
        sources, targets = (
            chance.sample(range(150), num_chunks),
            chance.sample(range(150, BLOCKS), num_chunks),
        )
        copies = copies_of(chance.sample(range(BLOCKS), num_chunks), [[block] for block in sources])
        mover.begin_step(())
        mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
        until(lambda: not mover.is_behind)
        assert sorted(mover.drain().saved) == sorted(copy.ticket for copy in copies)
        cuts = sorted({0, num_chunks, *chance.choices(range(num_chunks), k=3)})
        plans = []
        for number, (begin, end) in enumerate(pairwise(cuts)):
            moved = [
                copy._replace(blocks=(BlockId(block),), ticket=Ticket(-1))
                for copy, block in zip(copies[begin:end], targets[begin:end], strict=True)
            ]
            plans.append(LoadPlan(ReqId(f"l{number}"), number, batch_of(moved)))
        mover.begin_step(())
        mover.submit_loads(plans)
        until(lambda: not mover.is_behind)
        done = mover.drain()
        assert (
            sorted(result.load_id for result in done.loads) == list(range(len(plans)))
            and not done.bad_blocks
        )
        assert torch.equal(paged.payload(targets), paged.payload(sources, before))
        mover.begin_step(())  # returns the step's events to the pool
        assert len(mover._shared.spare_marks) >= NUM_MARKS, "marks leak"
        mover.close()


def test_the_piece_that_a_feeder_is_about_to_send_counts_as_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the piece counted as sent, a caller that checks at that moment, such as a benchmark, would
    treat a copy as done before its last piece has started.
    """
    monkeypatch.setattr("kvloft.transfer.cuda.mover.SLOTS_AHEAD", 1)
    is_at_last, may_send = threading.Event(), threading.Event()
    with emulated(7):
        paged = per_layer(2, BLOCKS, 900)
        mover = make_mover(
            paged, Frames(BLOCKS, part_bytes_for(paged.block_bytes)), 1, ring=(2, 4096)
        )
        mover.wait_registered()
        copies = copies_of(list(range(20)), [[block] for block in range(20)])
        submit = mover.save_lane.submit

        def slow(piece: Piece, **more: Any) -> Sent:
            if (
                threading.current_thread() is not threading.main_thread()
                and not mover._saves.is_behind
            ):
                is_at_last.set()
                assert may_send.wait(DEADLINE_S)
            return submit(piece, **more)

        monkeypatch.setattr(mover.save_lane, "submit", slow)
        mover.begin_step(())
        mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
        assert is_at_last.wait(DEADLINE_S), "no submitter reached the last piece"
        answers: queue.Queue[bool] = queue.Queue()
        threading.Thread(target=lambda: answers.put(mover.is_behind), daemon=True).start()
        with suppress(queue.Empty):  # `is_behind` can also wait for the submitter
            assert answers.get(timeout=0.3)
        may_send.set()
        until(lambda: not mover.is_behind)
        assert len(mover.drain().saved) == 20
        mover.close()


@given(
    st.integers(1, 200),
    st.integers(12, 42).map(lambda bits: 1 << bits),
    st.sampled_from([1.0, 100.0, 1e6]),
)
def test_first_pieces_grow_and_are_less_than_a_piece(
    chunks_per_piece: int, part_bytes: int, prepare_us: float
) -> None:
    sizes = [0, *jobs.ramp(chunks_per_piece, part_bytes, prepare_us), chunks_per_piece]
    assert sizes == sorted(set(sizes)), (
        "an empty piece, a piece smaller than its predecessor, or a piece too large"
    )


@pytest.mark.parametrize("part_bytes", [256 << 10, 512 << 10, 1 << 20, 2 << 20])
def test_first_pieces_keep_the_link_at_work_while_the_next_is_prepared(part_bytes: int) -> None:
    per_piece = (40 << 20) // part_bytes
    sizes = [*jobs.ramp(per_piece, part_bytes, 100.0), per_piece]
    assert sizes[0] < per_piece / 2
    for few, following in pairwise(sizes):
        assert (
            few * part_bytes / jobs.LINK_BYTES_PER_US >= 100.0 + following * jobs.PREPARE_CHUNK_US
        )
