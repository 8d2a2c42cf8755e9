"""Leases of requests, and how many frames they pin. A prefix that several requests share counts
once.

Counted in strides of units: the key at the end of a stride identifies the whole prefix. Limits are
decided elsewhere (`ReadTurns`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvloft.seam.ids import ReqId
from kvloft.seam.store import KeyChain, ReadLease

MAX_STRIDE = 16

Strides = dict[bytes, int]
"""Units, or blocks, by the key at the end of each stride."""


class StrideCounts:
    """Strides with one or more users, and their ``total`` units, each counted once.

    Loads and lookups wait for it with hundreds of strides, hence the operations on whole sets.
    """

    def __init__(self, max_units: int) -> None:
        """``max_units``: about the largest total."""
        self._stride = max(1, min(MAX_STRIDE, max_units // 64))
        self._used: set[bytes] = set()
        self._more_users: Counter[bytes] = Counter()
        """Number of users without the first one, of strides with several."""
        self.total = 0

    def strides(self, chain: KeyChain, num_units: int) -> Strides:
        """Return the strides of the first ``num_units`` of ``chain``."""
        starts = range(0, num_units, self._stride)
        ends = [min(start + self._stride, num_units) for start in starts]
        return {chain.key(end - 1): end - start for start, end in zip(starts, ends, strict=True)}

    def total_with(self, strides: Strides) -> int:
        """Return the total with ``strides`` added."""
        return self.total + _total(strides) - _total(strides, strides.keys() & self._used)

    def add(self, strides: Strides) -> None:
        """Count one user of ``strides``."""
        self.total = self.total_with(strides)
        self._more_users.update(strides.keys() & self._used)
        self._used.update(strides)

    def remove(self, strides: Strides) -> None:
        """Count off one user of ``strides``."""
        shared = strides.keys() & self._more_users.keys()
        self.total -= _total(strides) - _total(strides, shared)
        self._used.difference_update(strides.keys() - shared if shared else strides)
        for key in shared:
            self._more_users[key] -= 1
            if not self._more_users[key]:
                del self._more_users[key]


def _total(strides: Strides, keys: Collection[bytes] | None = None) -> int:
    return sum(strides.values() if keys is None else map(strides.__getitem__, keys))


class PinnedFrames:
    """Counts the units that a set of leases pins, each unit once."""

    def __init__(self, max_units: int) -> None:
        self._counts = StrideCounts(max_units)
        self.strides, self.num_with = self._counts.strides, self._counts.total_with
        self.leases: dict[Lease, None] = {}

    @property
    def num_units(self) -> int:
        return self._counts.total

    def add(self, lease: Lease) -> None:
        self.leases[lease] = None
        self._counts.add(lease.strides)

    def remove(self, lease: Lease) -> None:
        del self.leases[lease]
        self._counts.remove(lease.strides)


class Lease:
    """A request's lease on a prefix, counted in a `PinnedFrames` until it is released.

    ``num_tokens``: length of the request when the lease was taken.
    """

    def __init__(
        self,
        req_id: ReqId,
        lease: ReadLease,
        pinned: PinnedFrames,
        strides: Strides,
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
