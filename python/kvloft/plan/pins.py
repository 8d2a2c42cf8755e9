"""How much of host memory requests pin. A prefix that several of them share counts once.

Counted in strides of chunks: the key at a stride's end names all that comes before it. It must not know who may pin how much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvloft.seam.store import KeyChain, ReadLease

if TYPE_CHECKING:
    from kvloft.plan.tracker import Tracker

MAX_STRIDE = 16


class Pins:
    """Chunks that some leases pin, each once, by ``stride`` chunks at a time."""

    def __init__(self, num_frames: int) -> None:
        self._stride = max(1, min(MAX_STRIDE, num_frames // 64))
        self._num_users: dict[bytes, int] = {}
        self.num_chunks = 0
        """Pinned now."""
        self.leases: dict[Lease, None] = {}

    def strides(self, chain: KeyChain, num_units: int) -> list[tuple[bytes, int]]:
        """Return what a lease on the first ``num_units`` of ``chain`` pins: keys of its strides' ends, and units of each."""
        starts = range(0, num_units, self._stride)
        ends = [min(start + self._stride, num_units) for start in starts]
        return [(chain.key(end - 1), end - start) for start, end in zip(starts, ends, strict=True)]

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

    def __init__(self, tracker: Tracker, lease: ReadLease, pins: Pins, num_tokens: int, num_units: int) -> None:
        self.tracker, self.num_tokens = tracker, num_tokens
        self.strides = pins.strides(tracker.chain, num_units)
        self.poll = lease.poll
        self.batch = lease.batch
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
