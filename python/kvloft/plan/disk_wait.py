"""Decides whether a request should wait for its chunks on disk, or be computed instead.

Connects `DiskPacing`, which only estimates, with the store's counters and with the state of a
request.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloft.plan.disk_pacing import DiskPacing, PromptBacklog
from kvloft.plan.request_state import RequestState
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session


@dataclass(slots=True, eq=False)
class DiskWait:
    """The rates of disk and engine, and the prompts that the engine has yet to compute."""

    store: Session
    shape: CacheShape
    pacing: DiskPacing = field(default_factory=DiskPacing)
    backlog: PromptBacklog = field(default_factory=PromptBacklog)

    def num_chunks(self, num_units: int) -> int:
        """Return the largest number of chunks that ``num_units`` have; windows need fewer."""
        return max(0, num_units) * len(self.shape.groups)

    def pays_for_reads(self, request: RequestState, now: float) -> bool:
        """Return True if waiting pays although the request's reads have not started: they come
        after all that have.
        """
        self._sample(now)
        return self._pays(request, request.num_on_disk, self.pacing.num_pending, now)

    def pays_for_rest(
        self, request: RequestState, ready_units: int, pending_units: int, now: float
    ) -> bool:
        """Return True if waiting pays for the units of its lease that are still being read."""
        num_local = request.local_tokens // self.shape.unit_tokens
        num_missing = pending_units + min(0, ready_units - num_local)
        if num_missing <= 0:
            return False
        num_chunks, pacing = self.num_chunks(num_missing), self.pacing
        self._sample(now)
        num_left = min(pacing.num_pending, request.reads_end - pacing.num_done)
        return self._pays(request, num_chunks, max(0, num_left - num_chunks), now)

    def _sample(self, now: float) -> None:
        if self.pacing.is_sample_due(now):
            self.pacing.observe_disk(now, self.store.stats())

    def _pays(self, request: RequestState, num_chunks: int, num_ahead: int, now: float) -> bool:
        pacing = self.pacing
        if request.turn_at_s is None:
            compute_s = pacing.expected_compute_s(self.backlog.num_tokens)
            request.turn_at_s = now + (compute_s or 0.0)
        num_tokens = num_chunks // len(self.shape.groups) * self.shape.unit_tokens
        backlog_s = max(0.0, request.turn_at_s - now)
        return pacing.pays(
            now,
            num_ahead=num_ahead,
            num_chunks=num_chunks,
            num_tokens=num_tokens,
            backlog_s=backlog_s,
        )
