"""Splits a batch of chunks into pieces. A piece fits into a slot and is the work of one launch.

A piece holds whole chunks or, if a chunk is larger than a slot, consecutive tiles of one chunk.
Chunks in a slot are equally spaced, like their parts in the arena, so that one command can copy
chunks in adjacent frames. This module does not use CUDA.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvloft.seam.batch import ChunkBatch
from kvloft.transfer.cuda.encoding import PartEncoding, slot_stride
from kvloft.transfer.cuda.kernels import MAX_BLOCKS, MAX_SEGMENTS, SEGMENT, BlockTiles

MAX_FRAME = (1 << 28) - 1
"""Maximum frame number. Higher bits hold the size class, which is constant within a batch."""
NOT_WANTED = -1
"""Block id of a payload block that is included in the tag but not scattered."""
_SLOT_ALIGN = 4096


def block_ids_of(chunks: ChunkBatch) -> npt.NDArray[np.int32]:
    """Return the block ids of all chunks in order, including NOT_WANTED."""
    return np.frombuffer(_columns_of(chunks)[2], dtype=np.int32)


def _columns_of(chunks: ChunkBatch) -> tuple[bytes, bytes, bytes]:
    """Return the frames, keys and blocks of a batch with a single group."""
    ((_, *columns),) = chunks.columns()[0] or [(0, b"", b"", b"")]
    frames, keys, blocks = columns
    return frames, keys, blocks


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The columns of a batch. The blocks of chunk c are ``block_ids[starts[c]:starts[c + 1]]``."""

    frames: Sequence[int]
    num_blocks: Sequence[int]
    starts: Sequence[int]
    block_ids: npt.NDArray[np.int32]
    keys: bytes

    @classmethod
    def of(cls, chunks: ChunkBatch) -> Self:
        frames, keys, blocks = _columns_of(chunks)
        # Use lists, because the first NumPy calls are slow and the link is idle until the first
        # table is ready.
        numbers = memoryview(frames).cast("I").tolist()
        if numbers and numbers[0] > MAX_FRAME:
            numbers = [frame & MAX_FRAME for frame in numbers]
        ids = np.frombuffer(blocks, dtype=np.int32)
        size = len(ids) // max(1, len(numbers))
        starts = range(0, len(ids) + 1, size) if size else [0] * (len(numbers) + 1)
        return cls(numbers, [size] * len(numbers), starts, ids, keys)


class Run(NamedTuple):
    """Rows in ``num_rows`` consecutive frames, which one copy-engine command can copy."""

    frame: int
    part_offset: int
    slot_offset: int
    row_bytes: int
    num_rows: int


