"""Compares saves and loads on a GPU with torch, bit for bit, for many layouts, page sizes, odd
dimensions and permutations. The destinations are poisoned.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

from batches import batch_of
from gpu_support import (
    POISON,
    Frames,
    Paged,
    block_outermost,
    copies_of,
    load,
    make_mover,
    mixed,
    one_buffer,
    part_bytes_for,
    per_layer,
    save,
    trailers_of,
)
from kernels_oracle import chunk_tag

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan

LAYOUTS = {
    "per_layer_16": lambda: per_layer(5, 37, 4096 * 3),
    "per_layer_8": lambda: per_layer(3, 37, 4096 + 8, gap=16),
    "per_layer_4": lambda: per_layer(3, 29, 5036),
    "per_layer_1": lambda: per_layer(3, 29, 4099, offset=3, gap=7),
    "tiny_pages": lambda: per_layer(2, 41, 16),
    "one_byte_pages": lambda: per_layer(7, 41, 1),
    "one_buffer_18k": lambda: one_buffer(7, 31, 18 << 10),
    "block_outermost_64k": lambda: block_outermost(3, 23, 64 << 10),
    "mla_and_indexer": lambda: mixed(23, [656 * 64, 132 * 64, 656 * 64, 132 * 64]),
    "odd_mix": lambda: mixed(19, [577, 1, 8192, 4100, 13]),
    "two_mebibytes": lambda: block_outermost(1, 11, 2 << 20),
}
ROUTES = {
    "staged": {"ring": (2, 1 << 20)},
    "one_slot": {"ring": (1, 256 << 10)},
    "few_ctas": {"num_ctas": 3, "ring": (3, 300 << 10)},
}


def random_chunks(
    paged: Paged, blocks_per_chunk: int, num_frames: int, seed: int
) -> tuple[list[int], list[list[int]]]:
    """Return random frames, and distinct blocks for each frame."""
    rng = random.Random(seed)
    blocks = rng.sample(range(paged.num_blocks), paged.num_blocks)
    chunks = []
    while len(blocks) >= blocks_per_chunk and len(chunks) < num_frames - 2:
        chunks.append(blocks[:blocks_per_chunk])
        blocks = blocks[blocks_per_chunk:]
    frames = rng.sample(range(num_frames), len(chunks))
    return (sorted(frames) if rng.random() < 0.5 else frames), chunks


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_is_bitwise(layout: str, route: str, blocks_per_chunk: int) -> None:
    paged = LAYOUTS[layout]()
    num_frames = paged.num_blocks + 3
    frames = Frames(num_frames, part_bytes_for(paged.block_bytes * blocks_per_chunk))
    mover = make_mover(paged, frames, blocks_per_chunk, **ROUTES[route])
    page_bytes = [plane[3] for plane in paged.planes]
    for seed in range(2):
        paged.randomize(seed)
        before = paged.snapshot()
        frames.raw[:] = POISON
        places, chunks = random_chunks(paged, blocks_per_chunk, num_frames, seed)
        copies = copies_of(places, chunks)
        done = save(mover, copies)
        assert sorted(done.saved) == [copy.ticket for copy in copies] and not done.failed
        trailers = trailers_of(frames.memory)
        for frame, blocks in zip(places, chunks, strict=True):
            want = paged.payload(blocks).cpu().numpy()
            assert np.array_equal(frames.parts[frame, : len(want)], want)
            assert int(trailers[frame]["tag"]) == chunk_tag(want, page_bytes, len(blocks))
        for frame in set(range(num_frames)) - set(places):
            assert (frames.raw[frame] == POISON).all(), "a wrong frame was written"
        for now, then in zip(paged.buffers, before, strict=True):
            assert torch.equal(now, then), "a save changed its source"
        check_load(paged, mover, copies, before, seed)
    mover.close()


def check_load(paged: Paged, mover, copies, saved: list[torch.Tensor], seed: int) -> None:
    """Load all chunks into random blocks of poisoned KV. All other bytes must remain poisoned."""
    paged.poison()
    target = random.Random(seed + 100).sample(range(paged.num_blocks), paged.num_blocks)
    want = paged.snapshot()
    moved, at = [], 0
    for copy in copies:
        ids = target[at : at + copy.num_blocks]
        at += copy.num_blocks
        moved.append(ChunkCopy(copy.frame, copy.key, copy.num_blocks, 0, tuple(map(BlockId, ids))))
        paged.place(want, paged.payload(copy.blocks, saved), ids)
    done = load(mover, moved)
    assert [result.bad_keys for result in done.loads] == [()] and not done.bad_blocks
    for now, then in zip(paged.buffers, want, strict=True):
        assert torch.equal(now, then)


def check_partial_loads(paged: Paged, mover) -> None:
    """Save four chunks of seven blocks and load some blocks of each chunk.

    All other bytes must remain poisoned.
    """
    saved = paged.snapshot()
    copies = copies_of([4, 1, 2, 5], [list(range(7 * i, 7 * i + 7)) for i in range(4)])
    save(mover, copies)
    paged.poison()
    want = paged.snapshot()
    part = []
    for (first, count), copy, target in zip(
        [(0, 7), (2, 5), (1, 3), (6, 1)], copies, [20, 14, 10, 0], strict=True
    ):
        ids = tuple(BlockId(target + i) for i in range(count))
        part.append(ChunkCopy(copy.frame, copy.key, 7, first, ids))
        paged.place(want, paged.payload(copy.blocks[first : first + count], saved), ids)
    assert not load(mover, part).bad_blocks
    for now, then in zip(paged.buffers, want, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("route", ROUTES)
def test_partial_loads_write_only_their_blocks(route: str) -> None:
    paged = per_layer(3, 41, 4096 + 16)
    frames = Frames(6, part_bytes_for(paged.block_bytes * 7))
    mover = make_mover(paged, frames, 7, **ROUTES[route])
    paged.randomize()
    check_partial_loads(paged, mover)
    mover.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_stay_in_their_part(rank: int) -> None:
    paged = one_buffer(3, 16, 8192)
    frames = Frames(12, part_bytes_for(paged.block_bytes), rank, 3)
    mover = make_mover(paged, frames, 1)
    paged.randomize()
    saved = paged.snapshot()
    copies = copies_of([3, 4, 5, 6, 9], [[5], [2], [15], [0], [7]])
    save(mover, copies)
    others = np.delete(frames.raw, rank, axis=1)
    assert (others == POISON).all()
    for copy in copies:
        want = paged.payload(copy.blocks).cpu().numpy()
        assert np.array_equal(frames.parts[copy.frame, : len(want)], want)
    paged.poison()
    assert not load(mover, copies).bad_blocks
    for copy in copies:
        assert torch.equal(paged.payload(copy.blocks), paged.payload(copy.blocks, saved))
    mover.close()


def test_save_reads_after_the_forward_and_before_the_next_writer() -> None:
    """The compute stream is busy, so the test detects a gather or a writer that does not wait."""
    paged = block_outermost(4, 64, 64 << 10)
    frames = Frames(64, part_bytes_for(paged.block_bytes))
    mover = make_mover(paged, frames, 1, ring=(2, 256 << 10))
    big = torch.randn(4096, 4096, device="cuda")
    for seed in range(4):
        paged.poison()
        torch.cuda.synchronize()
        mover.begin_step(())
        for _ in range(20):
            big = torch.tanh(big @ big)
        paged.randomize(seed)
        want = paged.buffers[0].clone()
        copies = copies_of(list(range(64)), [[b] for b in range(64)])
        mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
        mover.begin_step(list(map(BlockId, range(64))))
        paged.poison()
        done = mover.drain()
        assert len(done.saved) == 64
        for copy in copies:
            block = paged.payload(copy.blocks, [want]).cpu().numpy()
            assert np.array_equal(frames.parts[copy.frame, : len(block)], block)
    mover.close()


def test_load_writes_after_the_last_reader() -> None:
    paged = block_outermost(4, 64, 64 << 10)
    frames = Frames(64, part_bytes_for(paged.block_bytes))
    mover = make_mover(paged, frames, 1)
    paged.randomize(1)
    copies = copies_of(list(range(64)), [[b] for b in range(64)])
    save(mover, copies)
    paged.poison()
    big = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        big = torch.tanh(big @ big)
    seen = paged.buffers[0].clone()
    mover.begin_step(())
    mover.submit_loads([LoadPlan(ReqId("r"), 1, batch_of(copies))])
    mover.drain()
    assert (seen == POISON).all()
    mover.close()


def test_loads_follow_saves_of_the_same_blocks() -> None:
    """A block is saved for one owner and loaded for the next owner, without a wait on the host."""
    paged = block_outermost(2, 64, 256 << 10)
    frames = Frames(128, part_bytes_for(paged.block_bytes))
    mover = make_mover(paged, frames, 1, ring=(2, 1 << 20))
    paged.randomize(3)
    first = paged.buffers[0].clone()
    mine = copies_of(list(range(64)), [[b] for b in range(64)])
    save(mover, mine)
    paged.randomize(4)
    second = paged.buffers[0].clone()
    others = copies_of(list(range(64, 128)), [[b] for b in range(64)], first_key=1000)
    mover.begin_step(())
    mover.submit_saves([SavePlan(ReqId("s"), batch_of(others))])
    mover.begin_step(())
    mover.submit_loads([LoadPlan(ReqId("l"), 1, batch_of(mine))])
    done = mover.drain()
    assert len(done.saved) == 64 and not done.bad_blocks
    assert torch.equal(paged.buffers[0], first)
    for copy in others:
        want = paged.payload(copy.blocks, [second]).cpu().numpy()
        assert np.array_equal(frames.parts[copy.frame, : len(want)], want)
    mover.close()


class NothingPinned:
    """A memory range in which no memory is registered."""

    is_complete = is_over = False
    num_registered_bytes = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        return False

    def close(self) -> None: ...


def check_unregistered(
    paged: Paged, frames: Frames, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Any, tuple[ChunkCopy, ...]]:
    """Check that chunks can be loaded from unregistered frames but not saved to them.

    Returns the mover and the chunks in these frames.
    """
    before = paged.snapshot()
    copies = copies_of(random.Random(4).sample(range(20), 15), [[block] for block in range(15)])
    mover = make_mover(paged, frames, 1, **options)
    save(mover, copies)
    mover.close()
    monkeypatch.setattr("kvloft.transfer.cuda.mover.RegisteredRange", NothingPinned)
    mover = make_mover(paged, frames, 1, **options)
    check_load(paged, mover, copies, before, seed=5)
    held = frames.raw.copy()
    for buffer in paged.buffers:
        buffer.bitwise_not_()
    done = save(mover, copies)
    assert sorted(done.failed) == sorted(copy.ticket for copy in copies) and not done.saved
    assert np.array_equal(frames.raw, held)
    return mover, copies


def test_unregistered_frames_are_loaded_but_not_used_by_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = per_layer(3, 40, 4096)
    paged.randomize()
    frames = Frames(20, part_bytes_for(paged.block_bytes))
    check_unregistered(paged, frames, monkeypatch, ring=(2, 64 << 10))[0].close()


def test_every_ticket_and_load_is_reported_once() -> None:
    paged = per_layer(2, 600, 512)
    frames = Frames(600, part_bytes_for(paged.block_bytes))
    mover = make_mover(paged, frames, 1, ring=(2, 256 << 10))
    paged.randomize()
    saved, failed, loads = [], [], []

    def take(done) -> None:
        saved.extend(done.saved)
        failed.extend(done.failed)
        loads.extend(result.load_id for result in done.loads)

    for step in range(300):
        mover.begin_step(())
        mover.submit_saves(
            [
                SavePlan(
                    ReqId("r"),
                    batch_of(
                        copies_of(
                            [2 * step, 2 * step + 1], [[2 * step], [2 * step + 1]], 10 * step + 1
                        )
                    ),
                )
            ]
        )
        mover.submit_loads([LoadPlan(ReqId("e"), step, (), (BlockId(3),))])
        take(mover.poll())
    take(mover.drain())
    assert sorted(saved + failed) == sorted(
        t for step in range(300) for t in (10 * step + 1, 10 * step + 2)
    )
    assert loads == list(range(300)) and len(saved) > 100
    mover.close()


def test_copies_outside_the_arena_are_failures_not_writes() -> None:
    paged = per_layer(2, 8, 512)
    frames = Frames(4, part_bytes_for(paged.block_bytes))
    mover = make_mover(paged, frames, 1)
    done = save(mover, copies_of([4], [[1]]))
    assert done.failed and not done.saved
    done = load(mover, copies_of([0], [[9]]))
    assert done.bad_blocks == {9} and len(done.loads) == 1
    mover.close()


def test_another_thread_can_drain_and_close_a_mover() -> None:
    """A lost server's memory is released in the background, in a thread that never used the GPU."""
    paged = per_layer(4, 41, 4096)
    for _ in range(2):  # memory that is still registered could not be registered again
        frames = Frames(20, part_bytes_for(2 * paged.block_bytes))
        mover = make_mover(paged, frames, 2)
        copies = copies_of(range(20), [[2 * i, 2 * i + 1] for i in range(20)])
        mover.begin_step(())
        mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(mover.drain).result(60)
            thread.submit(mover.close).result(60)
        assert len(done.saved) == 20
