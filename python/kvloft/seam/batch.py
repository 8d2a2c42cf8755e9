"""Chunks to copy, as plans carry them: frames, their keys, and the blocks of paged KV on the other side. No meaning beyond that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, Self, overload

from kvloft.seam.ids import BlockId, ChunkKey, Ticket

Columns = tuple[bytes, bytes, bytes, bytes, bytes]
"""Frames (u32), keys (32 bytes), numbers of blocks (u32), blocks (i32) and tickets (u64; none for loads), little endian.

Each chunk has as many ``blocks`` as its frame holds; those that are not copied, before or behind the others, are -1.
"""


class ChunkCopy(NamedTuple):
    """One chunk of a batch, for who looks at single ones.

    ``blocks[i]`` is block ``first_block + i`` of the chunk; for a save first_block is 0. ``num_blocks`` is what the frame
    holds, which the trailer must agree with; ``len(blocks)`` may be smaller for a load that needs only the chunk's end.
    """

    frame: int
    key: ChunkKey
    num_blocks: int
    first_block: int
    blocks: tuple[BlockId, ...]
    ticket: Ticket = Ticket(-1)


class ChunkBatch(Protocol):
    """Chunks as columns, a value; ``kvloft._core.ChunkBatch`` is the real one, made by the store.

    A long prompt has thousands, and a forward or the first byte of a load waits for them: whoever wants all takes columns.
    """

    def columns(self) -> Columns: ...
    def tickets(self) -> list[Ticket]: ...
    def block_ids(self) -> list[BlockId]:
        """Blocks that are copied, of all chunks."""
        ...

    def by_frame(self) -> Self:
        """In the order of frames, so that neighbours, in whichever order a store gave them out, are one copy."""
        ...

    def take(self, positions: list[int]) -> Self: ...
    def check(self, *, num_frames: int, num_blocks: int, blocks_per_chunk: int) -> None:
        """Raises ValueError if a copy would reach outside the arena, its frame or the paged KV."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[ChunkCopy]: ...
    @overload
    def __getitem__(self, index: int, /) -> ChunkCopy: ...
    @overload
    def __getitem__(self, index: slice, /) -> Self: ...
