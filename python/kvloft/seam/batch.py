"""Chunks to copy, as plans carry them: frames, their keys, and the blocks of paged KV on the other side. No meaning beyond that."""

from __future__ import annotations

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
