"""How much of host memory requests pin that vLLM has not admitted yet. A prefix that several of them share counts once.

Counted in strides of chunks: the key at a stride's end names all that comes before it. It must not know leases.
"""

from __future__ import annotations

from typing import NamedTuple

from kvloft.seam.store import KeyChain

MAX_STRIDE = 16
"""Chunks in a stride, at most. What is left behind the last one counts for each request."""


class Pins(NamedTuple):
    """What one request pins: keys of its strides' ends, and chunks behind them."""

    keys: tuple[bytes, ...]
    num_left: int


class PinBudget:
    """Half of ``num_frames``; None: no limit."""

    def __init__(self, num_frames: int | None, blocks_per_chunk: int) -> None:
        self._max_chunks = None if num_frames is None else num_frames // 2
        self._stride = max(1, min(MAX_STRIDE, (num_frames or 0) // 64))
        self._blocks_per_chunk = blocks_per_chunk
        self._num_users: dict[bytes, int] = {}
        self._num_left = 0

    @property
    def num_pinned(self) -> int:
        """Chunks counted now."""
        return len(self._num_users) * self._stride + self._num_left

    def pins_of(self, chain: KeyChain, num_blocks: int) -> Pins:
        """What a lease on the first ``num_blocks`` of ``chain`` would pin."""
        num_chunks = -(-num_blocks // self._blocks_per_chunk)
        size = self._stride * self._blocks_per_chunk
        keys = tuple([chain.key(end - 1) for end in range(size, num_blocks + 1, size)])
        return Pins(keys, num_chunks - len(keys) * self._stride)

    def fits(self, pins: Pins) -> bool:
        """Whether there is room for them."""
        if self._max_chunks is None:
            return True
        num_new = sum(key not in self._num_users for key in pins.keys)
        return self.num_pinned + num_new * self._stride + pins.num_left <= self._max_chunks

    def add(self, pins: Pins) -> None:
        """Count them until they are removed."""
        for key in pins.keys:
            self._num_users[key] = self._num_users.get(key, 0) + 1
        self._num_left += pins.num_left

    def remove(self, pins: Pins) -> None:
        """Their lease fell, or its request was admitted."""
        for key in pins.keys:
            if self._num_users[key] == 1:
                del self._num_users[key]
            else:
                self._num_users[key] -= 1
        self._num_left -= pins.num_left
