"""Which waiting requests may pin frames and start disk reads: in vLLM's order, up to half of
memory.

vLLM asks in the order of its queue, in every step as far as it gets, and passes over a request that
waits. The order is therefore that of the calls in one step; nothing else is stored.
"""

from kvloft.plan.leases import PinnedFrames
from kvloft.plan.request_state import RequestState
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import ArenaSpec, CacheShape


class ReadTurns:
    """Turns of one step, and the frames that waiting and loading requests pin."""

    def __init__(self, shape: CacheShape, arena: ArenaSpec | None) -> None:
        self._unit_bytes = shape.unit_bytes
        self.num_units = 0
        """Units for which the store, or its share of a shared arena, has memory."""
        self.set_memory(arena.size_bytes if arena is not None else 0)
        self.waiting = PinnedFrames(self.num_units)
        self.loading = PinnedFrames(self.num_units)
        """Frames of loads in progress, which waiting requests cannot use."""
        self._first: ReqId | None = None
        """The first request of this step that waits with frames pinned, or for its turn."""
        self._blocked: ReqId | None = None
        """The first request of this step without a turn: those behind it have none either."""
        self._paused_until_s = float("-inf")

    def set_memory(self, num_bytes: int) -> None:
        """Set the number of bytes that the store can use."""
        self.num_units = num_bytes // self._unit_bytes

    @property
    def max_waiting(self) -> int:
        """Units that waiting requests may pin. Reads use any frame, also one that is not registered
        with the GPU.
        """
        return max(0, self.num_units - self.loading.num_units) // 2

    @property
    def is_over_limit(self) -> bool:
        """True if waiting requests pin more than they may, because the first one always can."""
        return self.waiting.num_units > self.max_waiting

    def begin_step(self) -> None:
        self._first = self._blocked = None

    def note_pinned(self, request: RequestState) -> None:
        """Record that ``request`` waits with frames pinned."""
        self._first = self._first or request.req_id

    def take(self, request: RequestState, stored_units: int) -> bool:
        """Return True if ``request`` may pin its units. The first one always may; otherwise all
        could wait for each other.
        """
        if self.is_behind(request):
            return False
        if self._first not in (None, request.req_id):
            strides = self.waiting.strides(request.chain, stored_units)
            if self.waiting.num_with(strides) > self.max_waiting:
                return False
        self._blocked = None
        return True

    def wait(self, request: RequestState) -> None:
        """Let ``request`` wait for its turn, and those behind it too."""
        self._first = self._first or request.req_id
        self._blocked = self._blocked or request.req_id

    def is_behind(self, request: RequestState) -> bool:
        """Return True if a request ahead in this step has no turn."""
        return self._blocked not in (None, request.req_id)

    def pause(self, until_s: float) -> None:
        """Let no request wait for its turn until then: the disk did not deliver in time, so each
        would wait as long as all ahead of it together.
        """
        self._paused_until_s = until_s

    def are_paused(self, now: float) -> bool:
        return now < self._paused_until_s
