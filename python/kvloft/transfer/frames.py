"""The host arena as a worker maps it, and this rank's part of each frame. Must not depend on
pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvloft import _core
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.shape import ArenaSpec, CacheShape
from kvloft.transfer.layout import LayoutError

PART_ALIGN = 4096
"""Alignment of parts: pages, so that disk I/O needs no bounce copies."""


RAW, E348 = 0, 1
"""Encodings of a part, as in trailers and namespaces. A number is never reused for another
format.
"""
TABLE_ENTRY_BYTES = 8
"""Bytes of the table entry of each tile of an encoded part."""
TILE_BYTES = 4096
"""Size limit of a tile, a part of one page; as in csrc/kv_layout.cuh."""


def part_bytes_for(payload_bytes: int, num_tiles: int = 0) -> int:
    """Return the bytes of one rank's part of a frame: table of ``num_tiles``, payload, padding and
    trailer.
    """
    table_bytes = num_tiles * TABLE_ENTRY_BYTES
    return -(-(table_bytes + payload_bytes + _core.TRAILER_BYTES) // PART_ALIGN) * PART_ALIGN


@dataclass(frozen=True, slots=True)
class FrameMemory:
    """Frames at ``address + frame * frame_bytes``, and this rank's part of each: ``part_bytes`` at
    ``part_offset``.
    """

    address: int
    num_frames: int
    frame_bytes: int
    part_offset: int
    part_bytes: int
    rank: int
    owner: object
    """Keeps the memory mapped."""
    is_shared: bool = False
    """True if other ranks use these frames, too."""

    @property
    def size_bytes(self) -> int:
        return self.num_frames * self.frame_bytes

    @property
    def part_room(self) -> int:
        """Return the bytes of a part before its trailer."""
        return self.part_bytes - _core.TRAILER_BYTES

    def part(self, frame: int) -> int:
        """Return the address of this rank's part of ``frame``."""
        return self.address + frame * self.frame_bytes + self.part_offset


class FrameWindow:
    """This rank's part of every frame: addresses in ``memory``, and bytes of one shared tensor."""

    def __init__(
        self, spec: ArenaSpec, shape: CacheShape, *, shard: int, payload_bytes: int
    ) -> None:
        """Map the arena. Raises LayoutError if this shard's part of a frame cannot hold
        ``payload_bytes``.

        The scheduler side decides the size of parts, because it has the shapes of all ranks.
        """
        part_bytes, rest = divmod(spec.frame_bytes, shape.num_shards)
        if rest or part_bytes % PART_ALIGN or part_bytes < part_bytes_for(payload_bytes):
            raise LayoutError(
                f"frames of {spec.frame_bytes} bytes in {shape.num_shards} shards cannot hold this "
                f"rank's {payload_bytes} bytes a "
                "chunk: the scheduler and the worker disagree about the KV cache; please report "
                "this model"
            )
        self._arena = arena = _core.Arena.open(
            spec.path, frame_bytes=spec.frame_bytes, num_frames=spec.num_frames
        )
        if spec.id not in (0, arena.id):
            raise RuntimeError("the host arena of this plan is gone; its loads are misses")
        self.memory = FrameMemory(
            arena.address,
            spec.num_frames,
            spec.frame_bytes,
            shard * part_bytes,
            part_bytes,
            shard,
            arena,
            is_shared=shape.num_ranks > 1,
        )
        raw = (ctypes.c_uint8 * arena.size_bytes).from_address(arena.address)
        self.bytes = torch.frombuffer(raw, dtype=torch.uint8).view(
            spec.num_frames, spec.frame_bytes
        )

    def part(self, frame: int) -> torch.Tensor:
        """Return a uint8 view of this rank's part of ``frame``: payload, padding and trailer."""
        return self.bytes[
            frame, self.memory.part_offset : self.memory.part_offset + self.memory.part_bytes
        ]


class PrivatePart:
    """A private copy of one part: sealed before it is copied to a frame, and checked after it is
    copied from one.

    A worker whose scheduler died can still write to frames that now belong to another engine. If a
    part were sealed or checked in place, a write between the copy and the check would make wrong
    bytes look right.
    """

    def __init__(self, frames: FrameWindow) -> None:
        self._frames = frames
        self._arena = _core.Arena.private(frames.memory.part_bytes)
        raw = (ctypes.c_uint8 * self._arena.size_bytes).from_address(self._arena.address)
        self.bytes = torch.frombuffer(raw, dtype=torch.uint8)

    def store(self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]) -> None:
        """Tag the payload in ``bytes``, and write payload and trailer to ``copy.frame``."""
        self._arena.seal(0, self._describe(copy, layout, page_bytes))
        num_bytes = sum(page_bytes) * copy.num_blocks
        part = self._frames.part(copy.frame)
        for begin, end in ((0, num_bytes), (len(part) - _core.TRAILER_BYTES, len(part))):
            part[begin:end] = self.bytes[begin:end]

    def fetch(self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]) -> str | None:
        """Copy ``copy.frame`` to ``bytes``; returns the problem if it is not the chunk of
        ``copy.key``.
        """
        num_bytes = sum(page_bytes) * copy.num_blocks
        part = self._frames.part(copy.frame)
        if num_bytes + _core.TRAILER_BYTES <= len(part):
            for begin, end in ((0, num_bytes), (len(part) - _core.TRAILER_BYTES, len(part))):
                self.bytes[begin:end] = part[begin:end]
        return self._arena.check(0, self._describe(copy, layout, page_bytes))

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
