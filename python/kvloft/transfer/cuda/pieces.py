"""Cuts a batch of chunks into pieces: what one kernel launch and one staging slot take. Arithmetic only.

A piece is whole chunks while they fit in a slot, or a run of tiles of one chunk that does not. In a slot, chunks stand as far
apart as their parts do in the arena, so that chunks in neighbouring frames are one copy. It must not know CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvloft.seam.batch import ChunkBatch
from kvloft.transfer.cuda.kernels import MAX_BLOCKS, MAX_SEGMENTS, SEGMENT, BlockTiles

NOT_WANTED = -1
"""Block id of a payload block that is tagged and not scattered."""
_SLOT_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """A batch as pieces are cut from it: chunk c has frame ``frames[c]`` and blocks ``block_ids[starts[c]:starts[c + 1]]``."""

    frames: Sequence[int]
    num_blocks: Sequence[int]
    starts: Sequence[int]
    block_ids: npt.NDArray[np.int32]
    keys: bytes

    @classmethod
    def of(cls, chunks: ChunkBatch) -> ChunkTable:
        ((_, frames, keys, blocks),) = chunks.columns()[0] or [(0, b"", b"", b"")]
        # Lists where pieces are cut in Python: the link waits for the first table, and numpy is slow to start.
        numbers = memoryview(frames).cast("I").tolist()
        ids = np.frombuffer(blocks, dtype=np.int32)
        size = len(ids) // max(1, len(numbers))
        starts = range(0, len(ids) + 1, size) if size else [0] * (len(numbers) + 1)
        return cls(numbers, [size] * len(numbers), starts, ids, keys)


class Run(NamedTuple):
    """Bytes that one copy-engine command moves: ``num_rows`` of ``row_bytes``, ``frame_bytes`` apart in the arena."""

    frame: int
    part_offset: int
    slot_offset: int
    row_bytes: int
    num_rows: int


@dataclass(slots=True, eq=False)
class Piece:
    """One launch, of chunks [begin, end) or of a part of one.

    Segment bases are relative to the slot; segment s belongs to chunk ``begin + s``, and more may be there.
    """

    begin: int
    end: int
    segments: npt.NDArray[Any]
    block_ids: npt.NDArray[np.int32]
    num_tiles: int
    num_bytes: int
    runs: tuple[Run, ...]

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
        """0: chunks are cut. Those without pages take no room in a slot, and name no blocks."""
        if not self.block_tiles.tiles_per_block:
            return MAX_SEGMENTS
        return min(self.slot_bytes // self.part_bytes, MAX_SEGMENTS, MAX_BLOCKS // self.blocks_per_chunk)


def split(table: ChunkTable, shape: Shape) -> Iterator[Piece]:
    """The pieces of ``table``, in order."""
    per_piece = shape.chunks_per_piece
    if not per_piece:
        for chunk in range(len(table.frames)):
            yield from _parts_of_chunk(table, chunk, shape)
        return
    for begin in range(0, len(table.frames), per_piece):
        yield _whole_chunks(table, begin, min(begin + per_piece, len(table.frames)), shape)


def _whole_chunks(table: ChunkTable, begin: int, end: int, shape: Shape) -> Piece:
    tiles, num_chunks = shape.block_tiles, end - begin
    first, last = table.starts[begin], table.starts[end]
    total = last - first
    named = last if tiles.tiles_per_block else first  # what is neither read nor written is waited for by nothing
    lengths = table.num_blocks[begin:end]
    are_full = total == num_chunks * shape.blocks_per_chunk
    segments = shape.full_segments if are_full else _segments(np.array(lengths), shape)
    return Piece(
        begin, end, segments, table.block_ids[first:named], total * tiles.tiles_per_block, total * tiles.block_bytes,
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
    if not block_bytes:
        return
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
            chunk, chunk + 1, segments,
            table.block_ids[first_id + first_block : first_id + last_block + 1], stop - tile, end_byte - begin_byte,
            (Run(table.frames[chunk], begin_byte, head, end_byte - begin_byte, 1),),
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
