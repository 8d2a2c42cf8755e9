"""Trailers of this rank's parts as a numpy column, written and read for many frames at once with
tags from the GPU.

docs/design/frames.md describes the format, and a test compares it with `_core.Arena`. Must not
depend on streams or plans.
"""

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvloft.transfer.frames import E348, PART_ALIGN, RAW, TABLE_ENTRY_BYTES, FrameMemory

MAGIC: Final = b"KVLOFT03"
TRAILER: Final = np.dtype(
    [
        ("magic", "V8"),
        ("key", "V32"),
        ("layout", "V32"),
        ("tag", "<u8"),
        ("payload_bytes", "<u8"),
        ("num_blocks", "<u4"),
        ("rank", "<u4"),
        ("encoded_bytes", "<u8"),
        ("encoding", "<u4"),
        ("zeros", "V20"),
    ]
)
assert TRAILER.itemsize == 128


class TrailerColumn:
    """The trailers of this rank's parts in memory, as dtype `TRAILER`."""

    def __init__(self, memory: FrameMemory) -> None:
        raw = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
        self._memory = memory
        self._offset = memory.part_offset + memory.part_bytes - TRAILER.itemsize
        # A view of all positions at which a trailer can begin: frames are whole pages.
        num_pages = (memory.size_bytes - self._offset - TRAILER.itemsize) // PART_ALIGN + 1
        self.pages: npt.NDArray[Any] = np.ndarray(
            (num_pages,), TRAILER, raw, self._offset, (PART_ALIGN,)
        )

    def at(self, frames: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Return the indices of the trailers of ``frames`` in ``pages``."""
        return self._memory.starts(frames) // np.uint64(PART_ALIGN)


class Trailers:
    """Seals and checks frames of one layout. ``block_tiles``: None if all parts are raw."""

    def __init__(
        self,
        memory: FrameMemory,
        *,
        layout: bytes,
        block_bytes: int,
        block_tiles: int | None = None,
        holds_raw: bool = True,
    ) -> None:
        """``holds_raw``: False if only encoded chunks fit the parts."""
        self._column, self._holds_raw = TrailerColumn(memory), holds_raw
        self._block_bytes, self._block_tiles = block_bytes, block_tiles
        self._room = memory.part_room
        blank: npt.NDArray[Any] = np.zeros(1, TRAILER)
        blank["magic"] = np.frombuffer(MAGIC, dtype="V8")
        blank["layout"] = np.frombuffer(layout, dtype="V32")
        blank["rank"] = memory.rank
        self._blank = blank[0]

    def seal(
        self,
        frames: npt.ArrayLike,
        keys: bytes,
        tags: npt.NDArray[np.uint64],
        num_blocks: npt.ArrayLike,
        used: npt.NDArray[np.uint64] | None = None,
    ) -> list[int]:
        """Write the trailers of ``frames``, whose payloads are complete; ``keys`` are 32 bytes
        each.

        ``used``: sizes of encoded records in units of 16 bytes. Returns the chunks that do not fit
        their parts: they are incomplete and stay unsealed.
        """
        pages, at = self._column.pages, self._column.at(frames)
        rows = self._rows(keys, tags, num_blocks)
        if self._block_tiles is None or used is None:
            pages[at] = rows
            return []
        table_bytes = np.asarray(num_blocks) * self._block_tiles * TABLE_ENTRY_BYTES
        table_units = ((table_bytes + 15) // 16).astype(np.uint64)
        rows["encoding"] = E348
        rows["encoded_bytes"] = (table_units + used) * np.uint64(16)
        fits = rows["encoded_bytes"] <= self._room
        pages[at[fits]] = rows[fits]
        pages["magic"][at[~fits]] = np.zeros(1, "V8")
        return [int(i) for i in np.flatnonzero(~fits)]

    def are_raw(self, frames: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return which ``frames`` are raw, according to trailers not checked yet."""
        encodings = self._column.pages["encoding"][self._column.at(frames)]
        return np.asarray((encodings != E348) & self._holds_raw)

    def read(
        self, frames: npt.ArrayLike, keys: bytes, num_blocks: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint64], dict[int, str]]:
        """Return the tags, and each problem: 'unsealed', 'key', 'layout' or 'shape'."""
        rows = self._column.pages[self._column.at(frames)]
        tags = rows["tag"].astype(np.uint64)
        good = self._rows(keys, tags, num_blocks)
        if self._block_tiles is not None:
            are_encoded = rows["encoding"] == E348  # any length: the decoder checks bounds
            good["encoding"] = np.where(are_encoded, E348, RAW if self._holds_raw else E348)
            good["encoded_bytes"] = np.where(
                are_encoded, rows["encoded_bytes"], good["encoded_bytes"]
            )
        if rows.tobytes() == good.tobytes():
            return tags, {}
        sealed, key, layout = (rows[name] == good[name] for name in ("magic", "key", "layout"))
        of_shape = ("num_blocks", "rank", "payload_bytes", "encoded_bytes", "encoding")
        shape = np.logical_and.reduce([rows[name] == good[name] for name in of_shape])
        named = (("unsealed", sealed), ("key", key), ("layout", layout), ("shape", shape))
        bad = np.flatnonzero(~(sealed & key & layout & shape))
        return tags, {int(i): next(name for name, fine in named if not fine[i]) for i in bad}

    def _rows(
        self, keys: bytes, tags: npt.NDArray[np.uint64], num_blocks: npt.ArrayLike
    ) -> npt.NDArray[Any]:
        """Return the expected trailers of chunks."""
        rows: npt.NDArray[Any] = np.full(len(keys) // 32, self._blank, TRAILER)
        rows["key"] = np.frombuffer(keys, dtype="V32")
        rows["tag"] = tags
        rows["num_blocks"] = num_blocks
        rows["payload_bytes"] = rows["encoded_bytes"] = np.asarray(num_blocks) * self._block_bytes
        return rows
