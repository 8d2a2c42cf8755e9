"""Leases of requests, and how many frames they pin. A prefix that several requests share counts
once.

Counted in strides of units: the key at the end of a stride identifies the whole prefix. Limits are
decided elsewhere (`ReadTurns`).
"""

from __future__ import annotations

from kvloft.seam.ids import ReqId
from kvloft.seam.store import KeyChain, ReadLease

MAX_STRIDE = 16

Stride = tuple[bytes, int]
"""The key at the end of a stride, and the number of its units."""


class PinnedFrames:
    """Counts the units that a set of leases pins, each unit once."""

    def __init__(self, num_units: int) -> None:
        self._stride = max(1, min(MAX_STRIDE, num_units // 64))
        self._num_users: dict[bytes, int] = {}
        self.num_units = 0
        self.leases: dict[Lease, None] = {}

    def strides(self, chain: KeyChain, num_units: int) -> list[Stride]:
        """Return the strides of the first ``num_units`` of ``chain``."""
        starts = range(0, num_units, self._stride)
        ends = [min(start + self._stride, num_units) for start in starts]
        return [(chain.key(end - 1), end - start) for start, end in zip(starts, ends, strict=True)]

    def num_with(self, strides: list[Stride]) -> int:
        """Return how many units would be pinned with ``strides`` added."""
        return self.num_units + sum(num for key, num in strides if key not in self._num_users)

    def add(self, lease: Lease) -> None:
        self.leases[lease] = None
        for key, num in lease.strides:
            num_before = self._num_users.get(key, 0)
            self._num_users[key] = num_before + 1
            self.num_units += 0 if num_before else num

    def remove(self, lease: Lease) -> None:
        del self.leases[lease]
        for key, num in lease.strides:
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key]
                self.num_units -= num


class Lease:
    """A request's lease on a prefix, counted in a `PinnedFrames` until it is released.

    ``num_tokens``: length of the request when the lease was taken.
    """

    def __init__(
        self,
        req_id: ReqId,
        lease: ReadLease,
        pinned: PinnedFrames,
        strides: list[Stride],
        num_tokens: int,
    ) -> None:
        self.req_id, self.num_tokens, self.strides = req_id, num_tokens, strides
        self.poll = lease.poll
        self.batch = lease.batch
        self._lease, self._pinned = lease, pinned
        pinned.add(self)

    def move_to(self, pinned: PinnedFrames) -> None:
        """Count the lease in ``pinned`` from now on."""
        self._pinned.remove(self)
        self._pinned = pinned
        pinned.add(self)

    def release(self) -> None:
        """Unpin. Called once."""
        self._pinned.remove(self)
        self._lease.release()
