"""Cutting chunk copies into pieces: run against a tile-by-tile model, every byte lands once and where it belongs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from piece_model import copy_out, gather

from kvloft.seam.batch import BlockChunks, ChunkCopy, LeasedChunks, ReservedChunks
from kvloft.seam.ids import BlockId, ChunkKey, Ticket
from kvloft.transfer.cuda.jobs import by_frame, tickets_of
from kvloft.transfer.cuda.kernels import MAX_BLOCKS, MAX_SEGMENTS, TILE_BYTES, BlockTiles
from kvloft.transfer.cuda.pieces import NOT_WANTED, ChunkTable, Shape, split

POISON, STALE = 0xA5, 0x5A


def tiles_of(page_bytes: list[int]) -> BlockTiles:
    offsets, at = [], 0
    for size in page_bytes:
        offsets += range(at, at + size, TILE_BYTES)
        at += size
    return BlockTiles(at, len(offsets), np.array(offsets, dtype=np.int64))


@st.composite
def cases(draw: st.DrawFn):
    pages = draw(st.lists(st.sampled_from([8, 96, 577, 4096, 5000, 8192, 12288]), min_size=1, max_size=4))
    blocks_per_chunk = draw(st.sampled_from([1, 2, 3, 7]))
    block_tiles = tiles_of(pages)
    part_bytes = -(-(block_tiles.block_bytes * blocks_per_chunk + 128) // 4096) * 4096
    slot_bytes = draw(st.sampled_from([8192, 12288, 16384, 65536, 1 << 20]))
    shape = Shape(block_tiles, slot_bytes, part_bytes, blocks_per_chunk, draw(st.sampled_from([1, 2, 5, 1000])))
    num_chunks = draw(st.integers(0, 12))
    frames = draw(st.permutations(range(14)))[:num_chunks]
    if draw(st.booleans()):
        frames = sorted(frames)
    num_blocks = [draw(st.integers(1, blocks_per_chunk)) for _ in range(num_chunks)]
    ids = iter(draw(st.permutations(range(12 * 7))))
    copies = [
        ChunkCopy(frame, ChunkKey(bytes([i]) * 32), n, 0, tuple(BlockId(next(ids)) for _ in range(n)))
        for i, (frame, n) in enumerate(zip(frames, num_blocks, strict=True))
    ]
    return shape, copies


@given(cases())
def test_pieces_of_a_save_fill_the_frames(case: tuple[Shape, list[ChunkCopy]]) -> None:
    shape, copies = case
    table = ChunkTable.of(copies)
    random = np.random.default_rng(0)
    paged = {b: random.integers(0, 256, shape.block_tiles.block_bytes, dtype=np.uint8) for b in range(12 * 7)}
    parts = np.full((14, shape.part_bytes), POISON, np.uint8)
    done, moved = 0, 0
    for piece in split(table, shape):
        assert piece.num_segments <= len(piece.segments) <= MAX_SEGMENTS and len(piece.block_ids) <= MAX_BLOCKS
        slot = np.full(shape.slot_bytes, STALE, np.uint8)
        gather(table, piece, shape, paged, slot)
        copy_out(piece, shape, slot, parts)
        assert piece.begin == done or piece.is_rest_of_chunk
        done, moved = piece.done_end, moved + piece.num_bytes
    assert done == len(copies)
    assert moved == sum(copy.num_blocks for copy in copies) * shape.block_tiles.block_bytes
    for copy in copies:
        want = np.concatenate([paged[b] for b in copy.blocks])
        assert np.array_equal(parts[copy.frame, : len(want)], want)
        assert (parts[copy.frame, len(want) :] == POISON).all(), (
            "behind a payload are trailers, other ranks' parts, nobody's old bytes"
        )
    for frame in set(range(14)) - {copy.frame for copy in copies}:
        assert (parts[frame] == POISON).all()


def test_blocks_that_a_load_does_not_want_are_tagged_only() -> None:
    copy = ChunkCopy(3, ChunkKey(b"k" * 32), 5, 1, (BlockId(7), BlockId(9)))
    assert ChunkTable.of([copy]).block_ids.tolist() == [NOT_WANTED, 7, 9, NOT_WANTED, NOT_WANTED]


@pytest.mark.parametrize(("num_blocks", "first_block", "blocks"), [(2, 1, (1, 2)), (1, -1, (1, 2)), (0, 0, ()), (1, 2, ())])
def test_a_copy_outside_its_chunk_is_refused(num_blocks: int, first_block: int, blocks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        ChunkTable.of([ChunkCopy(0, ChunkKey(b"k" * 32), num_blocks, first_block, tuple(map(BlockId, blocks)))])


@pytest.mark.parametrize(("frame", "block"), [(-1, 0), (4, 0), (0, -2), (0, 10)])
def test_a_copy_outside_arena_or_paged_kv_is_refused(frame: int, block: int) -> None:
    table = ChunkTable.of([ChunkCopy(frame, ChunkKey(b"k" * 32), 1, 0, (BlockId(block),))])
    with pytest.raises(ValueError):
        table.check(num_frames=4, num_blocks=10, blocks_per_chunk=1)


def test_a_chunk_of_too_many_blocks_is_refused() -> None:
    table = ChunkTable.of([ChunkCopy(0, ChunkKey(b"k" * 32), 3, 0, (BlockId(0), BlockId(1), BlockId(2)))])
    table.check(num_frames=4, num_blocks=10, blocks_per_chunk=3)
    with pytest.raises(ValueError, match="more than 2 blocks"):
        table.check(num_frames=4, num_blocks=10, blocks_per_chunk=2)


def test_a_slot_smaller_than_a_tile_is_refused() -> None:
    shape = Shape(tiles_of([8192]), 1024, 12288, 1, 1)
    with pytest.raises(ValueError, match="slot"):
        list(split(ChunkTable.of([ChunkCopy(0, ChunkKey(b"k" * 32), 1, 0, (BlockId(0),))]), shape))


def test_segments_that_pieces_share_cannot_be_changed() -> None:
    """A launch that has them already does not write them again."""
    shape = Shape(tiles_of([4096]), 1 << 20, 8192, 1, 1000)
    with pytest.raises(ValueError, match="read-only"):
        shape.full_segments["base"][0] = 1


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=9, unique_by=lambda row: row[0]), st.booleans())
def test_rows_of_a_store_mean_the_copies_they_stand_for(rows: list[tuple[int, int]], is_save: bool) -> None:
    blocks = tuple(BlockId(block) for _, block in rows)
    keys = [ChunkKey(frame.to_bytes(32, "little")) for frame, _ in rows]
    chunks: BlockChunks
    if is_save:
        chunks = ReservedChunks(
            [(7 + frame, frame, key, i, 1) for i, ((frame, _), key) in enumerate(zip(rows, keys, strict=True))], blocks
        )
    else:
        chunks = LeasedChunks(
            [(frame, key, i, 1, "host") for i, ((frame, _), key) in enumerate(zip(rows, keys, strict=True))], blocks
        )
    copies = tuple(
        ChunkCopy(frame, key, 1, 0, (BlockId(block),), Ticket(7 + frame if is_save else -1))
        for (frame, block), key in zip(rows, keys, strict=True)
    )
    assert chunks == copies and list(chunks) == list(copies) and tickets_of(chunks) == tickets_of(copies)
    assert by_frame(chunks) == tuple(by_frame(copies)) == tuple(sorted(copies))
    assert [chunks[i] for i in range(-len(copies), len(copies))] == [*copies, *copies]
    assert chunks[1:-1] == copies[1:-1] and type(chunks[1:-1]) is type(chunks)
    ours, theirs = ChunkTable.of(chunks), ChunkTable.of(copies)
    assert (ours.frames, ours.keys, ours.num_blocks, ours.block_bounds) == (
        theirs.frames,
        theirs.keys,
        theirs.num_blocks,
        theirs.block_bounds,
    )
    assert tuple(ours.starts) == tuple(theirs.starts) and ours.block_ids.tolist() == theirs.block_ids.tolist()
    assert ours.block_ids.dtype == theirs.block_ids.dtype and len(ours) == len(theirs)


@pytest.mark.parametrize("block", [-(1 << 80), -(1 << 31) - 1, -(1 << 31), -2, 10, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 80])
@pytest.mark.parametrize("in_columns", [False, True])
def test_a_block_that_is_none_is_refused_however_wide_its_number(block: int, in_columns: bool) -> None:
    copy = ChunkCopy(3, ChunkKey(bytes(32)), 1, 0, (BlockId(block),), Ticket(-1))
    table = ChunkTable.of(LeasedChunks([(3, ChunkKey(bytes(32)), 0, 1, "host")], (BlockId(block),)) if in_columns else (copy,))
    with pytest.raises(ValueError, match="not one of the 10 of the paged KV"):
        table.check(num_frames=4, num_blocks=10, blocks_per_chunk=1)
    ChunkTable.of((copy._replace(blocks=(BlockId(9),)),)).check(num_frames=4, num_blocks=10, blocks_per_chunk=1)
