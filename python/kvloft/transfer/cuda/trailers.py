"""The trailers of this rank's parts as one numpy column.

They are written and read for many frames at once, with a tag that the GPU made: the format is ARCHITECTURE.md's, and a test
holds it against `_core.Arena`. It must not know streams or plans.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvloft.transfer.frames import FrameMemory

MAGIC: Final = b"KVLOFT02"
TRAILER: Final = np.dtype(
    [("magic", "V8"), ("key", "V32"), ("layout", "V32"), ("tag", "<u8"), ("payload_bytes", "<u8"), ("num_blocks", "<u4"),
     ("rank", "<u4"), ("zeros", "V32")]
)  # fmt: skip
assert TRAILER.itemsize == 128


def trailers_of(memory: FrameMemory) -> npt.NDArray[Any]:
    """[num_frames] of `TRAILER`, a view of the memory itself."""
    raw = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
    offset = memory.part_offset + memory.part_bytes - TRAILER.itemsize
    return np.ndarray((memory.num_frames,), TRAILER, raw, offset, (memory.frame_bytes,))


class Trailers:
    """Seals and checks frames of one layout."""

    def __init__(self, memory: FrameMemory, *, layout: bytes, block_bytes: int) -> None:
        self._column = trailers_of(memory)
        self._block_bytes = block_bytes
        blank: npt.NDArray[Any] = np.zeros(1, TRAILER)
        blank["magic"] = np.frombuffer(MAGIC, dtype="V8")
        blank["layout"] = np.frombuffer(layout, dtype="V32")
        blank["rank"] = memory.rank
        self._blank = blank[0]

    def seal(self, frames: npt.ArrayLike, keys: bytes, tags: npt.NDArray[np.uint64], num_blocks: npt.ArrayLike) -> None:
        """Write the trailers of ``frames``, whose payloads are in place; ``keys`` are theirs, 32 bytes each."""
        self._column[np.asarray(frames)] = self._rows(keys, tags, num_blocks)

    def read(self, frames: npt.ArrayLike, keys: bytes, num_blocks: npt.ArrayLike) -> tuple[npt.NDArray[np.uint64], dict[int, str]]:
        """The tags of ``frames``, and what is wrong with which, before any byte moves: 'unsealed', 'key', 'layout' or 'shape'."""
        rows = self._column[np.asarray(frames)]
        tags = rows["tag"].astype(np.uint64)
        good = self._rows(keys, tags, num_blocks)
        if rows.tobytes() == good.tobytes():
            return tags, {}
        sealed, key, layout = (rows[name] == good[name] for name in ("magic", "key", "layout"))
        shape = np.logical_and.reduce([rows[name] == good[name] for name in ("num_blocks", "rank", "payload_bytes")])
        named = (("unsealed", sealed), ("key", key), ("layout", layout), ("shape", shape))
        bad = np.flatnonzero(~(sealed & key & layout & shape))
        return tags, {int(i): next(name for name, fine in named if not fine[i]) for i in bad}

    def _rows(self, keys: bytes, tags: npt.NDArray[np.uint64], num_blocks: npt.ArrayLike) -> npt.NDArray[Any]:
        """The trailers of chunks as they must be."""
        rows: npt.NDArray[Any] = np.full(len(keys) // 32, self._blank, TRAILER)
        rows["key"] = np.frombuffer(keys, dtype="V32")
        rows["tag"] = tags
        rows["num_blocks"] = num_blocks
        rows["payload_bytes"] = np.asarray(num_blocks) * self._block_bytes
        return rows
