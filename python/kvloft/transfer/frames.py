"""Maps the host arena in a worker, and provides the frames, this rank's parts and the lifeline."""

import ctypes
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloft import _core
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.shape import COMPACT_SHARE, ArenaSpec, CacheShape, part_sizes
from kvloft.transfer.layout import LayoutError

PART_ALIGN = 4096
"""Part alignment: the page size, so that direct disk I/O needs no bounce buffers."""


RAW, E348 = 0, 1
"""Part encodings, as stored in trailers and namespaces. Numbers must never be reused."""
TABLE_ENTRY_BYTES = 8
"""Size of a table entry in an encoded part. The table has one entry per tile."""
TILE_BYTES = 4096
"""Maximum tile size, as in csrc/kv_layout.cuh. A tile never spans two pages."""


def compact_bytes_for(payload_bytes: int, encoded_bytes: int, num_tiles: int) -> int:
    """Return the part size for compressed chunks, or 0 if compression saves less than 10%.

    ``encoded_bytes`` is the total size of the payload's compressible pages.
    """
    saved = int(encoded_bytes * (1 - COMPACT_SHARE))
    compact = part_bytes_for(payload_bytes - saved, num_tiles)
    return compact if compact <= 0.9 * part_bytes_for(payload_bytes, num_tiles) else 0


