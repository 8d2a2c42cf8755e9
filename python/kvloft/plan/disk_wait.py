"""Decides whether a request waits for chunks on disk or vLLM computes their tokens instead.

`DiskPacing` estimates read and compute times from the store's counters and past steps.
"""

from kvloft.plan.disk_pacing import DiskPacing, PromptBacklog
from kvloft.plan.request_state import RequestState
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session


class DiskWait:
    """Weighs reading chunks from disk against computing their tokens."""

    def __init__(self, store: Session, shape: CacheShape) -> None:
        self._store, self._num_groups = store, len(shape.groups)
        self._unit_tokens = shape.unit_tokens
        self.pacing, self.backlog = DiskPacing(), PromptBacklog()

    def num_chunks(self, num_units: int) -> int:
        """Return the maximum number of chunks in ``num_units`` units across all groups."""
        return max(0, num_units) * self._num_groups

    def pays_for_reads(self, request: RequestState, now: float) -> bool:
        """Return True if it is worth waiting for reads that are not queued yet."""
        return self._pays(request, request.num_on_disk, None, now)

    def pays_for_rest(
        self, request: RequestState, ready_units: int, pending_units: int, now: float
    ) -> bool:
        """Return True if it is worth waiting for a lease's pending reads."""
        num_local = request.local_tokens // self._unit_tokens
        num_missing = pending_units + min(0, ready_units - num_local)
        if num_missing <= 0:
            return False
        return self._pays(request, self.num_chunks(num_missing), request.reads_end, now)

    def _pays(
        self, request: RequestState, num_chunks: int, reads_end: int | None, now: float
    ) -> bool:
        """Return True if it is worth waiting for ``num_chunks`` chunks. Otherwise, set
        ``request.slow_tokens`` to the number of tokens in these chunks.

        ``reads_end`` is the `DiskPacing.num_done` value after the last read, or None if the reads
        are not queued.
        """
        pacing = self.pacing
        if pacing.is_sample_due(now):
            pacing.observe_disk(now, self._store.stats())
        if request.turn_at_s is None:
            compute_s = pacing.expected_compute_s(self.backlog.num_tokens)
            request.turn_at_s = now + (compute_s or 0.0)
        num_ahead = pacing.num_pending
        if reads_end is not None:
            num_ahead = max(0, min(num_ahead, reads_end - pacing.num_done) - num_chunks)
        num_tokens = num_chunks // self._num_groups * self._unit_tokens
        pays = pacing.pays(
            now,
            num_ahead=num_ahead,
            num_chunks=num_chunks,
            num_tokens=num_tokens,
            backlog_s=max(0.0, request.turn_at_s - now),
        )
        request.slow_tokens = 0 if pays else num_tokens
        return pays
