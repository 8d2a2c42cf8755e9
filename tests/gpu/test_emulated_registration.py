"""Tests saves and loads while host memory is being registered, on the emulated GPU.

Saves to unregistered frames wait until the frames are registered. A waiting save fails if its
blocks are rewritten first.
"""

import ctypes
import mmap
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from batches import batch_of
from emulated_gpu import emulated
from gpu_support import Frames, Paged, copies_of, make_mover, part_bytes_for, per_layer

from kvloft import _core
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import mover as mover_module
from kvloft.transfer.cuda import registration
from kvloft.transfer.cuda.mover import CudaMover

BLOCKS = 60


class Pins:
    """A memory range that a test registers frame by frame."""

    def __init__(self, _: int, size_bytes: int, **options: Any) -> None:
        self.size_bytes, self.num_registered_bytes, self.is_over = size_bytes, 0, False
        self.frame_bytes = size_bytes // BLOCKS
        self.on_progress, self.numa_node = options["on_progress"], options["numa_node"]

    @property
    def is_complete(self) -> bool:
        return self.num_registered_bytes >= self.size_bytes

    def pin(self, num_frames: int) -> None:
        self.num_registered_bytes = min(
            self.size_bytes, self.num_registered_bytes + num_frames * self.frame_bytes
        )
        self.on_progress()

    def end(self) -> None:
        self.is_over = True
        self.on_progress()

    def wait(self, timeout_s: float | None = None) -> bool:
        return False

    def close(self) -> None: ...


@dataclass
class Rig:
    paged: Paged
    frames: Frames
    mover: CudaMover
    pins: Pins

    def submit(self, copies: Sequence[ChunkCopy]) -> None:
        self.mover.begin_step(())
        self.mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])

    def settled(self) -> tuple[list[int], list[int]]:
        """Poll until no copy can make progress. Return the tickets that were saved and the tickets
        that failed since the last call.
        """
        saved, failed = [], []
        for _ in range(400):
            done = self.mover.poll()
            saved += done.saved
            failed += done.failed
        return sorted(saved), sorted(failed)

    def is_kept(self, copy: ChunkCopy) -> bool:
        want = self.paged.payload(copy.blocks).numpy()
        return np.array_equal(self.frames.parts[copy.frame, : len(want)], want)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with emulated(1):
        yield make_rig(monkeypatch)


def make_rig(patch: pytest.MonkeyPatch, *, gathers_first: bool = False, num_ranks: int = 1) -> Rig:
    patch.setattr(mover_module, "RegisteredRange", Pins)
    patch.setattr(mover_module, "numa_node_of", lambda _: 1)
    paged = per_layer(2, BLOCKS, 900)
    paged.randomize(1)
    frames = Frames(BLOCKS, part_bytes_for(paged.block_bytes), num_ranks=num_ranks)
    mover = make_mover(paged, frames, 1, gathers_first=gathers_first, ring=(2, 3 * 4096))
    pins = mover._shared.registered
    assert isinstance(pins, Pins)
    return Rig(paged, frames, mover, pins)


def chunks(num: int) -> tuple[ChunkCopy, ...]:
    return copies_of(range(num), [[block] for block in range(num)])


def test_saves_wait_for_their_frames_and_none_fails(rig: Rig) -> None:
    copies = chunks(30)
    rig.submit(copies)
    assert rig.settled() == ([], []) and rig.mover.is_behind
    assert rig.mover.usable_bytes == 0
    rig.pins.pin(12)
    assert rig.mover.usable_bytes == 12 * rig.frames.memory.frame_bytes
    saved, failed = rig.settled()
    assert failed == [] and saved == list(range(1, len(saved) + 1)) and 9 <= len(saved) <= 12, (
        "pieces of registered frames must be sent immediately"
    )
    rig.pins.pin(BLOCKS)
    assert rig.settled() == (list(range(len(saved) + 1, 31)), [])
    assert rig.mover.usable_bytes is None
    assert all(map(rig.is_kept, copies)) and not rig.mover.is_behind
    rig.mover.close()


@given(seed=st.integers(0, 2**32))
def test_only_a_block_that_is_written_again_makes_a_waiting_save_fail(seed: int) -> None:
    chance = random.Random(seed)
    with emulated(seed), pytest.MonkeyPatch.context() as patch:
        rig = make_rig(patch)
        copies = chunks(40)
        rig.submit(copies)
        rig.pins.pin(chance.randrange(40))
        rewritten = chance.randrange(40)
        num_registered = rig.pins.num_registered_bytes // rig.pins.frame_bytes
        rig.mover.begin_step((BlockId(rewritten),))
        rig.mover._compute().synchronize()  # the forward pass that rewrites the block may now run
        for buffer, offset, stride, size in rig.paged.planes:
            rig.paged.buffers[buffer][
                offset + rewritten * stride : offset + rewritten * stride + size
            ] = 0x5A
        rig.pins.pin(BLOCKS)
        saved, failed = rig.settled()
        assert sorted(saved + failed) == list(range(1, 41)), "each ticket must be reported once"
        assert all(ticket - 1 <= max(rewritten + 3, 0) for ticket in failed), (
            "later saves need not fail"
        )
        if rewritten < num_registered - 3:
            assert failed == []
        assert all(
            rig.is_kept(copy) for copy in copies if copy.ticket in saved and copy.frame != rewritten
        )
        if rewritten + 1 in saved:
            assert not rig.is_kept(copies[rewritten]), "saved before the block was rewritten"
        rig.mover.close()


