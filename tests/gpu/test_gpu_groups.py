"""Tests CudaMover with multiple KV cache groups: two kinds of pages in the same memory, one arena
and one staging area. Every byte is compared.

`test_emulated_groups.py` runs the same tests on the emulated GPU.
"""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from batches import batch_of, batch_of_groups
from gpu_support import (
    Frames,
    Paged,
    copies_of,
    make_mover,
    part_bytes_for,
    per_layer,
    trailers_of,
    turned,
)
from kernels_oracle import chunk_tag

from kvloft.seam.batch import ChunkBatch, ChunkCopy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda.mover import CudaMover
from kvloft.transfer.cuda.trailers import TRAILER

pytestmark = pytest.mark.gpu
GROUPS = (0, 1, 0)
"""The kind of each group's pages."""
BLOCKS = 60
PAGES = [900, 4096, 5000]


def half_block(paged: Paged) -> Paged:
    """Return a group that has only the pages of the second layer."""
    return Paged(paged.buffers, paged.planes[1:], paged.num_blocks, digest=bytes(32))


def no_block(paged: Paged) -> Paged:
    """Return a group without layers on this pipeline stage. Its frames contain only a trailer."""
    return Paged(paged.buffers, [], paged.num_blocks, digest=bytes([9] * 32))


OTHERS = {"turned": turned, "half": half_block, "none": no_block}


