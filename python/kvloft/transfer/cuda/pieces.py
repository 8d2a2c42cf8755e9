"""Cuts a list of chunk copies into pieces: what one kernel launch and one staging slot take. Arithmetic only.

A piece is whole chunks while they fit in a slot, or a run of tiles of one chunk that does not. In a slot, chunks stand as far
apart as their parts do in the arena, so that chunks in neighbouring frames are one copy. It must not know CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloft.transfer.cuda.kernels import MAX_BLOCKS, MAX_SEGMENTS, SEGMENT, Geometry
from kvloft.types import ChunkCopy, ChunkKey

NOT_WANTED = -1
"""Block id of a payload block that is tagged and not scattered."""
_SLOT_ALIGN = 4096
MAX_PADDING_SHARE = 256
"""Padding of more than one byte in so many is left out of a copy, row by row."""


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunk copies as columns: chunk c has frame ``frames[c]`` and paged blocks ``block_ids[starts[c]:starts[c + 1]]``."""

    frames: npt.NDArray[np.int64]
    num_blocks: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    block_ids: npt.NDArray[np.int32]
    keys: tuple[ChunkKey, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, copies: Sequence[ChunkCopy]) -> ChunkTable:
        """Raises ValueError for a copy whose blocks are not part of its chunk."""
        num_blocks = np.array([copy.num_blocks for copy in copies], dtype=np.int64)
        starts: npt.NDArray[np.int64] = np.zeros(len(copies) + 1, dtype=np.int64)
        np.cumsum(num_blocks, out=starts[1:])
        ids: list[int] = []
        for copy in copies:
            rest = copy.num_blocks - copy.first_block - len(copy.blocks)
            if copy.first_block < 0 or rest < 0 or copy.num_blocks < 1:
                raise ValueError(f"{len(copy.blocks)} blocks at {copy.first_block} are not within a chunk of {copy.num_blocks}")
            if copy.first_block or rest:
                ids += [NOT_WANTED] * copy.first_block
                ids += copy.blocks
                ids += [NOT_WANTED] * rest
            else:
                ids += copy.blocks
        frames = np.array([copy.frame for copy in copies], dtype=np.int64)
        return cls(frames, num_blocks, starts, np.array(ids, dtype=np.int32), tuple(copy.key for copy in copies))

    def check(self, num_frames: int, num_blocks: int, blocks_per_chunk: int) -> None:
        """Raises ValueError if a copy would reach outside the arena, its frame or the paged KV."""
        if not len(self):
            return
        if self.frames.min() < 0 or self.frames.max() >= num_frames:
            raise ValueError(f"a frame is not one of the arena's {num_frames}")
        if self.num_blocks.max() > blocks_per_chunk:
            raise ValueError(f"a chunk has more than {blocks_per_chunk} blocks")
        if self.block_ids.min() < NOT_WANTED or self.block_ids.max() >= num_blocks:
            raise ValueError(f"a block is not one of the {num_blocks} of the paged KV")


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that one copy-engine command moves: ``num_rows`` of ``row_bytes``, ``frame_bytes`` apart in the arena."""

    frame: int
    part_offset: int
    slot_offset: int
    row_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One launch. Segment bases are relative to the slot; segment s belongs to chunk ``begin + s``.

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


@dataclass(frozen=True, slots=True)
class Shape:
    """What bounds a piece: a slot's size, and how parts lie in frames.

    ``one_part``: a frame has no other rank's part. No copy may cross a multiple of ``frames_per_pin``: memory is pinned in
    pieces, and a copy over two of them is an error.
    """

    geometry: Geometry
    slot_bytes: int
    part_bytes: int
    blocks_per_chunk: int
    one_part: bool
    frames_per_pin: int

    @property
    def copies_padding(self) -> bool:
        """Whether chunks in neighbouring frames go as one run: not over another rank's part, nor over much padding."""
        padding = self.part_bytes - self.blocks_per_chunk * self.geometry.block_bytes
        return self.one_part and padding * MAX_PADDING_SHARE <= self.part_bytes

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
    geometry = shape.geometry
    num_blocks = table.num_blocks[begin:end]
    segments: npt.NDArray[Any] = np.zeros(end - begin, SEGMENT)
    segments["base"] = np.arange(end - begin, dtype=np.uint64) * np.uint64(shape.part_bytes)
    blocks_before = table.starts[begin:end] - table.starts[begin]
    segments["first_tile"] = blocks_before * geometry.tiles_per_block
    segments["block_index"] = blocks_before
    total = int(num_blocks.sum())
    return Piece(
        begin, end, end, segments, table.block_ids[table.starts[begin] : table.starts[end]], total * geometry.tiles_per_block,
        total * geometry.block_bytes, tuple(_runs(table.frames[begin:end], num_blocks * geometry.block_bytes, shape)),
    )  # fmt: skip


