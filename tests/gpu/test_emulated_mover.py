"""Tests saves and loads on the emulated GPU: layouts, staging, partial loads, ranks, registration,
invalid copies and failed driver calls.
"""

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_mover as on_gpu
from batches import batch_of
from emulated_gpu import Event, Gpu, Stream, emulated
from gpu_support import POISON, Frames, copies_of, make_mover, part_bytes_for, per_layer, save

from kvloft._core import TRAILER_BYTES
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda.driver import CudaError


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.mark.parametrize("route", on_gpu.ROUTES)
@pytest.mark.parametrize("layout", ["per_layer_8", "one_byte_pages", "odd_mix"])
def test_round_trip_is_bitwise(layout: str, route: str) -> None:
    on_gpu.test_round_trip_is_bitwise(layout, route, 3)


test_partial_loads_write_only_their_blocks = on_gpu.test_partial_loads_write_only_their_blocks
test_ranks_stay_in_their_part = on_gpu.test_ranks_stay_in_their_part
test_unregistered_frames_are_loaded_but_not_used_by_saves = (
    on_gpu.test_unregistered_frames_are_loaded_but_not_used_by_saves
)
test_copies_outside_the_arena_are_failures_not_writes = (
    on_gpu.test_copies_outside_the_arena_are_failures_not_writes
)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_written_behind_a_payload(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are registered five at a time."""
    monkeypatch.setattr("kvloft.transfer.cuda.mover.GOOD_PIECE_BYTES", 5 * 8192 * num_ranks)
    paged = per_layer(2, 300, 900)
    paged.randomize(7)
    frames = Frames(60, part_bytes_for(paged.block_bytes * 3), num_ranks - 1, num_ranks)
    mover = make_mover(paged, frames, 3, ring=(2, 6 * 8192))
    blocks = iter(range(300))
    copies = copies_of(range(56), [[next(blocks) for _ in range(3)] for _ in range(56)])
    assert len(save(mover, copies[:20]).saved) == 20
    assert len(save(mover, copies[20:]).saved) == len(copies) - 20
    for copy in copies:
        want = paged.payload(copy.blocks).numpy()
        assert np.array_equal(frames.parts[copy.frame, : len(want)], want)
        assert (frames.parts[copy.frame, len(want) : -TRAILER_BYTES] == POISON).all()
    assert (np.delete(frames.raw, num_ranks - 1, axis=1) == POISON).all()
    mover.close()


def test_a_closed_mover_is_deleted_without_garbage_collection() -> None:
    """A mover holds the host memory of a server, which must be unmapped soon after the server
    exits.
    """
    paged = per_layer(2, 8, 4096)
    mover = make_mover(paged, Frames(8, part_bytes_for(paged.block_bytes)), 1)
    assert len(save(mover, copies_of(range(4), [[i] for i in range(4)])).saved) == 4
    gc.collect()
    gc.disable()
    try:
        mover.close()
        mover.close()
        is_alive = weakref.ref(mover)
        del mover
        assert is_alive() is None
    finally:
        gc.enable()


def counting(name: str, original: Callable[..., None], counts: Counter[str]) -> Callable[..., None]:
    def counted(*args: Any, **kwargs: Any) -> None:
        counts[name] += 1
        original(*args, **kwargs)

    return counted


@pytest.mark.parametrize(
    ("places", "num_commands"),
    [
        ([3 * i + j for i in range(12) for j in range(2)], {"copy_batch": 1}),
        ([*range(12), *range(20, 32)], {"copy_rows": 2}),
        ([*range(6), *range(20, 26)], {"copy_rows": 2}),
        ([*range(12), 20, 21, 30], {"copy_rows": 1, "copy_batch": 1}),
        ([*range(24)], {"copy_rows": 1}),
    ],
)
def test_many_short_runs_are_one_command(
    places: list[int], num_commands: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is idle between two commands, so short runs of adjacent frames must be combined."""
    paged = per_layer(2, 60, 900)
    paged.randomize(3)
    frames = Frames(60, part_bytes_for(paged.block_bytes))
    mover = make_mover(paged, frames, 1)
    counts: Counter[str] = Counter()
    for name in ("copy_batch", "copy_rows", "copy_to_host"):
        monkeypatch.setattr(Stream, name, counting(name, getattr(Stream, name), counts))
    copies = copies_of(places, [[block] for block in range(len(places))])
    assert len(save(mover, copies).saved) == len(places)
    assert counts == num_commands
    for copy in copies:
        want = paged.payload(copy.blocks).numpy()
        assert np.array_equal(frames.parts[copy.frame, : len(want)], want)
    mover.close()


@given(seed=st.integers(0, 2**32), fails_at=st.integers(1, 70))
def test_one_failed_call_is_reported_once_and_nothing_is_written_after(
    seed: int, fails_at: int
) -> None:
    """One driver call fails at a random point, on any thread.

    Nothing may be written after a report, because frames and blocks can then have new owners.
    """
    chance = random.Random(seed)
    with emulated(seed) as gpu, pytest.MonkeyPatch.context() as patch:
        paged = per_layer(2, 60, 900)
        paged.randomize(1)
        frames = Frames(60, part_bytes_for(paged.block_bytes))
        patch.setattr("kvloft.transfer.cuda.mover.SLOTS_AHEAD", chance.choice([1, 2, 8]))
        mover = make_mover(paged, frames, 1, ring=(2, chance.choice([1, 3]) * 4096))
        old = copies_of(range(10), [[block] for block in range(10)])
        assert len(save(mover, old).saved) == 10
        before, calls, enqueue = paged.snapshot(), count(1), Stream.enqueue

        def fail_once(self: Stream, *args: Any) -> None:
            if next(calls) == fails_at:
                raise CudaError("once")
            enqueue(self, *args)

        patch.setattr(Stream, "enqueue", fail_once)
        saves: list[ChunkCopy] = []
        results = []
        for step in range(4):
            mover.begin_step((), has_loads=True)
            targets = chance.sample(range(30, 60), 3)
            loads = [
                copy._replace(blocks=(BlockId(block),))
                for copy, block in zip(old, targets, strict=False)
            ]
            mover.submit_loads([LoadPlan(ReqId("l"), step, batch_of(loads))])
            fresh = copies_of(
                range(10 + 9 * step, 19 + 9 * step),
                [[block] for block in chance.sample(range(30), 9)],
                100 + 9 * step,
            )
            saves += fresh
            mover.submit_saves([SavePlan(ReqId("s"), batch_of(fresh))])
            if chance.random() < 0.5:
                results.append(mover.poll())
        results.append(mover.drain())
        assert not mover.is_behind
        reported = [ticket for done in results for ticket in (*done.saved, *done.failed)]
        assert sorted(reported) == sorted(copy.ticket for copy in saves)
        assert sorted(load.load_id for done in results for load in done.loads) == list(range(4))
        by_ticket = {copy.ticket: copy for copy in saves}
        for ticket in (ticket for done in results for ticket in done.saved):
            want = paged.payload(by_ticket[ticket].blocks, before).numpy()
            assert np.array_equal(frames.parts[by_ticket[ticket].frame, : len(want)], want)
        held = frames.raw.copy()
        gpu.advance(10**6)
        assert np.array_equal(frames.raw, held), "a frame was written after it was reported"
        mover.close()


def test_a_load_is_behind_until_its_last_piece_is_sent(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk larger than a slot is split into pieces that wait for each other."""
    monkeypatch.setattr("kvloft.transfer.cuda.mover.SLOTS_AHEAD", 1)
    monkeypatch.setattr(
        "kvloft.transfer.cuda.mover.Submitter",
        lambda *_, **__: SimpleNamespace(wake=lambda: None, close=lambda: None),
    )
    paged = per_layer(3, 40, 8192)
    paged.randomize(5)
    frames = Frames(8, part_bytes_for(paged.block_bytes * 4))
    mover = make_mover(paged, frames, 4, ring=(2, 4 * 4096))
    copies = copies_of([2], [[3, 4, 5, 6]])
    assert len(save(mover, copies).saved) == 1
    monkeypatch.setattr(Event, "is_done", lambda self: self.last is None or self.last.is_done)
    mover.begin_step((), has_loads=True)
    mover.submit_loads([LoadPlan(ReqId("r"), 1, batch_of(copies))])
    assert mover.is_behind and not mover._loads.waiting
    assert not mover.drain().bad_blocks and not mover.is_behind
    mover.close()


def test_a_mark_orders_the_loads_of_one_step_only(gpu: Gpu) -> None:
    """If a later `begin_step` fails, its loads must still wait for the work launched since then."""
    paged = per_layer(2, 23, 37, offset=3, gap=5)
    mover = make_mover(paged, Frames(8, part_bytes_for(paged.block_bytes)), 1)
    mover.begin_step((), has_loads=True)
    assert mover._loads._before is not None
    mover.submit_loads([])
    assert mover._loads._before is None
    mover.drain()
    mover.close()
    assert not mover._shared.spare_marks, "CUDA events leak"


def test_after_a_break_loads_say_that_they_failed(gpu: Gpu) -> None:
    """If failed loads were not reported, kvloft would repeatedly offer the same loads to vLLM.

    One load is in flight when the GPU breaks, and the other load is submitted afterwards.
    """
    paged = per_layer(2, 23, 37, offset=3, gap=5)
    mover = make_mover(paged, Frames(8, part_bytes_for(paged.block_bytes)), 1)
    load = LoadPlan(ReqId("r"), 1, batch_of(copies_of([0, 1], [[3], [4]])))
    mover.submit_loads([load])
    gpu.stop_forever()
    mover.submit_loads([replace(load, load_id=2)])
    done = mover.drain()
    assert [(result.load_id, result.failed, result.bad_keys) for result in done.loads] == [
        (1, True, ()),
        (2, True, ()),
    ]
    assert done.bad_blocks == {3, 4}
    mover.close()
