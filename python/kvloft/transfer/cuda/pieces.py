"""Cuts a list of chunk copies into pieces: what one kernel launch and one staging slot take. Arithmetic only.

A piece is whole chunks while they fit in a slot, or a run of tiles of one chunk that does not. In a slot, chunks stand as far
apart as their parts do in the arena, so that chunks in neighbouring frames are one copy. It must not know CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvloft.seam.batch import BlockChunks, ChunkCopy
from kvloft.seam.ids import ChunkKey
from kvloft.transfer.cuda.kernels import MAX_BLOCKS, MAX_SEGMENTS, SEGMENT, BlockTiles

NOT_WANTED = -1
"""Block id of a payload block that is tagged and not scattered."""
_SLOT_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunk copies as columns: chunk c has frame ``frames[c]`` and paged blocks ``block_ids[starts[c]:starts[c + 1]]``."""

    frames: tuple[int, ...]
    num_blocks: tuple[int, ...]
    starts: Sequence[int]
    block_ids: npt.NDArray[np.int32]
    keys: tuple[ChunkKey, ...]
    block_bounds: tuple[int, int]
    """The least and the greatest of ``block_ids``."""

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, copies: Sequence[ChunkCopy]) -> ChunkTable:
        """Raises ValueError for a copy whose blocks are not part of its chunk."""
        # Column by column and in tuples: the link waits for the first table of a save or a load, and numpy is slow to start.
        if isinstance(copies, BlockChunks):
            frames, keys = copies.columns()
            return cls._of(frames, (1,) * len(frames), range(len(frames) + 1), copies.blocks, keys)
        frames, keys, num_blocks, first_blocks, blocks, _ = zip(*copies, strict=True) if copies else ((),) * 6
        if tuple(map(len, blocks)) == num_blocks and 0 not in num_blocks and not any(first_blocks):
            ids = list(chain.from_iterable(blocks))
        else:
            ids = [block for copy in copies for block in _payload_blocks(copy)]
        return cls._of(frames, num_blocks, tuple(accumulate(num_blocks, initial=0)), ids, keys)

    @classmethod
    def _of(
        cls,
        frames: tuple[int, ...],
        num_blocks: tuple[int, ...],
        starts: Sequence[int],
        ids: Sequence[int],
        keys: tuple[ChunkKey, ...],
    ) -> ChunkTable:
        bounds = (min(ids), max(ids)) if ids else (0, 0)
        # Ids beyond 32 bits are no blocks either: `check` sees the bounds as they came, and nothing else of such a table counts.
        fits = bounds[0] >= -(1 << 31) and bounds[1] < 1 << 31
        return cls(frames, num_blocks, starts, np.array(ids if fits else [0] * len(ids), dtype=np.int32), keys, bounds)

    def check(self, num_frames: int, num_blocks: int, blocks_per_chunk: int) -> None:
        """Raises ValueError if a copy would reach outside the arena, its frame or the paged KV."""
        if not len(self):
            return
        if min(self.frames) < 0 or max(self.frames) >= num_frames:
            raise ValueError(f"a frame is not one of the arena's {num_frames}")
        if max(self.num_blocks) > blocks_per_chunk:
            raise ValueError(f"a chunk has more than {blocks_per_chunk} blocks")
        if self.block_bounds[0] < NOT_WANTED or self.block_bounds[1] >= num_blocks:
            raise ValueError(f"a block is not one of the {num_blocks} of the paged KV")


def _payload_blocks(copy: ChunkCopy) -> list[int]:
    """A block id, or NOT_WANTED, for every block of the chunk."""
    rest = copy.num_blocks - copy.first_block - len(copy.blocks)
    if copy.first_block < 0 or rest < 0 or copy.num_blocks < 1:
        raise ValueError(f"{len(copy.blocks)} blocks at {copy.first_block} are not within a chunk of {copy.num_blocks}")
    return [NOT_WANTED] * copy.first_block + list(copy.blocks) + [NOT_WANTED] * rest


class Run(NamedTuple):
    """Bytes that one copy-engine command moves: ``num_rows`` of ``row_bytes``, ``frame_bytes`` apart in the arena."""

    frame: int
    part_offset: int
    slot_offset: int
    row_bytes: int
    num_rows: int


