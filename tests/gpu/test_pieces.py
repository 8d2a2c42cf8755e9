"""Checks the pieces of chunk copies against a tile-by-tile model: every byte is copied exactly once
and to the correct place.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from batches import batch_of
from piece_model import copy_out, gather

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey
from kvloft.transfer.cuda.kernels import MAX_BLOCKS, MAX_SEGMENTS, TILE_BYTES, BlockTiles
from kvloft.transfer.cuda.pieces import NOT_WANTED, ChunkTable, PieceLimits, split

POISON, STALE = 0xA5, 0x5A


def tiles_of(page_bytes: list[int]) -> BlockTiles:
    offsets, at = [], 0
    for size in page_bytes:
        offsets += range(at, at + size, TILE_BYTES)
        at += size
    return BlockTiles(at, len(offsets), np.array(offsets, dtype=np.int64))


@st.composite
def cases(draw: st.DrawFn):
    pages = draw(
        st.lists(st.sampled_from([8, 96, 577, 4096, 5000, 8192, 12288]), min_size=1, max_size=4)
    )
    blocks_per_chunk = draw(st.sampled_from([1, 2, 3, 7]))
    block_tiles = tiles_of(pages)
    part_bytes = -(-(block_tiles.block_bytes * blocks_per_chunk + 128) // 4096) * 4096
    slot_bytes = draw(st.sampled_from([8192, 12288, 16384, 65536, 1 << 20]))
    shape = PieceLimits(
        block_tiles,
        slot_bytes,
        part_bytes,
        blocks_per_chunk,
        draw(st.sampled_from([1, 2, 5, 1000])),
    )
    num_chunks = draw(st.integers(0, 12))
    frames = draw(st.permutations(range(14)))[:num_chunks]
    if draw(st.booleans()):
        frames = sorted(frames)
    num_blocks = [blocks_per_chunk] * num_chunks
    ids = iter(draw(st.permutations(range(12 * 7))))
    copies = [
        ChunkCopy(
            frame, ChunkKey(bytes([i]) * 32), n, 0, tuple(BlockId(next(ids)) for _ in range(n))
        )
        for i, (frame, n) in enumerate(zip(frames, num_blocks, strict=True))
    ]
    return shape, copies


@pytest.mark.parametrize("blocks_per_chunk", [1, 7, MAX_BLOCKS + 1])
@pytest.mark.parametrize("slot_bytes", [4096, 1 << 20])
def test_chunks_without_pages_are_in_pieces_too(blocks_per_chunk: int, slot_bytes: int) -> None:
    """Without a piece, a load would never complete.

    This rank moves no bytes for these chunks, regardless of their size on other ranks.
    """
    shape = PieceLimits(tiles_of([]), slot_bytes, 8192, blocks_per_chunk, 1000)
    copies = [
        ChunkCopy(
            frame,
            ChunkKey(bytes([frame]) * 32),
            blocks_per_chunk,
            0,
            tuple(map(BlockId, range(blocks_per_chunk))),
        )
        for frame in range(MAX_SEGMENTS + 2)
    ]
    pieces = list(split(ChunkTable.of(batch_of(copies)), shape))
    assert [(piece.begin, piece.end) for piece in pieces] == [
        (0, MAX_SEGMENTS),
        (MAX_SEGMENTS, MAX_SEGMENTS + 2),
    ]
    for piece in pieces:
        assert (piece.num_tiles, piece.num_bytes, len(piece.block_ids), piece.runs) == (0, 0, 0, ())


@given(cases())
def test_pieces_of_a_save_fill_the_frames(case: tuple[PieceLimits, list[ChunkCopy]]) -> None:
    shape, copies = case
    table = ChunkTable.of(batch_of(copies))
    random = np.random.default_rng(0)
    paged = {
        b: random.integers(0, 256, shape.block_tiles.block_bytes, dtype=np.uint8)
        for b in range(12 * 7)
    }
    parts = np.full((14, shape.part_bytes), POISON, np.uint8)
    done, moved = 0, 0
    for piece in split(table, shape):
        assert (
            piece.num_segments <= len(piece.segments) <= MAX_SEGMENTS
            and len(piece.block_ids) <= MAX_BLOCKS
        )
        slot = np.full(shape.slot_bytes, STALE, np.uint8)
        gather(table, piece, shape, paged, slot)
        copy_out(piece, shape, slot, parts)
        assert piece.begin in (done, done - 1) and piece.end >= done, (
            "only a single chunk may be split across pieces"
        )
        done, moved = piece.end, moved + piece.num_bytes
    assert done == len(copies)
    assert moved == sum(copy.num_blocks for copy in copies) * shape.block_tiles.block_bytes
    for copy in copies:
        want = np.concatenate([paged[b] for b in copy.blocks])
        assert np.array_equal(parts[copy.frame, : len(want)], want)
        assert (parts[copy.frame, len(want) :] == POISON).all(), (
            "bytes after a payload were overwritten"
        )
    for frame in set(range(14)) - {copy.frame for copy in copies}:
        assert (parts[frame] == POISON).all()


def test_blocks_that_a_load_does_not_want_are_tagged_only() -> None:
    copy = ChunkCopy(3, ChunkKey(b"k" * 32), 5, 1, (BlockId(7), BlockId(9)))
    assert ChunkTable.of(batch_of([copy])).block_ids.tolist() == [
        NOT_WANTED,
        7,
        9,
        NOT_WANTED,
        NOT_WANTED,
    ]


def test_a_slot_smaller_than_a_tile_is_refused() -> None:
    shape = PieceLimits(tiles_of([8192]), 1024, 12288, 1, 1)
    with pytest.raises(ValueError, match="slot"):
        list(
            split(
                ChunkTable.of(batch_of([ChunkCopy(0, ChunkKey(b"k" * 32), 1, 0, (BlockId(0),))])),
                shape,
            )
        )


def test_segments_that_pieces_share_cannot_be_changed() -> None:
    """Launches reuse the segments without writing them again, so a change would affect all
    launches.
    """
    shape = PieceLimits(tiles_of([4096]), 1 << 20, 8192, 1, 1000)
    with pytest.raises(ValueError, match="read-only"):
        shape.full_segments["base"][0] = 1