def part_bytes_for(payload_bytes: int, num_tiles: int = 0) -> int:
    """Return the size of a part: table of ``num_tiles`` entries, payload, padding and trailer."""
    table_bytes = num_tiles * TABLE_ENTRY_BYTES
    return -(-(table_bytes + payload_bytes + _core.TRAILER_BYTES) // PART_ALIGN) * PART_ALIGN


@dataclass(frozen=True, slots=True)
class FrameMemory:
    """The addresses of all frames of one size, and of this rank's part in each frame.

    The part is ``part_bytes`` long and starts at ``part_offset`` in the frame. Frames are
    consecutive in a slab and never span two slabs, as in `rust/core/src/io/frame.rs`.
    """

    address: int
    size_bytes: int
    slab_bytes: int
    frame_bytes: int
    part_offset: int
    part_bytes: int
    rank: int
    owner: object
    """Object that keeps the memory mapped."""
    is_shared: bool = False
    """True if several ranks use these frames."""
    per_slab: int = field(init=False)
    """Number of frames per slab. The last slab can have more frames."""
    last_slab: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_slab", self.slab_bytes // self.frame_bytes)
        object.__setattr__(self, "last_slab", self.size_bytes // self.slab_bytes - 1)

    @property
    def num_frames(self) -> int:
        before = self.last_slab * self.per_slab
        left = self.size_bytes - self.last_slab * self.slab_bytes
        return before + left // self.frame_bytes

    @property
    def is_dense(self) -> bool:
        """Return True if there are no gaps between the frames of consecutive slabs."""
        return self.slab_bytes % self.frame_bytes == 0

    @property
    def part_capacity(self) -> int:
        """Return the size of a part in bytes, excluding its trailer."""
        return self.part_bytes - _core.TRAILER_BYTES

    def start(self, frame: int) -> int:
        """Return the offset of ``frame`` in the arena."""
        slab = min(frame // self.per_slab, self.last_slab)
        return slab * self.slab_bytes + (frame - slab * self.per_slab) * self.frame_bytes

    def starts(self, frames: npt.ArrayLike) -> npt.NDArray[np.uint64]:
        numbers = np.asarray(frames, dtype=np.uint64)
        slabs = np.minimum(numbers // np.uint64(self.per_slab), np.uint64(self.last_slab))
        return slabs * np.uint64(self.slab_bytes) + (
            numbers - slabs * np.uint64(self.per_slab)
        ) * np.uint64(self.frame_bytes)

    def part(self, frame: int) -> int:
        """Return the address of this rank's part of ``frame``."""
        return self.address + self.start(frame) + self.part_offset


class FrameWindow:
    """Exposes this rank's part of each frame of one size as an address and a tensor."""

    def __init__(self, memory: FrameMemory, arena_bytes: torch.Tensor) -> None:
        self.memory = memory
        self.bytes = arena_bytes
        """The entire arena as a uint8 tensor."""

    def part(self, frame: int) -> torch.Tensor:
        """Return a uint8 view of this rank's part of ``frame``: payload, padding and trailer.

        Raises IndexError if the arena does not have this frame.
        """
        if not 0 <= frame < self.memory.num_frames:
            raise IndexError(
                f"invalid frame {frame}: the arena has {self.memory.num_frames} frames"
            )
        begin = self.memory.start(frame) + self.memory.part_offset
        return self.bytes[begin : begin + self.memory.part_bytes]


@dataclass(frozen=True, slots=True)
class GroupFrames:
    """The frames of one KV cache group.

    ``compact`` and ``compact_class`` are the window and size class for compressed chunks, if the
    group has frames for them.
    """

    raw: FrameWindow
    raw_class: int
    compact: FrameWindow | None = None
    compact_class: int = 0


def map_frames(
    spec: ArenaSpec, shape: CacheShape, *, shard: int, payload_bytes: Sequence[int]
) -> list[GroupFrames]:
    """Map the arena and return the frames of each KV cache group.

    Groups with equal frame sizes share a window. The scheduler side determines part sizes, because
    it has all ranks' shapes. Raises LayoutError if a part is smaller than a group's
    ``payload_bytes``, and RuntimeError if the arena has been replaced.
    """
    sizes = part_sizes(spec.groups)
    for group, num_bytes in zip(spec.groups, payload_bytes, strict=True):
        if group.part_bytes % PART_ALIGN or group.part_bytes < part_bytes_for(num_bytes):
            raise LayoutError(
                f"a {group.part_bytes}-byte part cannot hold this rank's {num_bytes}-byte chunks: "
                "the scheduler and the worker computed different KV cache sizes; please report "
                "the problem and the model"
            )
    arena = _core.Arena.open(spec.path, size_bytes=spec.size_bytes)
    if spec.id not in (0, arena.id):
        raise RuntimeError("this plan's host arena no longer exists; treating loads as misses")
    raw = (ctypes.c_uint8 * arena.size_bytes).from_address(arena.address)
    arena_bytes = torch.frombuffer(raw, dtype=torch.uint8)
    windows: dict[int, FrameWindow] = {}
    for part_bytes in sizes:
        memory = FrameMemory(
            arena.address,
            arena.size_bytes,
            spec.slab_bytes,
            part_bytes * shape.num_shards,
            shard * part_bytes,
            part_bytes,
            shard,
            arena,
            is_shared=shape.num_ranks > 1,
        )
        windows[part_bytes] = FrameWindow(memory, arena_bytes)
    found = []
    for group in spec.groups:
        frames = GroupFrames(windows[group.part_bytes], sizes.index(group.part_bytes))
        if size := group.compact_bytes:
            frames = replace(frames, compact=windows[size], compact_class=sizes.index(size))
        found.append(frames)
    return found


class PrivatePart:
    """Private memory in which parts are sealed and verified.

    If a part were verified in its frame, another process could write to the frame between
    verification and copy.
    """

    def __init__(self, frames: FrameWindow) -> None:
        self._frames = frames
        self._arena = _core.Arena.private(frames.memory.part_bytes)
        raw = (ctypes.c_uint8 * self._arena.size_bytes).from_address(self._arena.address)
        self.bytes = torch.frombuffer(raw, dtype=torch.uint8)

    def store(self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]) -> None:
        """Seal the payload in ``bytes``, and write the payload and trailer to ``copy.frame``."""
        self._arena.seal(self._describe(copy, layout, page_bytes))
        num_bytes = sum(page_bytes) * copy.num_blocks
        part, private = self._frames.part(copy.frame).numpy(), self.bytes.numpy()
        for begin, end in ((0, num_bytes), (len(part) - _core.TRAILER_BYTES, len(part))):
            part[begin:end] = private[begin:end]

    def fetch(self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]) -> str | None:
        """Copy this rank's part of ``copy.frame`` to ``bytes``, and verify the copy.

        Returns None if the part is valid for ``copy.key``. Otherwise, returns the problem.
        """
        num_bytes = sum(page_bytes) * copy.num_blocks
        part, private = self._frames.part(copy.frame).numpy(), self.bytes.numpy()
        if num_bytes + _core.TRAILER_BYTES <= len(part):
            for begin, end in ((0, num_bytes), (len(part) - _core.TRAILER_BYTES, len(part))):
                private[begin:end] = part[begin:end]
        return self._arena.check(self._describe(copy, layout, page_bytes))

    def _describe(
        self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "offset": 0,
            "part_bytes": self._frames.memory.part_bytes,
            "key": copy.key,
            "layout": layout,
            "page_bytes": page_bytes,
            "num_blocks": copy.num_blocks,
            "rank": self._frames.memory.rank,
        }


class Lifeline:
    """A worker's end of the engine's lifeline, which is a pipe. Once the server reads end-of-file,
    no process can write to the frames.

    The worker holds the pipe open until `close` and never writes to it. The kernel closes the pipe
    when the process exits for any reason. The lifeline must be opened before the arena is mapped.
    """

    def __init__(self, path: str, inode: int) -> None:
        """Open the pipe. Raises OSError if the engine has exited or the inode of ``path`` is not
        ``inode``.
        """
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(self._fd).st_ino != inode:
            self.close()
            raise OSError(f"{path} is no longer this engine's lifeline: the scheduler has exited")

    def wait_until_server_gone(self, wake: int) -> bool:
        """Block until no process can read the pipe, because the server has exited, or has lost the
        connection and released all of this engine's frames. Return False if ``wake`` becomes
        readable first.
        """
        fd, poll = self._fd, select.poll()
        if fd is None:
            return False
        poll.register(fd, 0)
        poll.register(wake, select.POLLIN)
        return wake not in dict(poll.poll())

    def close(self) -> None:
        """Close the pipe. After this call, this process must not write to frames. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
