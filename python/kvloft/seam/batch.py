"""Chunks to copy, as plans carry them: frames, their keys, and the blocks of paged KV on the other side. No meaning beyond that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvloft.seam.ids import BlockId, ChunkKey, Ticket

if TYPE_CHECKING:
    from kvloft._core import ChunkBatch as ChunkBatch
else:  # the extension is not loaded for a type
    ChunkBatch = Any

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


@dataclass(frozen=True, slots=True)
class GroupBatches:
    """Chunks of several KV cache groups: (which group, its chunks), each group once; a value, as a `ChunkBatch` is."""

    batches: tuple[tuple[int, ChunkBatch], ...] = ()

    @classmethod
    def of(cls, found: Mapping[int, Sequence[ChunkBatch]]) -> GroupBatches:
        """Out of one or more batches of each group."""
        return cls(tuple((group, chunks[0].concat(chunks) if len(chunks) > 1 else chunks[0]) for group, chunks in found.items()))

    def tickets(self) -> list[Ticket]:
        return [ticket for _, batch in self.batches for ticket in batch.tickets()]

    def block_ids(self) -> list[BlockId]:
        """Blocks that are copied, of all chunks."""
        return [block for _, batch in self.batches for block in batch.block_ids()]

    def __len__(self) -> int:
        return sum(len(batch) for _, batch in self.batches)

    def __iter__(self) -> Iterator[ChunkCopy]:
        return (copy for _, batch in self.batches for copy in batch)


class Tables:
    """A request's block tables, one a group; its length and its slices are those of group ``main``, in chunks.

    ``per_chunk``: blocks of each group in a chunk; None: one.
    """

    __slots__ = ("main", "per_chunk", "tables")

    def __init__(self, tables: Sequence[Sequence[BlockId]], main: int, per_chunk: Sequence[int] | None = None) -> None:
        self.tables, self.main, self.per_chunk = tables, main, per_chunk

    def __len__(self) -> int:
        return len(self.tables[self.main]) // self.size_of(self.main)

    def __getitem__(self, chunks: slice) -> Sequence[BlockId]:
        return self.of(self.main, chunks)

    def size_of(self, group: int) -> int:
        """Blocks of a group in a chunk."""
        return self.per_chunk[group] if self.per_chunk else 1

    def of(self, group: int, chunks: slice) -> Sequence[BlockId]:
        """The blocks of a group in ``chunks``, of which neither end is negative."""
        size = self.size_of(group)
        start, stop = chunks.start, chunks.stop
        return self.tables[group][start and start * size : stop and stop * size]