def test_saves_to_unregistered_frames_fail_without_waiting(rig: Rig) -> None:
    rig.submit(chunks(30))
    rig.pins.pin(12)
    rig.pins.end()
    saved, failed = rig.settled()
    assert sorted(saved + failed) == list(range(1, 31)) and 9 <= len(saved) <= 12
    rig.submit(chunks(30))
    assert rig.settled() == (list(range(1, 13)), list(range(13, 31)))
    rig.mover.close()


def test_draining_does_not_wait_for_pinning(rig: Rig) -> None:
    """The engine unmaps the blocks when it sleeps, so waiting saves fail immediately."""
    rig.submit(chunks(6))
    done = rig.mover.drain()
    assert done.saved == [] and sorted(done.failed) == [1, 2, 3, 4, 5, 6]
    rig.submit(chunks(6))
    assert rig.settled() == ([], []), "later saves must wait again"
    rig.pins.pin(BLOCKS)
    assert rig.settled() == ([1, 2, 3, 4, 5, 6], [])
    rig.mover.close()


def test_loads_from_registered_frames_use_dma(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = chunks(30)
    rig.pins.pin(BLOCKS)
    rig.submit(copies)
    assert len(rig.settled()[0]) == 30
    rig.pins.num_registered_bytes = 15 * rig.pins.frame_bytes
    told: list[tuple[int, bool]] = []
    submit = rig.mover.load_lane.submit

    def noted(piece: Any, *, kind: int, is_registered: bool) -> Any:
        told.append((max(run.frame + run.num_rows for run in piece.runs), is_registered))
        return submit(piece, kind=kind, is_registered=is_registered)

    monkeypatch.setattr(rig.mover.load_lane, "submit", noted)
    rig.mover.begin_step((), has_loads=True)
    rig.mover.submit_loads([LoadPlan(ReqId("l"), 0, batch_of(copies))])
    assert not rig.mover.drain().bad_blocks
    assert told and all(is_registered == (end <= 15) for end, is_registered in told)
    rig.mover.close()


def test_an_engine_that_zeroes_new_blocks_waits_for_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(1):
        rig = make_rig(monkeypatch, gathers_first=True)
        rig.submit(chunks(6))
        assert rig.settled() == ([], [1, 2, 3, 4, 5, 6])
        rig.mover.close()


@pytest.mark.parametrize(("num_ranks", "node"), [(1, 1), (2, None)])
def test_ranks_that_share_frames_keep_memory_placement(
    num_ranks: int, node: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated(1):
        rig = make_rig(monkeypatch, num_ranks=num_ranks)
        assert rig.pins.numa_node == node
        rig.mover.close()


def test_frames_are_registered_in_order_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    with emulated(1) as gpu:
        monkeypatch.setattr(registration, "_touch", lambda *_: None)
        pinned: Any = None

        def progress() -> None:
            if pinned is not None:
                seen.append((pinned.num_registered_bytes, pinned.is_over))

        monkeypatch.setattr(registration.threading.Thread, "start", lambda _: None)
        pinned = registration.RegisteredRange(
            1 << 20, 10 * 4096, piece_bytes=4 * 4096, numa_node=None, on_progress=progress
        )
        pinned._run()
        assert seen == [(4 * 4096, False), (10 * 4096, False), (10 * 4096, True)]
        assert sorted(gpu.registered) == [1 << 20, (1 << 20) + 4 * 4096]
        gpu.registered.clear()


def test_memory_stays_on_its_numa_node() -> None:
    """The first process that places pages, for example the server, determines their NUMA node."""
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if not _core.prefer_numa_node(begin, 2 * mmap.PAGESIZE, 0):
        pytest.skip("the kernel does not allow setting a memory policy")
    assert not _core.prefer_numa_node(begin, 2 * mmap.PAGESIZE, 0)
    assert _core.prefer_numa_node(begin + 2 * mmap.PAGESIZE, 2 * mmap.PAGESIZE, 0)


def test_pages_are_placed_before_they_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(registration._core, "prefer_numa_node", lambda *call: calls.append(call))
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with ThreadPoolExecutor(1) as pool:
        registration._touch(begin + 1, mmap.PAGESIZE, 2, pool)
        registration._touch(begin, mmap.PAGESIZE, None, pool)
    assert calls == [(begin, 2 * mmap.PAGESIZE, 2)], (
        "expected whole pages, and no call without a node"
    )