def _runs(frames: npt.NDArray[np.int64], payload: npt.NDArray[np.int64], shape: Shape) -> Iterator[Run]:
    """Copies of chunks in neighbouring frames as one; the last of each only as far as its payload goes."""
    apart = (np.diff(frames) != 1) | (frames[1:] % shape.frames_per_pin == 0)
    cuts = [0, *(np.flatnonzero(apart) + 1).tolist(), len(frames)]
    part = shape.part_bytes
    for first, stop in pairwise(cuts):
        frame, num, last = int(frames[first]), stop - first, int(payload[stop - 1])
        if num == 1 or shape.copies_padding:
            yield Run(frame, 0, first * part, (num - 1) * part + last, 1)
        else:
            width = int(payload[first:stop].max())
            yield Run(frame, 0, first * part, width, num)


def _parts_of_chunk(table: ChunkTable, chunk: int, shape: Shape) -> Iterator[Piece]:
    """Runs of tiles of one chunk that is larger than a slot."""
    geometry, first_id = shape.geometry, int(table.starts[chunk])
    num_tiles = int(table.num_blocks[chunk]) * geometry.tiles_per_block
    tile = 0
    while tile < num_tiles:
        stop = _last_tile(tile, num_tiles, shape)
        begin_byte, end_byte = geometry.payload_offset(tile), geometry.payload_offset(stop)
        head = begin_byte % _SLOT_ALIGN  # the slot keeps the payload's alignment
        first_block, last_block = tile // geometry.tiles_per_block, (stop - 1) // geometry.tiles_per_block
        segments: npt.NDArray[Any] = np.zeros(1, SEGMENT)
        segments["base"] = np.uint64((head - begin_byte) % (1 << 64))
        segments["chunk_tile"] = tile
        segments["block_index"] = -first_block
        yield Piece(
            chunk, chunk + 1, chunk + 1 if stop == num_tiles else chunk, segments,
            table.block_ids[first_id + first_block : first_id + last_block + 1], stop - tile, end_byte - begin_byte,
            (Run(int(table.frames[chunk]), begin_byte, head, end_byte - begin_byte, 1),), tile > 0,
        )  # fmt: skip
        tile = stop


def _last_tile(tile: int, num_tiles: int, shape: Shape) -> int:
    """One past the last tile that fits in a slot with ``tile``. Raises ValueError if not even one does."""
    geometry = shape.geometry
    begin = geometry.payload_offset(tile)
    room = shape.slot_bytes - begin % _SLOT_ALIGN
    block, rest = divmod(begin + room, geometry.block_bytes)
    stop = block * geometry.tiles_per_block + int(np.searchsorted(geometry.tile_offsets, rest, side="right")) - 1
    stop = min(stop, num_tiles, (tile // geometry.tiles_per_block + MAX_BLOCKS) * geometry.tiles_per_block)
    if stop <= tile:
        raise ValueError(f"a staging slot of {shape.slot_bytes} bytes is too small")
    return stop
