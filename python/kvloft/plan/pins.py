"""How much of host memory requests pin. A prefix that several of them share counts once.

Counted in strides of chunks: the key at a stride's end names all that comes before it. It must not know who may pin how much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvloft.seam.batch import ChunkBatch, GroupBatches
from kvloft.seam.store import KeyChain, ReadLease

if TYPE_CHECKING:
    from kvloft.plan.groups import GroupLease
    from kvloft.plan.tracker import Tracker

MAX_STRIDE = 16


class Pins:
    """Chunks that some leases pin, each once, by ``stride`` chunks at a time."""

    def __init__(self, num_frames: int, blocks_per_chunk: int) -> None:
        self._stride_blocks = max(1, min(MAX_STRIDE, num_frames // 64)) * blocks_per_chunk
        self._blocks_per_chunk = blocks_per_chunk
        self._num_users: dict[bytes, int] = {}
        self.num_chunks = 0
        """Pinned now."""
        self.leases: dict[Lease, None] = {}

    def strides(self, chain: KeyChain, num_blocks: int) -> list[tuple[bytes, int]]:
        """What a lease on the first ``num_blocks`` of ``chain`` pins: keys of its strides' ends, and how many chunks each has."""
        starts = range(0, num_blocks, self._stride_blocks)
        ends = [min(start + self._stride_blocks, num_blocks) for start in starts]
        return [(chain.key(end - 1), -(-(end - start) // self._blocks_per_chunk)) for start, end in zip(starts, ends, strict=True)]

    def num_with(self, strides: list[tuple[bytes, int]]) -> int:
        """How many it would be with these."""
        return self.num_chunks + sum(num for key, num in strides if key not in self._num_users)

    def add(self, lease: Lease) -> None:
        self.leases[lease] = None
        for key, num in lease.strides:
            before = self._num_users.get(key, 0)
            self._num_users[key] = before + 1
            self.num_chunks += 0 if before else num

    def remove(self, lease: Lease) -> None:
        del self.leases[lease]
        for key, num in lease.strides:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key]
                self.num_chunks -= num


class Lease:
    """A store's lease on a prefix of ``num_tokens``, and what it pins, counted in ``pins`` until it is released."""

    def __init__(self, tracker: Tracker, lease: ReadLease | GroupLease, pins: Pins, num_tokens: int, num_blocks: int) -> None:
        self.tracker, self.num_tokens = tracker, num_tokens
        self.strides = pins.strides(tracker.chain, num_blocks)
        self.poll = lease.poll
        self.batch: Callable[[Any, int, int], tuple[ChunkBatch | GroupBatches, dict[str, int]]] = lease.batch
        self._lease, self._pins = lease, pins
        pins.add(self)

    def count_in(self, pins: Pins) -> None:
        """Count what it pins there from now on."""
        self._pins.remove(self)
        self._pins = pins
        pins.add(self)

    def release(self) -> None:
        """Unpin; only once."""
        self._pins.remove(self)
        self._lease.release()
