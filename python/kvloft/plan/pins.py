"""How much of host memory requests pin. A prefix that several of them share counts once.

Counted in strides of chunks: the key at a stride's end names all that comes before it. It must not know leases.
"""

from __future__ import annotations

from typing import NamedTuple

from kvloft.seam.store import KeyChain

MAX_STRIDE = 16


def stride_of(num_frames: int) -> int:
    """Chunks in a stride. What is left behind the last one counts for each request, so small memories need short ones."""
    return max(1, min(MAX_STRIDE, num_frames // 64))


class Pins(NamedTuple):
    """What one request pins: keys of its strides' ends, and chunks behind them."""

    keys: tuple[bytes, ...]
    num_left: int


class PinCount:
    """Chunks that some requests pin, each once, by ``stride`` chunks at a time."""

    def __init__(self, stride: int, blocks_per_chunk: int) -> None:
        self._stride = stride
        self._blocks_per_chunk = blocks_per_chunk
        self._num_users: dict[bytes, int] = {}
        self._num_left = 0

    @property
    def num_chunks(self) -> int:
        """Pinned now."""
        return len(self._num_users) * self._stride + self._num_left

    def pins_of(self, chain: KeyChain, num_blocks: int) -> Pins:
        """What a lease on the first ``num_blocks`` of ``chain`` pins."""
        size = self._stride * self._blocks_per_chunk
        keys = tuple([chain.key(end - 1) for end in range(size, num_blocks + 1, size)])
        return Pins(keys, -(-num_blocks // self._blocks_per_chunk) - len(keys) * self._stride)

    def num_with(self, pins: Pins) -> int:
        """How many it would be with these."""
        return self.num_chunks + self._stride * sum(key not in self._num_users for key in pins.keys) + pins.num_left

    def add(self, pins: Pins) -> None:
        """Count them until they are removed."""
        for key in pins.keys:
            self._num_users[key] = self._num_users.get(key, 0) + 1
        self._num_left += pins.num_left

    def remove(self, pins: Pins) -> None:
        """Their lease fell."""
        for key in pins.keys:
            if self._num_users[key] == 1:
                del self._num_users[key]
            else:
                self._num_users[key] -= 1
        self._num_left -= pins.num_left
