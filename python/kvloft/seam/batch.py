"""Chunks to copy, as plans carry them: a frame, its key, and the blocks of paged KV on the other side. No meaning beyond that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, overload

from kvloft.seam.ids import BlockId, ChunkKey, Ticket


class ChunkCopy(NamedTuple):
    """One frame and the blocks of paged KV it is copied from (save) or to (load). A tuple, because plans make thousands.

    ``blocks[i]`` is block ``first_block + i`` of the chunk; for a save first_block is 0. ``num_blocks`` is what the frame
    holds, which the trailer must agree with; ``len(blocks)`` may be smaller for a load that needs only the chunk's end.
    """

    frame: int
    key: ChunkKey
    num_blocks: int
    first_block: int
    blocks: tuple[BlockId, ...]
    ticket: Ticket = Ticket(-1)


class BlockChunks(Sequence[ChunkCopy], ABC):
    """Chunks of one block each: rows of a store, and the blocks they go to or come from. A ChunkCopy is made when it is asked for.

    A long prompt has thousands, and a forward or the first byte of a load waits for them: whoever wants all takes columns.
    """

    __slots__ = ("blocks", "rows")
    FRAME: ClassVar[int]
    KEY: ClassVar[int]
    """Where a row has them."""

    def __init__(self, rows: Sequence[Any], blocks: Sequence[BlockId]) -> None:
        """``blocks[i]`` belongs to ``rows[i]``. Raises ValueError unless they pair up."""
        if len(rows) != len(blocks):
            raise ValueError(f"{len(rows)} chunks for {len(blocks)} blocks")
        self.rows = rows
        self.blocks = blocks

    @staticmethod
    @abstractmethod
    def _copy(row: Any, block: BlockId) -> ChunkCopy: ...

    def columns(self) -> tuple[tuple[int, ...], tuple[ChunkKey, ...]]:
        """Frames and keys."""
        every = tuple(zip(*self.rows, strict=True))
        return (every[self.FRAME], every[self.KEY]) if every else ((), ())

    def by_frame(self) -> Self:
        """The same in the order of their frames."""
        frames = [row[self.FRAME] for row in self.rows]
        if frames == sorted(frames):
            return self
        order = sorted(range(len(frames)), key=frames.__getitem__)
        return type(self)([self.rows[i] for i in order], tuple([self.blocks[i] for i in order]))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ChunkCopy: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> ChunkCopy | Self:
        if isinstance(index, slice):
            return type(self)(self.rows[index], self.blocks[index])
        return self._copy(self.rows[index], self.blocks[index])

    def __iter__(self) -> Iterator[ChunkCopy]:
        return map(self._copy, self.rows, self.blocks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | BlockChunks) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class LeasedChunks(BlockChunks):
    """Chunks of a load; rows as from `ReadLease.frames`: (frame, key, first block, number of blocks, tier)."""

    __slots__ = ()
    FRAME, KEY = 0, 1

    @staticmethod
    def _copy(row: tuple[int, bytes, int, int, str], block: BlockId) -> ChunkCopy:
        return ChunkCopy(row[0], ChunkKey(row[1]), 1, 0, (block,))


class ReservedChunks(BlockChunks):
    """Chunks of a save; rows as from `Store.reserve`: (ticket, frame, key, first block, number of blocks)."""

    __slots__ = ()
    FRAME, KEY = 1, 2

    def tickets(self) -> list[Ticket]:
        return [row[0] for row in self.rows]

    @staticmethod
    def _copy(row: tuple[int, int, bytes, int, int], block: BlockId) -> ChunkCopy:
        return ChunkCopy(row[1], ChunkKey(row[2]), 1, 0, (block,), Ticket(row[0]))