@dataclass(slots=True, eq=False)
class Piece:
    """One launch. Segment bases are relative to the slot; segment s belongs to chunk ``begin + s``, and more may be there.

    Chunks [begin, done_end) are complete after it; a chunk in several pieces is complete after its last.
    """

    begin: int
    end: int
    done_end: int
    segments: npt.NDArray[Any]
    block_ids: npt.NDArray[np.int32]
    num_tiles: int
    num_bytes: int
    runs: tuple[Run, ...]
    is_rest_of_chunk: bool = False

    @property
    def num_segments(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shape:
    """What bounds a piece: a slot's size, and how parts lie in frames.

    No copy may cross a multiple of ``frames_per_pin``: memory is pinned in pieces, and a copy over two of them is an error.
    """

    block_tiles: BlockTiles
    slot_bytes: int
    part_bytes: int
    blocks_per_chunk: int
    frames_per_pin: int
    full_segments: npt.NDArray[Any] = field(init=False, compare=False, repr=False)
    """Of a piece whose chunks are all full, which is nearly every one."""

    def __post_init__(self) -> None:
        blocks: npt.NDArray[np.int64] = np.full(min(self.chunks_per_piece, MAX_SEGMENTS), self.blocks_per_chunk, dtype=np.int64)
        segments = _segments(blocks, self)
        segments.flags.writeable = False  # launches that begin with them write them once
        object.__setattr__(self, "full_segments", segments)

    @property
    def chunks_per_piece(self) -> int:
        """0: chunks are cut."""
        return min(self.slot_bytes // self.part_bytes, MAX_SEGMENTS, MAX_BLOCKS // self.blocks_per_chunk)


def split(table: ChunkTable, shape: Shape) -> Iterator[Piece]:
    """The pieces of ``table``, in order."""
    per_piece = shape.chunks_per_piece
    if not per_piece:
        for chunk in range(len(table)):
            yield from _parts_of_chunk(table, chunk, shape)
        return
    for begin in range(0, len(table), per_piece):
        yield _whole_chunks(table, begin, min(begin + per_piece, len(table)), shape)


def _whole_chunks(table: ChunkTable, begin: int, end: int, shape: Shape) -> Piece:
    tiles, num_chunks = shape.block_tiles, end - begin
    first, last = table.starts[begin], table.starts[end]
    total = last - first
    lengths = table.num_blocks[begin:end]
    are_full = total == num_chunks * shape.blocks_per_chunk
    segments = shape.full_segments if are_full else _segments(np.array(lengths), shape)
    return Piece(
        begin, end, end, segments, table.block_ids[first:last], total * tiles.tiles_per_block, total * tiles.block_bytes,
        tuple(_runs(table.frames[begin:end], lengths, shape, are_full=are_full)),
    )  # fmt: skip


def _segments(num_blocks: npt.NDArray[np.int64], shape: Shape) -> npt.NDArray[Any]:
    """Of chunks of so many blocks, one after the other."""
    segments: npt.NDArray[Any] = np.zeros(len(num_blocks), SEGMENT)
    blocks_before = np.cumsum(num_blocks) - num_blocks
    segments["base"] = np.arange(len(num_blocks), dtype=np.uint64) * np.uint64(shape.part_bytes)
    segments["first_tile"] = blocks_before * shape.block_tiles.tiles_per_block
    segments["block_index"] = blocks_before
    return segments


def _runs(frames: Sequence[int], num_blocks: Sequence[int], shape: Shape, *, are_full: bool) -> Iterator[Run]:
    """Copies of chunks in neighbouring frames as one, row by row: between payloads are padding, trailers and others' parts.

    Chunks of a run are equally long: behind a shorter one's payload, a slot has what was there before.
    """
    part, block_bytes, per_pin = shape.part_bytes, shape.block_tiles.block_bytes, shape.frames_per_pin
    apart = [i for i, (before, frame) in enumerate(pairwise(frames), 1) if frame != before + 1 or not frame % per_pin]
    if not are_full:
        apart = sorted({*apart, *(i for i, (before, length) in enumerate(pairwise(num_blocks), 1) if length != before)})
    for first, stop in pairwise((0, *apart, len(frames))):
        yield Run(frames[first], 0, first * part, num_blocks[first] * block_bytes, stop - first)


def _parts_of_chunk(table: ChunkTable, chunk: int, shape: Shape) -> Iterator[Piece]:
    """Runs of tiles of one chunk that is larger than a slot."""
    tiles, first_id = shape.block_tiles, table.starts[chunk]
    num_tiles = table.num_blocks[chunk] * tiles.tiles_per_block
    tile = 0
    while tile < num_tiles:
        stop = _last_tile(tile, num_tiles, shape)
        begin_byte, end_byte = tiles.payload_offset(tile), tiles.payload_offset(stop)
        head = begin_byte % _SLOT_ALIGN  # the slot keeps the payload's alignment
        first_block, last_block = tile // tiles.tiles_per_block, (stop - 1) // tiles.tiles_per_block
        segments: npt.NDArray[Any] = np.zeros(1, SEGMENT)
        segments["base"] = np.uint64((head - begin_byte) % (1 << 64))
        segments["chunk_tile"] = tile
        segments["block_index"] = -first_block
        yield Piece(
            chunk, chunk + 1, chunk + 1 if stop == num_tiles else chunk, segments,
            table.block_ids[first_id + first_block : first_id + last_block + 1], stop - tile, end_byte - begin_byte,
            (Run(table.frames[chunk], begin_byte, head, end_byte - begin_byte, 1),), tile > 0,
        )  # fmt: skip
        tile = stop


def _last_tile(tile: int, num_tiles: int, shape: Shape) -> int:
    """One past the last tile that fits in a slot with ``tile``. Raises ValueError if not even one does."""
    tiles = shape.block_tiles
    begin = tiles.payload_offset(tile)
    room = shape.slot_bytes - begin % _SLOT_ALIGN
    block, rest = divmod(begin + room, tiles.block_bytes)
    stop = block * tiles.tiles_per_block + int(np.searchsorted(tiles.tile_offsets, rest, side="right")) - 1
    stop = min(stop, num_tiles, (tile // tiles.tiles_per_block + MAX_BLOCKS) * tiles.tiles_per_block)
    if stop <= tile:
        raise ValueError(f"a staging slot of {shape.slot_bytes} bytes is too small")
    return stop
