"""Writes and verifies the trailers of this rank's parts for many frames in one call.

The GPU computes the tags. docs/design/frames.md describes the format. A test compares this
implementation with `_core.Arena`.
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
    """A NumPy view of the trailers of this rank's parts, with dtype `TRAILER`."""

    def __init__(self, memory: FrameMemory) -> None:
        raw = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
        self._memory = memory
        self._offset = memory.part_offset + memory.part_bytes - TRAILER.itemsize
        # The array has one element per arena page. Frames and parts are whole pages, so a trailer
        # can start `_offset` bytes after the start of any page.
        num_pages = (memory.size_bytes - self._offset - TRAILER.itemsize) // PART_ALIGN + 1
        self.pages: npt.NDArray[Any] = np.ndarray(
            (num_pages,), TRAILER, raw, self._offset, (PART_ALIGN,)
        )

    def at(self, frames: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Return the index of each frame's trailer in ``pages``."""
        return self._memory.starts(frames) // np.uint64(PART_ALIGN)


class Trailers:
    """Seals and verifies this rank's parts of frames that have the same layout."""

    def __init__(
        self,
        memory: FrameMemory,
        *,
        layout: bytes,
        block_bytes: int,
        block_tiles: int | None = None,
        holds_raw: bool = True,
    ) -> None:
        """Store the properties that all parts share. ``block_tiles`` is the number of tiles per
        block, or None if all parts are raw. ``holds_raw`` is False if raw chunks do not fit into
        the parts.
        """
        self._column, self._holds_raw = TrailerColumn(memory), holds_raw
        self._block_bytes, self._block_tiles = block_bytes, block_tiles
        self._part_capacity = memory.part_capacity
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
        record_units: npt.NDArray[np.uint64] | None = None,
    ) -> list[int]:
        """Write the trailers of ``frames`` once their payloads are complete.

        ``keys`` has 32 bytes per chunk. ``record_units`` holds the size of each chunk's encoded
        records, in units of 16 bytes. Returns the indices of chunks that do not fit into their
        parts. These chunks are not sealed, because their payloads are incomplete.
        """
        pages, at = self._column.pages, self._column.at(frames)
        rows = self._rows(keys, tags, num_blocks)
        if self._block_tiles is None or record_units is None:
            pages[at] = rows
            return []
        table_bytes = np.asarray(num_blocks) * self._block_tiles * TABLE_ENTRY_BYTES
        table_units = ((table_bytes + 15) // 16).astype(np.uint64)
        rows["encoding"] = E348
        rows["encoded_bytes"] = (table_units + record_units) * np.uint64(16)
        fits = rows["encoded_bytes"] <= self._part_capacity
        pages[at[fits]] = rows[fits]
        pages["magic"][at[~fits]] = np.zeros(1, "V8")
        return [int(i) for i in np.flatnonzero(~fits)]

    def are_raw(self, frames: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return an array that is True for each frame whose trailer marks the part as raw.

        The trailers are not verified, so the result might be wrong until `read` verifies them.
        """
        encodings = self._column.pages["encoding"][self._column.at(frames)]
        return np.asarray((encodings != E348) & self._holds_raw)

    def read(
        self, frames: npt.ArrayLike, keys: bytes, num_blocks: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint64], dict[int, str]]:
        """Return the tags of all chunks, and the problems with invalid trailers, keyed by chunk
        index.

        The problem is 'unsealed', 'key', 'layout', 'shape' or 'tag'. The problem 'layout' also
        covers encoded parts that this reader cannot decode. The problem 'tag' means that the
        trailer has the tag of no bytes.
        """
        rows = self._column.pages[self._column.at(frames)]
        tags = rows["tag"].astype(np.uint64)
        good = self._rows(keys, tags, num_blocks)
        if self._block_tiles is not None:
            # Accept any encoded length, because the decoder checks all bounds.
            are_encoded = rows["encoding"] == E348
            good["encoding"] = np.where(are_encoded, E348, RAW if self._holds_raw else E348)
            good["encoded_bytes"] = np.where(
                are_encoded, rows["encoded_bytes"], good["encoded_bytes"]
            )
        # A kernel that copied nothing would confirm the tag of no bytes.
        has_tag = (tags != 0) | (self._block_bytes == 0)
        if has_tag.all() and rows.tobytes() == good.tobytes():
            return tags, {}
        sealed, key, layout = (rows[name] == good[name] for name in ("magic", "key", "layout"))
        if self._block_tiles is None:
            # A raw part with a damaged encoding field still has the length of a raw part.
            is_raw_length = rows["encoded_bytes"] == good["encoded_bytes"]
            layout &= (rows["encoding"] != E348) | is_raw_length
        of_shape = ("num_blocks", "rank", "payload_bytes", "encoded_bytes", "encoding")
        shape = np.logical_and.reduce([rows[name] == good[name] for name in of_shape])
        named = (
            ("unsealed", sealed),
            ("key", key),
            ("layout", layout),
            ("shape", shape),
            ("tag", has_tag),
        )
        bad = np.flatnonzero(~np.logical_and.reduce([fine for _, fine in named]))
        return tags, {int(i): next(name for name, fine in named if not fine[i]) for i in bad}

    def _rows(
        self, keys: bytes, tags: npt.NDArray[np.uint64], num_blocks: npt.ArrayLike
    ) -> npt.NDArray[Any]:
        """Return the expected trailers for the chunks with ``keys``."""
        rows: npt.NDArray[Any] = np.full(len(keys) // 32, self._blank, TRAILER)
        rows["key"] = np.frombuffer(keys, dtype="V32")
        rows["tag"] = tags
        rows["num_blocks"] = num_blocks
        rows["payload_bytes"] = rows["encoded_bytes"] = np.asarray(num_blocks) * self._block_bytes
        return rows
