"""Makes kvloft's real Session deterministic: the machine decides when disk reads complete, and the
ledger records lost chunks.

All calls go to the real store. This module must not import vLLM.
"""

import random
from collections.abc import Sequence
from typing import Any

from .ledger import Ledger


class SteadyLease:
    """A real lease that reports chunks from disk as pending for ``patience`` polls, then as
    ready.
    """

    def __init__(self, store: "SteadyStore", lease: Any, host: int, patience: int) -> None:
        self._store, self._lease, self._host, self._patience = store, lease, host, patience

    def poll(self) -> tuple[int, int]:
        if not self._store.is_kind and self._patience:
            self._patience -= 1
            ready, pending = self._lease.poll()
            return min(self._host, ready), ready + pending - min(self._host, ready)
        for _ in range(200_000):
            ready, pending = self._lease.poll()
            if not pending:
                break
        return ready, pending

    def batch(self, tables: Sequence[Sequence[int]], begin: int, end: int) -> Any:
        return self._lease.batch(tables, begin, end)

    def release(self) -> None:
        self._lease.release()


class SteadyStore:
    """Wraps ``kvloft._core.Session``, which does all the work.

    ``patience`` is the number of polls after which a disk read completes.
    """

    def __init__(
        self, session: Any, ledger: Ledger, groups: Sequence[Any], *, has_disk: bool
    ) -> None:
        self.session, self.groups = session, groups
        self._ledger, self._has_disk = ledger, has_disk
        self.patience = 0
        self.is_kind = False
        """True if reads complete immediately."""
        self.keys: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def settle_disk(self) -> None:
        """Wait for all disk writes so that the set of evictable chunks does not depend on the
        timing of threads.
        """
        if self._has_disk:
            assert self.session.flush(30.0), "the disk does not become idle"

    def deepest_hit(self, chain: Any, host_units: int, stored_units: int) -> Any:
        return self.session.deepest_hit(chain, host_units, stored_units)

    def acquire(self, chain: Any, num_units: int) -> SteadyLease:
        """Acquire a lease.

        With multiple groups, all chunks are needed at the same time, so the lease waits until all
        of its chunks are in host memory.
        """
        self.settle_disk()
        host, _ = self.session.lookup(chain)
        if len(self.groups) > 1 or self.groups[0][1] != "full":
            deepest, _ = self.session.deepest_hit(chain, min(host, num_units), min(host, num_units))
            host = num_units if deepest == num_units else 0
        return SteadyLease(self, self.session.acquire(chain, num_units), host, self.patience)

    def reserve(self, rows: Sequence[Any]) -> tuple[list[Any], list[int]]:
        self.settle_disk()
        reserved, dropped = self.session.reserve(rows)
        for chunks, num_dropped in zip(reserved, dropped, strict=True):
            self._note(chunks or (), num_dropped)
        return reserved, dropped

    def reserve_states(self, rows: Sequence[tuple[Any, int, int, int]]) -> Any:
        self.settle_disk()
        reserved = self.session.reserve_states(rows)
        for chunks in reserved:
            self._note(chunks or (), 0)
        return reserved

    def _note(self, chunks: Any, num_dropped: int) -> None:
        if num_dropped:
            self._ledger.lose("a save was dropped")
        self.keys += [copy.key for copy in chunks]
        if len(self.keys) > self.session.arena_sizes[0] // max(self.session.frame_sizes):
            self._ledger.lose("host memory is full")

    def discard(self, keys: Sequence[bytes]) -> int:
        self._ledger.lose("chunks were discarded")
        return int(self.session.discard(keys))

    def abort(self, tickets: Sequence[int] | None = None) -> None:
        self._ledger.lose("reservations were aborted")
        self.session.abort(tickets)

    def clear(self) -> None:
        self.session.clear()


class UnkindStore(SteadyStore):
    """A store that sometimes evicts chunks, rejects reservations and delays reads, as any store
    might at any time.
    """

    def __init__(
        self, session: Any, ledger: Ledger, groups: Sequence[Any], *, has_disk: bool
    ) -> None:
        super().__init__(session, ledger, groups, has_disk=has_disk)
        self._random = random.Random(self.session.arena_sizes[0])

    def lookup(self, chain: Any) -> Any:
        self._evict()
        return self.session.lookup(chain)

    def acquire(self, chain: Any, num_units: int) -> SteadyLease:
        self.patience = self._random.randint(0, 4)
        return super().acquire(chain, num_units)

    def reserve(self, rows: Sequence[Any]) -> tuple[list[Any], list[int]]:
        self._evict()
        reserved, dropped = super().reserve(rows)
        for nth, chunks in enumerate(reserved):
            if chunks and not self.is_kind and self._random.random() < 0.03:
                self.abort(chunks.tickets())
                reserved[nth], dropped[nth] = None, len(chunks)
        return reserved, dropped

    def _evict(self) -> None:
        if self.keys and not self.is_kind and self._random.random() < 0.05:
            self.discard([self._random.choice(self.keys)])
