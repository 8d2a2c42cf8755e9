"""A worker's window on the host tier: the arena mapped from the scheduler half's plan, and this rank's part of each frame.

It must not know where pages come from.
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
"""Parts start and end on pages, so that frames can be read and written without bounce copies."""


def part_bytes_for(payload_bytes: int) -> int:
    """Bytes of one rank's part of a frame that holds ``payload_bytes``: payload, padding, trailer."""
    return -(-(payload_bytes + _core.TRAILER_BYTES) // PART_ALIGN) * PART_ALIGN


@dataclass(frozen=True, slots=True)
class FrameMemory:
    """Frames at ``address + frame * frame_bytes``; ours is the part of ``part_bytes`` at ``part_offset`` in each."""

    address: int
    num_frames: int
    frame_bytes: int
    part_offset: int
    part_bytes: int
    rank: int
    owner: object
    """Whatever keeps the memory mapped."""
    is_shared: bool = False
    """Whether other ranks use these frames too."""

    @property
    def size_bytes(self) -> int:
        return self.num_frames * self.frame_bytes

    def part(self, frame: int) -> int:
        """Address of our part of ``frame``."""
        return self.address + frame * self.frame_bytes + self.part_offset


class FrameWindow:
    """This rank's part of every frame: as addresses in ``memory``, and as bytes of one shared tensor."""

    def __init__(self, spec: ArenaSpec, shape: CacheShape, *, shard: int, payload_bytes: int) -> None:
        """Map the arena. Raises LayoutError if its frames cannot hold ``payload_bytes`` in this shard's part.

        How large parts are the scheduler says, which knows all ranks.
        """
        part_bytes, rest = divmod(spec.frame_bytes, shape.num_shards)
        if rest or part_bytes % PART_ALIGN or part_bytes < part_bytes_for(payload_bytes):
            raise LayoutError(
                f"frames of {spec.frame_bytes} bytes in {shape.num_shards} shards cannot hold this rank's {payload_bytes} bytes a "
                "chunk: the scheduler and the worker disagree about the KV cache; please report this model"
            )
        self._arena = arena = _core.Arena.open(spec.path, frame_bytes=spec.frame_bytes, num_frames=spec.num_frames)
        if spec.id not in (0, arena.id):
            raise RuntimeError("the host tier that was planned for is gone; what was planned is a miss")
        self.memory = FrameMemory(
            arena.address, spec.num_frames, spec.frame_bytes, shard * part_bytes, part_bytes, shard, arena,
            is_shared=shape.num_ranks > 1,
        )  # fmt: skip
        raw = (ctypes.c_uint8 * arena.size_bytes).from_address(arena.address)
        self.bytes = torch.frombuffer(raw, dtype=torch.uint8).view(spec.num_frames, spec.frame_bytes)

    def payload(self, frame: int, num_bytes: int) -> torch.Tensor:
        """uint8 view of the first ``num_bytes`` of this rank's payload in ``frame``."""
        return self.bytes[frame, self.memory.part_offset : self.memory.part_offset + num_bytes]

    def seal(self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]) -> None:
        """Tag the payload just gathered and write the trailer."""
        self._arena.seal(copy.frame, self._part_of(copy, layout, page_bytes))

    def check(self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]) -> str | None:
        """None if the frame is what ``copy.key`` stands for, else what is wrong with it."""
        return self._arena.check(copy.frame, self._part_of(copy, layout, page_bytes))

    def _part_of(self, copy: ChunkCopy, layout: bytes, page_bytes: Sequence[int]) -> dict[str, Any]:
        part = self.memory
        return {
            "offset": part.part_offset, "part_bytes": part.part_bytes, "key": copy.key, "layout": layout,
            "page_bytes": page_bytes, "num_blocks": copy.num_blocks, "rank": part.rank,
        }  # fmt: skip
