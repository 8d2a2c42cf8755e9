"""Encoded parts of frames: which layouts are encoded, and how much of a part the copy engine moves.

The format "e348" is ARCHITECTURE.md's ("Frames"), the kernels are csrc/e348.cu. Sizes differ from chunk to chunk, so the copy
engine moves a constant width of each part, and kernels write and read what lies behind it in host memory. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvloft.transfer.cuda.kernels import MAX_BLOCKS, PART, vec_bytes_of
from kvloft.transfer.frames import TABLE_ENTRY_BYTES, TILE_BYTES
from kvloft.transfer.layout import PagedLayout

SHARE: Final = 0.70
"""Width of a part's bf16 pages, as a share of their bytes: what real KV takes with its table, but for a quarter of a percent."""
MAX_PART_BYTES: Final = 1 << 28
"""A table entry has 24 bits for an offset in 16 bytes."""
_MIN_PAGE_BYTES: Final = 1024
"""Smaller pages do not shrink."""


def _tiles_per_block(layout: PagedLayout) -> int:
    return sum(-(-plane.page_bytes // TILE_BYTES) for plane in layout.planes)


def _saved_bytes(layout: PagedLayout) -> int:
    """What a block's pages are expected to shrink by, without the table."""
    return int(
        sum(plane.page_bytes for plane in layout.planes if plane.is_bf16 and plane.page_bytes >= _MIN_PAGE_BYTES) * (1 - SHARE)
    )


def can_encode(layout: PagedLayout, num_blocks: int, slot_bytes: int) -> bool:
    """Whether chunks of ``num_blocks`` shrink, and one of any content fits a staging slot. Other pages stay raw."""
    table_bytes = TABLE_ENTRY_BYTES * _tiles_per_block(layout)
    if num_blocks > MAX_BLOCKS or vec_bytes_of(layout) != 16 or _saved_bytes(layout) <= table_bytes:
        return False
    widest = slot_stride(num_blocks * (layout.block_bytes + table_bytes) + 16)
    return widest <= min(slot_bytes, MAX_PART_BYTES)


def slot_stride(width: int) -> int:
    """Bytes of a staging slot for a chunk of which ``width`` are moved: a record that begins in front of it may end behind it."""
    return -(-(width + TILE_BYTES) // 512) * 512


@dataclass(frozen=True, slots=True)
class PartEncoding:
    """Parts of one layout. ``block_width``: bytes that the copy engine moves for each block of a chunk.

    ``first_part``: address of our part of frame 0, for the kernels; None where they may not touch frames, which are not registered.
    ``room``: bytes of a part in front of its trailer.
    """

    first_part: int | None
    frame_bytes: int
    room: int
    block_width: int

    @classmethod
    def of(cls, layout: PagedLayout, first_part: int, frame_bytes: int, room: int, *, everything: bool = False) -> PartEncoding:
        """``everything``: the copy engine moves all that a chunk can have, for frames that are not registered yet."""
        saved = 0 if everything else _saved_bytes(layout)
        block_width = layout.block_bytes - saved + TABLE_ENTRY_BYTES * _tiles_per_block(layout)
        return cls(None if everything else first_part, frame_bytes, room, block_width)

    def width(self, num_blocks: int) -> int:
        """Bytes of a part with ``num_blocks`` that the copy engine moves."""
        return min(self.room, (num_blocks * self.block_width + 16 + 63) // 64 * 64)

    def parts(self, frames: Sequence[int], num_blocks: Sequence[int], is_raw: npt.NDArray[np.bool_] | None) -> npt.NDArray[Any]:
        """Of the chunks of a piece, dtype `PART`."""
        parts: npt.NDArray[Any] = np.zeros(len(frames), PART)
        if self.first_part is not None:
            parts["address"] = np.array(frames, dtype=np.uint64) * np.uint64(self.frame_bytes) + np.uint64(self.first_part)
        widths = {each: self.width(each) for each in set(num_blocks)}
        parts["width"] = [widths[each] for each in num_blocks]
        if is_raw is not None:
            parts["is_raw"] = is_raw
        return parts