@dataclass(slots=True, eq=False)
class Piece:
    """The work of one kernel launch: chunks [begin, end), or consecutive tiles of one chunk.

    Segment s belongs to chunk ``begin + s``. Segment bases are relative to the slot, where chunks
    are ``slot_stride`` bytes apart. Only the first ``num_segments`` entries of ``segments`` belong
    to the piece. ``parts`` describes the encoded parts in host memory, or is None if parts are raw.
    """

    begin: int
    end: int
    segments: npt.NDArray[Any]
    block_ids: npt.NDArray[np.int32]
    num_tiles: int
    num_bytes: int
    runs: tuple[Run, ...]
    slot_stride: int
    parts: npt.NDArray[Any] | None = None

    @property
    def link_bytes(self) -> int:
        """Return how many bytes the copy engine copies."""
        return sum(run.row_bytes * run.num_rows for run in self.runs)

    @property
    def num_segments(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PieceLimits:
    """The slot size and the layout of parts in frames, which limit piece sizes.

    ``encoding`` is None if parts are raw. A run must not cross a frame number that is a multiple of
    ``frames_per_run``, because CUDA rejects a copy across separately registered ranges, and frames
    in different slabs may not be equally spaced.
    """

    block_tiles: BlockTiles
    slot_bytes: int
    part_bytes: int
    blocks_per_chunk: int
    frames_per_run: int
    encoding: PartEncoding | None = None
    full_segments: npt.NDArray[Any] = field(init=False, compare=False, repr=False)
    """The segments of a piece with only full chunks, as almost all pieces are."""

    def __post_init__(self) -> None:
        blocks: npt.NDArray[np.int64] = np.full(
            min(self.chunks_per_piece, MAX_SEGMENTS), self.blocks_per_chunk, dtype=np.int64
        )
        segments = _segments(blocks, self)
        if self.encoding is not None and self.slot_bytes and not self.chunks_per_piece:
            raise ValueError(
                f"a staging slot of {self.slot_bytes} bytes is too small for an encoded chunk"
            )
        segments.flags.writeable = False  # launches share these segments
        object.__setattr__(self, "full_segments", segments)

    @property
    def chunks_per_piece(self) -> int:
        """Return the number of chunks per piece, or 0 if a chunk does not fit into a slot."""
        if not self.block_tiles.tiles_per_block:
            return MAX_SEGMENTS
        return min(
            self.slot_bytes // self.slot_stride, MAX_SEGMENTS, MAX_BLOCKS // self.blocks_per_chunk
        )

    @property
    def slot_stride(self) -> int:
        """Return the distance between chunks in a slot, in bytes."""
        if self.encoding is None:
            return self.part_bytes
        return slot_stride(self.encoding.width(self.blocks_per_chunk))

    def max_pieces(self, num_chunks: int) -> int:
        """Return the maximum number of pieces for ``num_chunks`` chunks."""
        if per_piece := self.chunks_per_piece:
            return -(-num_chunks // per_piece)
        num_blocks = self.blocks_per_chunk
        ids: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        chunk = ChunkTable([0], [num_blocks], [0, num_blocks], ids, b"")
        return num_chunks * sum(1 for _ in _parts_of_chunk(chunk, 0, self))

    def row_bytes(self, num_blocks: int) -> int:
        """Return how many bytes the copy engine copies for a chunk of this size."""
        if self.encoding is None:
            return num_blocks * self.block_tiles.block_bytes
        return self.encoding.width(num_blocks)


def split(
    table: ChunkTable, limits: PieceLimits, is_raw: npt.NDArray[np.bool_] | None = None
) -> Iterator[Piece]:
    """Yield the pieces of ``table``.

    ``is_raw`` marks the chunks with raw parts. If ``is_raw`` is None, all parts are encoded if
    ``limits`` has an encoding, and raw otherwise.
    """
    per_piece = limits.chunks_per_piece
    if not per_piece:
        for chunk in range(len(table.frames)):
            yield from _parts_of_chunk(table, chunk, limits)
        return
    for begin in range(0, len(table.frames), per_piece):
        yield _whole_chunks(table, begin, min(begin + per_piece, len(table.frames)), limits, is_raw)


def _whole_chunks(
    table: ChunkTable,
    begin: int,
    end: int,
    limits: PieceLimits,
    is_raw: npt.NDArray[np.bool_] | None,
) -> Piece:
    tiles, num_chunks = limits.block_tiles, end - begin
    first, last = table.starts[begin], table.starts[end]
    total = last - first
    named = last if tiles.tiles_per_block else first  # blocks without pages need no ordering
    lengths = table.num_blocks[begin:end]
    are_full = total == num_chunks * limits.blocks_per_chunk
    segments = limits.full_segments if are_full else _segments(np.array(lengths), limits)
    frames, parts = table.frames[begin:end], None
    if limits.encoding is not None:
        own = None if is_raw is None else is_raw[begin:end]
        parts = limits.encoding.parts(frames, lengths, own)
    return Piece(
        begin,
        end,
        segments,
        table.block_ids[first:named],
        total * tiles.tiles_per_block,
        total * tiles.block_bytes,
        tuple(_runs(frames, lengths, limits, are_full=are_full)),
        limits.slot_stride,
        parts,
    )


def _segments(num_blocks: npt.NDArray[np.int64], limits: PieceLimits) -> npt.NDArray[Any]:
    """Return the segments of consecutive chunks. ``num_blocks`` has one entry per chunk."""
    segments: npt.NDArray[Any] = np.zeros(len(num_blocks), SEGMENT)
    blocks_before = np.cumsum(num_blocks) - num_blocks
    segments["base"] = np.arange(len(num_blocks), dtype=np.uint64) * np.uint64(limits.slot_stride)
    segments["first_tile"] = blocks_before * limits.block_tiles.tiles_per_block
    segments["block_index"] = blocks_before
    return segments


def _runs(
    frames: Sequence[int], num_blocks: Sequence[int], limits: PieceLimits, *, are_full: bool
) -> Iterator[Run]:
    """Yield a run for each sequence of chunks in adjacent frames.

    A run's chunks have equal lengths, because the bytes after a shorter payload in a slot are stale
    and must not be copied.
    """
    stride, per_run = limits.slot_stride, limits.frames_per_run
    if not limits.block_tiles.block_bytes:
        return
    steps = enumerate(pairwise(frames), 1)
    apart = [i for i, (last, frame) in steps if frame != last + 1 or not frame % per_run]
    if not are_full:
        lengths = enumerate(pairwise(num_blocks), 1)
        apart = sorted({*apart, *(i for i, (last, length) in lengths if length != last)})
    for first, stop in pairwise((0, *apart, len(frames))):
        row_bytes = limits.row_bytes(num_blocks[first])
        yield Run(frames[first], 0, first * stride, row_bytes, stop - first)


def _parts_of_chunk(table: ChunkTable, chunk: int, limits: PieceLimits) -> Iterator[Piece]:
    """Yield the pieces of one chunk that is larger than a slot."""
    tiles, first_id = limits.block_tiles, table.starts[chunk]
    num_tiles = table.num_blocks[chunk] * tiles.tiles_per_block
    tile = 0
    while tile < num_tiles:
        stop = _last_tile(tile, num_tiles, limits)
        begin_byte, end_byte = tiles.payload_offset(tile), tiles.payload_offset(stop)
        head = begin_byte % _SLOT_ALIGN  # preserves the alignment of the payload
        first_block, last_block = tile // tiles.tiles_per_block, (stop - 1) // tiles.tiles_per_block
        segments: npt.NDArray[Any] = np.zeros(1, SEGMENT)
        segments["base"] = np.uint64((head - begin_byte) % (1 << 64))
        segments["chunk_tile"] = tile
        segments["block_index"] = -first_block
        yield Piece(
            chunk,
            chunk + 1,
            segments,
            table.block_ids[first_id + first_block : first_id + last_block + 1],
            stop - tile,
            end_byte - begin_byte,
            (Run(table.frames[chunk], begin_byte, head, end_byte - begin_byte, 1),),
            limits.slot_stride,
        )
        tile = stop


def _last_tile(tile: int, num_tiles: int, limits: PieceLimits) -> int:
    """Return the end of the longest tile range that starts at ``tile`` and fits into a slot.

    Raises ValueError if no tile fits.
    """
    tiles = limits.block_tiles
    begin = tiles.payload_offset(tile)
    free_bytes = limits.slot_bytes - begin % _SLOT_ALIGN
    block, rest = divmod(begin + free_bytes, tiles.block_bytes)
    last = int(np.searchsorted(tiles.tile_offsets, rest, side="right")) - 1
    last_block = tile // tiles.tiles_per_block + MAX_BLOCKS
    stop = block * tiles.tiles_per_block + last
    stop = min(stop, num_tiles, last_block * tiles.tiles_per_block)
    if stop <= tile:
        raise ValueError(f"a staging slot of {limits.slot_bytes} bytes is too small")
    return stop
