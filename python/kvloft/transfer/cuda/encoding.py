"""Computes encoded part sizes, and determines whether a layout can be encoded.

docs/design/compression.md describes the e348 format, and csrc/e348.cu contains its kernels. Encoded
sizes vary, so the copy engine copies a constant number of bytes per part (its width), and kernels
access the remaining bytes in host memory. This module does not use CUDA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from kvloft.transfer.cuda.kernels import MAX_BLOCKS, PART, vec_bytes_of
from kvloft.transfer.frames import TABLE_ENTRY_BYTES, TILE_BYTES, FrameMemory
from kvloft.transfer.layout import PagedLayout

SHARE: Final = 0.70
"""Number of bytes that the copy engine copies, as a fraction of the bf16 pages' size. This fraction
covers 99.75% of real KV.
"""
MAX_PART_BYTES: Final = 1 << 28
"""Maximum encoded part size: a table entry has a 24-bit offset in units of 16 bytes."""
_MIN_PAGE_BYTES: Final = 1024
"""Minimum page size for which encoding saves space."""


def _tiles_per_block(layout: PagedLayout) -> int:
    return sum(-(-plane.page_bytes // TILE_BYTES) for plane in layout.planes)


def _saved_bytes(layout: PagedLayout) -> int:
    """Return how many bytes encoding saves per block, ignoring the table size."""
    sizes = (plane.page_bytes for plane in layout.planes if plane.is_bf16)
    return int(sum(size for size in sizes if size >= _MIN_PAGE_BYTES) * (1 - SHARE))


def can_encode(layout: PagedLayout, num_blocks: int, slot_bytes: int) -> bool:
    """Return True if encoding saves space and every encoded chunk fits into a staging slot."""
    table_bytes = TABLE_ENTRY_BYTES * _tiles_per_block(layout)
    if num_blocks > MAX_BLOCKS or vec_bytes_of(layout) != 16 or _saved_bytes(layout) <= table_bytes:
        return False
    widest = slot_stride(num_blocks * (layout.block_bytes + table_bytes) + 16)
    return widest <= min(slot_bytes, MAX_PART_BYTES)


def slot_stride(width: int) -> int:
    """Return the distance in bytes between chunks in a slot.

    A chunk's last record can extend past ``width``.
    """
    return -(-(width + TILE_BYTES) // 512) * 512


@dataclass(frozen=True, slots=True)
class PartEncoding:
    """Sizes of encoded parts for one layout.

    Attributes:
        frames: the frames that kernels access directly, or None if kernels cannot access
            them because they are not registered.
        capacity: size of a part in bytes, excluding its trailer.
        block_width: number of bytes that the copy engine copies for each block of a chunk.
    """

    frames: FrameMemory | None
    capacity: int
    block_width: int

    @classmethod
    def of(cls, layout: PagedLayout, frames: FrameMemory, *, everything: bool = False) -> Self:
        """Return the sizes for ``layout``.

        With ``everything``, the copy engine copies as many bytes as the largest possible encoded
        part has. Loads from unregistered frames require this.
        """
        saved = 0 if everything else _saved_bytes(layout)
        block_width = layout.block_bytes - saved + TABLE_ENTRY_BYTES * _tiles_per_block(layout)
        return cls(None if everything else frames, frames.part_capacity, block_width)

    def width(self, num_blocks: int) -> int:
        """Return the number of bytes that the copy engine copies for ``num_blocks`` blocks."""
        return min(self.capacity, (num_blocks * self.block_width + 16 + 63) // 64 * 64)

    def parts(
        self, frames: Sequence[int], num_blocks: Sequence[int], is_raw: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[Any]:
        """Return a `PART` record for each chunk in a piece."""
        parts: npt.NDArray[Any] = np.zeros(len(frames), PART)
        if (memory := self.frames) is not None:
            first = np.uint64(memory.address + memory.part_offset)
            parts["address"] = memory.starts(frames) + first
        widths = {each: self.width(each) for each in set(num_blocks)}
        parts["width"] = [widths[each] for each in num_blocks]
        if is_raw is not None:
            parts["is_raw"] = is_raw
        return parts
