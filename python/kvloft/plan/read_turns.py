"""Decides which waiting requests may pin frames and start disk reads.

Requests take turns in vLLM's queue order and may pin up to half of the memory. In every step, vLLM
calls kvloft for the waiting requests in this order, so this module keeps no queue.
"""

from kvloft.plan.leases import PinnedFrames
from kvloft.plan.request_state import RequestState
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import ArenaSpec, CacheShape


class ReadTurns:
    """The current step's turns, and the frames pinned by waiting and loading requests."""

    def __init__(self, shape: CacheShape, arena: ArenaSpec | None) -> None:
        self._unit_bytes = shape.unit_bytes
        self.num_units = 0
        """Number of units that fit into the store's memory, or its share of a shared arena."""
        self.set_memory(arena.size_bytes if arena is not None else 0)
        self.waiting = PinnedFrames(self.num_units)
        self.loading = PinnedFrames(self.num_units)
        """Frames pinned by loads in progress, which waiting requests cannot use."""
        self._first: ReqId | None = None
        """The first request in this step that waits for its turn or holds pinned frames."""
        self._blocked: ReqId | None = None
        """The first request in this step that must wait for its turn. Later requests must wait too.
        """
        self._paused_until_s = float("-inf")

    def set_memory(self, num_bytes: int) -> None:
        self.num_units = num_bytes // self._unit_bytes

    @property
    def max_waiting(self) -> int:
        """Maximum number of units that waiting requests may pin. Frames that are not registered
        with the GPU count too, because disk reads can use them.
        """
        return max(0, self.num_units - self.loading.num_units) // 2

    @property
    def is_over_limit(self) -> bool:
        """True if waiting requests pin more units than the limit allows. This can happen because
        the first request may always pin its units.
        """
        return self.waiting.num_units > self.max_waiting

    def begin_step(self) -> None:
        self._first = self._blocked = None

    def note_pinned(self, request: RequestState) -> None:
        """Record that ``request`` is waiting with pinned frames."""
        self._first = self._first or request.req_id

    def take(self, request: RequestState, stored_units: int) -> bool:
        """Return True if ``request`` may pin its units.

        The first request may always pin its units. Otherwise, all requests could wait for each
        other.
        """
        if self.is_behind(request):
            return False
        if self._first not in (None, request.req_id):
            strides = self.waiting.counts.strides(request.chain, stored_units)
            if self.waiting.counts.total_with(strides) > self.max_waiting:
                return False
        self._blocked = None
        return True

    def wait(self, request: RequestState) -> None:
        """Make ``request`` and all requests behind it wait for their turn."""
        self._first = self._first or request.req_id
        self._blocked = self._blocked or request.req_id

    def is_behind(self, request: RequestState) -> bool:
        """Return True if a request ahead of ``request`` must wait for its turn in this step."""
        return self._blocked not in (None, request.req_id)

    def pause(self, until_s: float) -> None:
        """Suspend turns until ``until_s``, so that no request waits for its turn.

        This is called when the disk is too slow. Otherwise, each request would wait for all
        requests ahead of it.
        """
        self._paused_until_s = until_s

    def are_paused(self, now: float) -> bool:
        return now < self._paused_until_s
