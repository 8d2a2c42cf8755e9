"""The leases that requests hold, and the number of units that these leases pin.

A shared prefix counts once. Units are counted in strides, because the key at the end of a stride
identifies the entire prefix. `ReadTurns` sets the limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvloft.seam.ids import ReqId
from kvloft.seam.store import KeyChain, ReadLease

MAX_STRIDE = 16

Strides = dict[bytes, int]
"""Number of units or blocks in each stride, by the stride's last key."""


class StrideCounts:
    """Counts each stride's users, and the ``total`` number of units in all used strides.

    A load or lookup can have hundreds of strides, so the methods use fast set operations.
    """

    def __init__(self, max_units: int) -> None:
        """Choose the stride length for a ``total`` of up to about ``max_units``."""
        self._stride = max(1, min(MAX_STRIDE, max_units // 64))
        self._used: set[bytes] = set()
        self._more_users: Counter[bytes] = Counter()
        """Number of users of each shared stride, minus one."""
        self.total = 0

    def strides(self, chain: KeyChain, num_units: int) -> Strides:
        """Return the strides that cover the first ``num_units`` units of ``chain``."""
        starts = range(0, num_units, self._stride)
        ends = [min(start + self._stride, num_units) for start in starts]
        return {chain.key(end - 1): end - start for start, end in zip(starts, ends, strict=True)}

    def total_with(self, strides: Strides) -> int:
        """Return the value that ``total`` would have if ``strides`` were added."""
        return self.total + _total(strides) - _total(strides, strides.keys() & self._used)

    def add(self, strides: Strides) -> None:
        """Add one user to each of ``strides``."""
        self.total = self.total_with(strides)
        self._more_users.update(strides.keys() & self._used)
        self._used.update(strides)

    def remove(self, strides: Strides) -> None:
        """Remove one user from each of ``strides``."""
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
    """A set of leases, and the number of distinct units that they pin."""

    def __init__(self, max_units: int) -> None:
        self.counts = StrideCounts(max_units)
        self.leases: dict[Lease, None] = {}

    @property
    def num_units(self) -> int:
        return self.counts.total

    def add(self, lease: Lease) -> None:
        self.leases[lease] = None
        self.counts.add(lease.strides)

    def remove(self, lease: Lease) -> None:
        del self.leases[lease]
        self.counts.remove(lease.strides)


class Lease:
    """A request's lease on a prefix. A `PinnedFrames` counts the lease until it is released.

    ``num_tokens`` is the request's length when the lease was acquired.
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
        self.store_lease, self._pinned = lease, pinned
        pinned.add(self)

    def move_to(self, pinned: PinnedFrames) -> None:
        self._pinned.remove(self)
        self._pinned = pinned
        pinned.add(self)

    def release(self) -> None:
        """Unpin the frames. Call exactly once."""
        self._pinned.remove(self)
        self.store_lease.release()
