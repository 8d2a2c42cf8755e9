"""Compares the CPU mover with address arithmetic: the correct bytes must be copied, no other bytes
may change, and every failure must be reported.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import batch_of, batch_of_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kv import (
    ORDERS,
    Sizes,
    block_bytes,
    carve,
    random_bytes,
    snapshot,
    storage_bytes,
    untouched,
)

from kvloft import _core
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.store import arena_of
from kvloft.transfer.cpu import CpuMover
from kvloft.transfer.frames import FrameWindow, GroupFrames, PrivatePart, map_frames, part_bytes_for
from kvloft.transfer.layout import LayoutError, PagedLayout, read_layout, without_pages

KEY = ChunkKey(bytes(range(32)))
BLOCKS_PER_CHUNK = 3


class Bench:
    """The paged KV of an engine, a separate arena, and a mover that copies between them."""

    def __init__(
        self, caches: dict[str, torch.Tensor], num_blocks: int, num_ranks: int = 1, rank: int = 0
    ) -> None:
        self.caches = caches
        self.num_blocks = num_blocks
        self.layout = read_layout(caches, num_blocks, "test")
        payload = self.layout.block_bytes * BLOCKS_PER_CHUNK
        self.shape = CacheShape(
            (GroupShape(16, BLOCKS_PER_CHUNK, part_bytes=part_bytes_for(payload)),),
            num_ranks=num_ranks,
        )
        frame_bytes = self.shape.frame_bytes(0)
        self.store = _core.Session(
            frame_bytes=frame_bytes, host_bytes=frame_bytes * 4, namespace=bytes(32)
        )
        self.spec = arena_of(self.store, self.shape)
        assert self.spec is not None
        self.mover, self.frames = self.rank(rank)
        self.frames.bytes.fill_(0xEE)

    def rank(self, rank: int, layout: PagedLayout | None = None) -> tuple[CpuMover, FrameWindow]:
        payload = self.layout.block_bytes * BLOCKS_PER_CHUNK
        (frames,) = map_frames(self.spec, self.shape, shard=rank, payload_bytes=[payload])
        return CpuMover([layout or self.layout], [frames]), frames.raw

    def expected(self, blocks: tuple[int, ...]) -> bytes:
        return b"".join(block_bytes(self.caches, self.num_blocks, block) for block in blocks)

    def fill(self, seed: int) -> None:
        for place in {t.untyped_storage().data_ptr(): t for t in self.caches.values()}.values():
            raw = storage_bytes(place)
            raw[:] = random_bytes(raw.size, seed).numpy()


def copy_of(
    frame: int,
    blocks: tuple[int, ...],
    *,
    num_blocks: int | None = None,
    first: int = 0,
    ticket: int = 7,
) -> ChunkCopy:
    total = len(blocks) if num_blocks is None else num_blocks
    return ChunkCopy(frame, KEY, total, first, tuple(BlockId(b) for b in blocks), Ticket(ticket))


def loads_of(*copies: ChunkCopy) -> _core.ChunkBatch:
    return batch_of(copy._replace(ticket=Ticket(-1)) for copy in copies)


def save(mover: CpuMover, *copies: ChunkCopy) -> tuple[list[int], list[int]]:
    mover.submit_saves([SavePlan(ReqId("r"), batch_of([copy])) for copy in copies])
    done = mover.poll()
    return list(done.saved), list(done.failed)


def load(
    mover: CpuMover, *copies: ChunkCopy, lost: tuple[int, ...] = ()
) -> tuple[list[str], set[int]]:
    """Load the copies and return (problems, bad blocks)."""
    mover.submit_loads(
        [LoadPlan(ReqId("r"), 3, loads_of(*copies), tuple(BlockId(b) for b in lost))]
    )
    done = mover.poll()
    (result,) = done.loads
    assert (result.req_id, result.load_id) == ("r", 3)
    return [why for _, why in result.bad_keys], set(done.bad_blocks)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(carve("LBHNC", Sizes()), 7)
    bench.fill(1)
    yield bench
    bench.store.close()


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    sizes=st.builds(
        Sizes,
        *[st.sampled_from([1, 2, 3])] * 1,
        blocks=st.sampled_from([5, 7, 11]),
        heads=st.sampled_from([1, 2, 3]),
        tokens=st.sampled_from([1, 4, 7]),
        content=st.sampled_from([1, 3, 16]),
        dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    ),
    offset=st.sampled_from([0, 5]),
    blocks=st.permutations(range(5)),
    num_blocks=st.integers(1, BLOCKS_PER_CHUNK),
    first=st.integers(0, BLOCKS_PER_CHUNK - 1),
    num_loaded=st.integers(1, BLOCKS_PER_CHUNK),
)
def test_gathered_bytes_are_scattered_and_nothing_else_changes(
    order: str,
    sizes: Sizes,
    offset: int,
    blocks: list[int],
    num_blocks: int,
    first: int,
    num_loaded: int,
) -> None:
    bench = Bench(carve(order, sizes, offset=offset), sizes.blocks)
    bench.fill(1)
    source, target = tuple(blocks[:num_blocks]), tuple(blocks[num_blocks:][:num_loaded])
    first = min(first, num_blocks - 1)
    target = target[: num_blocks - first]
    before, arena = snapshot(bench.caches), bench.frames.bytes.clone()

    assert save(bench.mover, copy_of(2, source)) == ([7], [])
    payload = bench.expected(source)
    assert bench.frames.part(2)[: len(payload)].numpy().tobytes() == payload
    assert untouched(bench.caches, before, sizes.blocks, []), "gathering must not write"
    after = bench.frames.bytes.clone()
    begin, end = bench.frames.memory.start(2), bench.frames.memory.start(3)
    trailer_at = end - _core.TRAILER_BYTES
    arena[begin : begin + len(payload)] = after[begin : begin + len(payload)]
    arena[trailer_at:end] = after[trailer_at:end]
    assert torch.equal(arena, after), "only payload and trailer of the save's frame may change"

    wanted = bench.expected(source[first : first + len(target)])
    bench.fill(2)
    before = snapshot(bench.caches)
    assert load(bench.mover, copy_of(2, target, num_blocks=num_blocks, first=first)) == ([], set())
    assert bench.expected(target) == wanted
    assert untouched(bench.caches, before, sizes.blocks, target)
    assert torch.equal(bench.frames.bytes, after), "scattering must not write to frames"
    bench.store.close()


def test_a_tail_is_the_beginning_of_the_longer_chunk(bench: Bench) -> None:
    save(bench.mover, copy_of(0, (4, 2)), copy_of(1, (4, 2, 5)))
    size = 2 * bench.layout.block_bytes
    assert torch.equal(bench.frames.part(0)[:size], bench.frames.part(1)[:size])
    assert load(bench.mover, copy_of(0, (1,), num_blocks=3))[0] == ["shape"], (
        "the tail must not be taken for the longer chunk"
    )


def test_ranks_share_a_frame_without_touching_each_other() -> None:
    bench = Bench(carve("LBHNC", Sizes()), 7, num_ranks=2)
    other, window = bench.rank(1)
    bench.fill(1)
    save(bench.mover, copy_of(0, (1, 2, 3)))
    first = bench.frames.bytes.clone()
    bench.fill(2)
    save(other, copy_of(0, (4, 5, 6)))
    part = window.memory.part_bytes
    assert torch.equal(bench.frames.bytes[:part], first[:part])
    assert load(bench.mover, copy_of(0, (1, 2, 3))) == ([], set())
    assert load(other, copy_of(0, (1, 2, 3))) == ([], set())
    bench.frames.bytes[:part] = bench.frames.bytes[part : 2 * part]
    assert load(bench.mover, copy_of(0, (1, 2, 3)))[0] == ["shape"], (
        "another rank's shard must not be loaded"
    )


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("payload", "tag"),
        ("last byte", "tag"),
        ("trailer", "unsealed"),
        ("key", "key"),
        ("layout", "layout"),
        ("blocks", "shape"),
    ],
)
def test_a_damaged_frame_is_reported_and_its_blocks_stay_as_they_were(
    bench: Bench, damage: str, why: str
) -> None:
    save(bench.mover, copy_of(0, (1, 2, 3)), copy_of(1, (4, 5))._replace(key=ChunkKey(b"x" * 32)))
    bad, mover = copy_of(0, (4, 5, 6)), bench.mover
    if damage == "payload":
        bench.frames.bytes[17] ^= 1
    elif damage == "last byte":
        bench.frames.bytes[3 * bench.layout.block_bytes - 1] ^= 128
    elif damage == "trailer":
        bench.frames.part(0)[-_core.TRAILER_BYTES :] = 0
    elif damage == "key":
        bad = bad._replace(key=ChunkKey(b"y" * 32))
    elif damage == "layout":
        mover = bench.rank(0, replace(bench.layout, digest=b"z" * 32))[0]
    else:
        bad = bad._replace(num_blocks=2, blocks=bad.blocks[:2])
    before = snapshot(bench.caches)
    problems, lost = load(mover, bad, lost=(1,))
    assert problems == [why]
    assert lost == {1, *bad.blocks}
    assert untouched(bench.caches, before, 7, [])


def test_every_byte_of_the_payload_is_under_the_tag(bench: Bench) -> None:
    save(bench.mover, copy_of(0, (1, 2, 3)))
    rng = np.random.default_rng(5)
    size = 3 * bench.layout.block_bytes
    for at in [0, size - 1, *rng.integers(0, size, 200)]:
        bench.frames.bytes[int(at)] ^= 1 << int(rng.integers(8))
        assert load(bench.mover, copy_of(0, (4, 5, 6)))[0] == ["tag"]
        save(bench.mover, copy_of(0, (1, 2, 3)))


def test_a_good_chunk_is_loaded_with_a_bad_one(bench: Bench) -> None:
    save(bench.mover, copy_of(0, (1,)), copy_of(1, (2,)))
    wanted = bench.expected((2,))
    bench.frames.bytes[0] ^= 1
    problems, lost = load(bench.mover, copy_of(0, (5,)), copy_of(1, (6,)))
    assert (problems, lost) == (["tag"], {5})
    assert bench.expected((6,)) == wanted


def test_a_copy_that_cannot_be_made_fails_alone(bench: Bench) -> None:
    """A block outside the pool causes a failed ticket or a bad load. The other copies succeed."""
    assert save(bench.mover, copy_of(0, (1, 99, 3), ticket=1), copy_of(1, (2,), ticket=2)) == (
        [2],
        [1],
    )
    assert save(bench.mover, copy_of(77, (1,), ticket=3), copy_of(2, (4,), ticket=4)) == ([4], [3])
    problems, lost = load(bench.mover, copy_of(1, (99,)), copy_of(2, (5,)), copy_of(77, (6,)))
    assert len(problems) == 2
    assert lost == {99, 6}


def test_a_save_that_fails_leaves_its_frame_as_it_was(bench: Bench) -> None:
    save(bench.mover, copy_of(0, (1, 2, 3)))
    before = bench.frames.part(0).clone()
    bench.fill(9)
    assert save(bench.mover, copy_of(0, (4, 99, 6)))[1] == [7]
    assert torch.equal(bench.frames.part(0), before)


class TestAnotherProcessWritesToTheFrame:
    """A worker whose scheduler was killed still maps the arena, and can write to a frame that now
    belongs to another engine.
    """

    @staticmethod
    def foreign_write(bench: Bench) -> None:
        _, frames = bench.rank(0)  # map the arena a second time
        frames.part(0)[:] = 0xAB

    def test_before_the_save(self, bench: Bench) -> None:
        self.foreign_write(bench)
        save(bench.mover, copy_of(0, (1, 2, 3)))
        self.expect_right_pages(bench)

    def test_between_gathering_pages_and_sealing_them(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.wrap(bench, monkeypatch, "store", before=True)
        save(bench.mover, copy_of(0, (1, 2, 3)))
        self.expect_right_pages(bench)

    def test_between_the_check_and_the_copy_to_pages(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(bench.mover, copy_of(0, (1, 2, 3)))
        self.wrap(bench, monkeypatch, "fetch", before=False)
        self.expect_right_pages(bench)

    @pytest.mark.parametrize(
        "written", [slice(0, 1), slice(40, 48), slice(-128, -120), slice(-90, -80)]
    )
    def test_after_the_save_it_is_a_miss_and_no_page_is_touched(
        self, bench: Bench, written: slice
    ) -> None:
        save(bench.mover, copy_of(0, (1, 2, 3)))
        bench.frames.part(0)[written] ^= 0x55
        before = [block_bytes(bench.caches, 7, block) for block in (4, 5, 6)]
        problems, bad = load(bench.mover, copy_of(0, (4, 5, 6)))
        assert problems
        assert bad == {4, 5, 6}
        assert [block_bytes(bench.caches, 7, block) for block in (4, 5, 6)] == before

    def wrap(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, *, before: bool
    ) -> None:
        original = getattr(PrivatePart, name)

        def wrapped(part: PrivatePart, *args: object) -> object:
            if before:
                self.foreign_write(bench)
            done = original(part, *args)
            if not before:
                self.foreign_write(bench)
            return done

        monkeypatch.setattr(PrivatePart, name, wrapped)

    @staticmethod
    def expect_right_pages(bench: Bench) -> None:
        assert load(bench.mover, copy_of(0, (4, 5, 6))) == ([], set())
        assert bench.expected((4, 5, 6)) == bench.expected((1, 2, 3))


def test_each_copy_is_reported_once_and_counted(bench: Bench) -> None:
    bench.mover.submit_saves([])
    bench.mover.submit_loads([])
    assert not bench.mover.poll().loads
    bench.mover.submit_saves(
        [
            SavePlan(ReqId("r"), batch_of([copy]))
            for copy in (copy_of(0, (1, 2), ticket=1), copy_of(1, (3,), ticket=2))
        ]
    )
    bench.mover.submit_loads(
        [LoadPlan(ReqId("r"), 9, loads_of(copy_of(0, (4,), num_blocks=2, first=1)))]
    )
    done = bench.mover.drain()
    assert (done.saved, [r.load_id for r in done.loads]) == ([1, 2], [9])
    assert done.num_bytes_saved == 3 * bench.layout.block_bytes
    assert done.num_bytes_loaded == bench.layout.block_bytes
    again = bench.mover.poll()
    assert not (
        again.saved or again.failed or again.loads or again.bad_blocks or again.num_bytes_saved
    )


def test_part_sizes_come_from_the_arena(bench: Bench) -> None:
    """A pipeline stage that needs less space than other stages has equally large shards."""
    small = replace(bench.shape, groups=(replace(bench.shape.groups[0], part_bytes=4096),))
    (smaller,) = map_frames(bench.spec, small, shard=0, payload_bytes=[16])
    assert smaller.raw.memory.part_bytes == bench.shape.groups[0].part_bytes


def test_a_stage_without_a_layer_of_a_group_seals_its_part_and_finds_it_again(bench: Bench) -> None:
    frames = map_frames(bench.spec, bench.shape, shard=0, payload_bytes=[0])
    mover = CpuMover([without_pages(bench.layout)], frames)
    mover.submit_saves([SavePlan(ReqId("r"), batch_of([copy_of(0, (1, 2), ticket=1)]))])
    mover.submit_loads([LoadPlan(ReqId("r"), 9, loads_of(copy_of(0, (4,), num_blocks=2, first=1)))])
    mover.submit_loads([LoadPlan(ReqId("r"), 10, loads_of(copy_of(1, (4,), num_blocks=1)))])
    done = mover.poll()
    assert (done.saved, [bool(load.bad_keys) for load in done.loads]) == ([1], [False, True])


def test_frames_too_small_for_this_rank_are_refused(bench: Bench) -> None:
    with pytest.raises(LayoutError, match="cannot hold"):
        map_frames(
            bench.spec, bench.shape, shard=0, payload_bytes=[bench.shape.groups[0].part_bytes]
        )


def test_chunks_of_several_groups_come_from_and_go_to_their_own_pages() -> None:
    """All groups use the same block ids.

    A load is reported once, with the errors of all groups.
    """
    benches = [Bench(carve("LBHNC", Sizes()), 7) for _ in range(2)]
    one, other = benches
    mover = CpuMover([one.layout, other.layout], [GroupFrames(one.frames, 0)] * 2)
    one.fill(1)
    other.fill(2)
    three, two = (1, 2, 3), (4, 2, 6)
    chunks = batch_of_groups([(0, [copy_of(0, three, ticket=1)]), (1, [copy_of(1, two, ticket=2)])])
    mover.submit_saves([SavePlan(ReqId("r"), chunks)])
    assert mover.poll().saved == [1, 2]
    wanted = [one.expected(three), other.expected(two)]
    one.fill(3)
    other.fill(4)
    loads = batch_of_groups(
        [(0, [copy_of(0, three, ticket=-1)]), (1, [copy_of(1, two, ticket=-1)])]
    )
    mover.submit_loads([LoadPlan(ReqId("r"), 1, loads)])
    assert [result.bad_keys for result in mover.poll().loads] == [()]
    assert [one.expected(three), other.expected(two)] == wanted
    one.frames.part(1)[0] ^= 1
    mover.submit_loads([LoadPlan(ReqId("r"), 2, loads)])
    done = mover.poll()
    assert [[key for key, _ in result.bad_keys] for result in done.loads] == [[KEY]]
    assert done.bad_blocks == set(two)