class Rig:
    """Groups that share memory, each with a third of the blocks.

    ``sizes`` contains the number of blocks per chunk for each kind.
    """

    def __init__(
        self, page: int, other: str, *, slot_bytes: int = 1 << 16, sizes: tuple[int, int] = (1, 1)
    ) -> None:
        self.paged = per_layer(2, BLOCKS, page)
        self.kinds, self.sizes = [self.paged, OTHERS[other](self.paged)], sizes
        payload = max(kind.block_bytes * size for kind, size in zip(self.kinds, sizes, strict=True))
        self.frames = Frames(BLOCKS, part_bytes_for(payload))
        self.mover: CudaMover = make_mover(
            self.paged,
            self.frames,
            sizes,
            ring=(2, slot_bytes),
            others=self.kinds[1:],
            kind_of=GROUPS,
        )
        order = random.Random(page).sample(range(BLOCKS), BLOCKS)
        self.blocks = [order[group::3] for group in range(3)]
        chunks = [self.in_chunks(group, blocks) for group, blocks in enumerate(self.blocks)]
        self.copies = [
            copies_of([first for first, *_ in some], some, first_key=1 + 100 * group)
            for group, some in enumerate(chunks)
        ]

    def kind(self, group: int) -> Paged:
        return self.kinds[GROUPS[group]]

    def in_chunks(self, group: int, blocks: list[int]) -> list[list[int]]:
        """Split the blocks of a group into complete chunks."""
        size = self.sizes[GROUPS[group]]
        return [blocks[at : at + size] for at in range(0, len(blocks) // size * size, size)]

    def save(self) -> list[int]:
        batches = batch_of_groups(((group, copies) for group, copies in enumerate(self.copies)))
        self.mover.begin_step(())
        self.mover.submit_saves([SavePlan(ReqId("s"), batches)])
        return sorted(self.mover.drain().saved)


def batches_to(copies: list[tuple[ChunkCopy, ...]], targets: list[list[int]]) -> ChunkBatch:
    """Return a batch that loads ``copies``, given by group, into ``targets``."""
    moved = [
        [
            ChunkCopy(c.frame, c.key, 1, 0, (BlockId(to),))
            for c, to in zip(group, blocks, strict=True)
        ]
        for group, blocks in zip(copies, targets, strict=True)
    ]
    return batch_of_groups(((group, chunks) for group, chunks in enumerate(moved) if chunks))


@pytest.mark.parametrize("sizes", [(1, 2), (3, 1), (2, 5)])
@pytest.mark.parametrize("slot_bytes", [1 << 12, 1 << 16])
@pytest.mark.parametrize("other", ["half", "none"])
def test_groups_may_have_different_numbers_of_blocks_in_a_chunk(
    other: str, sizes: tuple[int, int], slot_bytes: int
) -> None:
    """Loads start at different blocks of their chunks, as for a sliding window that starts inside a
    chunk.
    """
    rig = Rig(4096, other, sizes=sizes, slot_bytes=slot_bytes)
    rig.paged.randomize(1)
    before = rig.paged.snapshot()
    assert rig.save() == sorted(copy.ticket for copies in rig.copies for copy in copies)
    trailers = trailers_of(rig.frames.memory)
    for group, copies in enumerate(rig.copies):
        page_bytes = [plane[3] for plane in rig.kind(group).planes]
        for copy in copies:
            want = rig.kind(group).payload(copy.blocks).cpu().numpy()
            assert np.array_equal(rig.frames.parts[copy.frame, : len(want)], want)
            assert int(trailers[copy.frame]["tag"]) == chunk_tag(want, page_bytes, len(copy.blocks))
            assert int(trailers[copy.frame]["num_blocks"]) == len(copy.blocks)
    rig.paged.poison()
    want_pages, loads = rig.paged.snapshot(), []
    for group, copies in enumerate(rig.copies):
        some = []
        for nth, (copy, to) in enumerate(
            zip(copies, rig.in_chunks(group, rig.blocks[group][::-1]), strict=False)
        ):
            first = nth % min(len(to), len(copy.blocks))
            to, source = to[first : len(copy.blocks)], copy.blocks[first : len(to)]
            rig.kind(group).place(want_pages, rig.kind(group).payload(source, before), to)
            some.append(
                ChunkCopy(copy.frame, copy.key, len(copy.blocks), first, tuple(map(BlockId, to)))
            )
        loads.append((group, some))
    rig.mover.begin_step((), has_loads=True)
    rig.mover.submit_loads([LoadPlan(ReqId("l"), 7, batch_of_groups(loads))])
    done = rig.mover.drain()
    assert [(result.bad_keys, result.failed) for result in done.loads] == [((), False)]
    for now, then in zip(rig.paged.buffers, want_pages, strict=True):
        assert torch.equal(now, then)
    rig.mover.close()


def test_a_chunk_of_more_blocks_than_its_kinds_frames_hold_is_not_copied() -> None:
    """Another kind with smaller blocks can have more blocks per chunk."""
    rig = Rig(4096, "half", sizes=(1, 2))
    rig.paged.randomize(1)
    two = copies_of([0], [[1, 2]])
    rig.frames.parts[:] = 7
    for group, is_saved in ((0, False), (1, True)):
        rig.mover.begin_step(())
        rig.mover.submit_saves([SavePlan(ReqId("s"), batch_of(two, group))])
        done = rig.mover.drain()
        assert (bool(done.saved), bool(done.failed)) == (is_saved, not is_saved)
        assert (rig.frames.parts == 7).all() or is_saved
    rig.mover.close()


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("page", PAGES)
def test_bytes_of_every_group_come_back(page: int, other: str) -> None:
    rig = Rig(page, other)
    rig.paged.randomize(page)
    before = rig.paged.snapshot()
    assert rig.save() == sorted(copy.ticket for copies in rig.copies for copy in copies)
    trailers = trailers_of(rig.frames.memory)
    for group, copies in enumerate(rig.copies):
        page_bytes = [plane[3] for plane in rig.kind(group).planes]
        for copy in copies:
            want = rig.kind(group).payload(copy.blocks).cpu().numpy()
            assert np.array_equal(rig.frames.parts[copy.frame, : len(want)], want)
            assert int(trailers[copy.frame]["tag"]) == chunk_tag(want, page_bytes, 1)
            assert trailers[copy.frame]["layout"].tobytes() == rig.kind(group).digest
            assert int(trailers[copy.frame]["payload_bytes"]) == len(want)
    rig.paged.poison()
    want_pages = rig.paged.snapshot()
    targets = [blocks[::-1] for blocks in rig.blocks[1:] + rig.blocks[:1]]
    for group, (copies, blocks) in enumerate(zip(rig.copies, targets, strict=True)):
        for copy, to in zip(copies, blocks, strict=True):
            rig.kind(group).place(want_pages, rig.kind(group).payload(copy.blocks, before), [to])
    rig.mover.begin_step((), has_loads=True)
    rig.mover.submit_loads([LoadPlan(ReqId("l"), 7, batches_to(rig.copies, targets))])
    done = rig.mover.drain()
    assert [(result.load_id, result.bad_keys, result.failed) for result in done.loads] == [
        (7, (), False)
    ], "each load must be reported once"
    assert not done.bad_blocks
    for now, then in zip(rig.paged.buffers, want_pages, strict=True):
        assert torch.equal(now, then)
    assert rig.save(), "saves must still work"
    rig.mover.close()


def test_a_block_is_not_loaded_into_for_one_group_before_it_was_saved_for_another() -> None:
    """The save's gather is still queued when the load starts. The block's old owner has finished,
    so no step reports the block as rewritten.
    """
    rig = Rig(4096, "turned", slot_bytes=3 * 12288)
    rig.paged.randomize(1)
    rig.save()
    loaded, last = rig.copies[1][0], rig.copies[2][-1]
    brought = rig.kind(1).payload(loaded.blocks).clone()
    rig.paged.randomize(2)
    wanted = rig.kind(2).payload(last.blocks).cpu().numpy()
    rig.mover.begin_step(())
    saves = batch_of_groups((group, rig.copies[group]) for group in (0, 2))
    rig.mover.submit_saves([SavePlan(ReqId("s"), saves)])
    rig.mover.begin_step((), has_loads=True)
    plan = LoadPlan(ReqId("l"), 1, batches_to([(), (loaded,), ()], [[], list(last.blocks), []]))
    rig.mover.submit_loads([plan])
    done = rig.mover.drain()
    assert not done.failed and not done.bad_blocks
    assert np.array_equal(rig.frames.parts[last.frame, : len(wanted)], wanted)
    assert torch.equal(rig.kind(1).payload(last.blocks), brought)
    rig.mover.close()


def test_an_error_in_one_group_is_reported_and_others_are_loaded() -> None:
    rig = Rig(900, "turned")
    rig.paged.randomize(2)
    rig.save()
    broken = rig.copies[1][3]
    rig.frames.parts[broken.frame, 5] ^= 1
    rig.paged.poison()
    rig.mover.begin_step((), has_loads=True)
    rig.mover.submit_loads(
        [LoadPlan(ReqId("l"), 1, batches_to(rig.copies, rig.blocks)), LoadPlan(ReqId("m"), 2)]
    )
    done = rig.mover.drain()
    assert {result.load_id: [key for key, _ in result.bad_keys] for result in done.loads} == {
        1: [broken.key],
        2: [],
    }
    assert done.bad_blocks == set(broken.blocks)
    rig.mover.close()


@pytest.mark.parametrize(
    "field", ["magic", "key", "layout", "tag", "payload_bytes", "num_blocks", "rank"]
)
def test_a_damaged_trailer_of_a_group_without_pages_is_reported(field: str) -> None:
    """A frame of a group without pages contains only a trailer, so only the trailer can show that
    the frame holds the wrong chunk.
    """
    rig = Rig(4096, "none")
    rig.paged.randomize(3)
    rig.save()
    broken = rig.copies[1][3]
    rig.frames.parts[broken.frame, TRAILER.fields[field][1] - TRAILER.itemsize] ^= 1  # type: ignore[index]
    before = rig.paged.snapshot()
    rig.mover.begin_step((), has_loads=True)
    rig.mover.submit_loads([LoadPlan(ReqId("l"), 1, batch_of(rig.copies[1], 1))])
    done = rig.mover.drain()
    assert [key for result in done.loads for key, _ in result.bad_keys] == [broken.key]
    assert done.bad_blocks == set(broken.blocks)
    assert all(
        torch.equal(now, then) for now, then in zip(rig.paged.buffers, before, strict=True)
    ), "the group has no page to write"
    rig.mover.close()
