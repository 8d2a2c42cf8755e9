"""Lookups of requests that wait to be admitted: what is offered, who waits for what, and who may pin host memory meanwhile.

An offer pins the frames behind it, so that what was offered can be delivered; the pins belong to the tracker and fall with the
next offer, the admission, the request's end, or after ``LEASE_S`` without being asked (I5, I9). vLLM asks in its queue's order,
every step as far as it gets, and a request that is told "ask again" is passed by others. So nothing else keeps the order here:
what is on disk is read for the first that asks, then for those behind it as long as all of them pin half of the frames at most.
"""

from __future__ import annotations

from collections.abc import Callable

from kvloft.plan.flights import Flights
from kvloft.plan.pins import PinCount, Pins, stride_of
from kvloft.plan.tracker import NEVER, Tracker
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session

LEASE_S = 60.0
"""How long a lease may live without its request being asked about again."""

FIRST_LOOK_TOKENS, LOOK_FURTHER = 512, 4
"""So many tokens get keys for the first lookup, and so many times more for the next. Of a prompt that nobody has seen the first
chunk says all, and its first forward waits for the keys."""


class Queue:
    """Requests that vLLM has not admitted."""

    def __init__(
        self,
        store: Session,
        shape: CacheShape,
        *,
        wait_s: float,
        clock: Callable[[], float],
        num_frames: int | None,
        flights: Flights,
    ) -> None:
        self._store = store
        self._block_tokens = shape.block_tokens
        self._blocks_per_chunk = shape.blocks_per_chunk
        self._wait_s = wait_s
        self._clock = clock
        self._flights = flights
        self.shares_blocks = False
        """vLLM shares blocks among requests; where it does not, none waits for another's load."""
        self.max_running: int | None = None
        self.num_running = 0
        self._num_frames = NEVER if num_frames is None else num_frames
        self.waiting = PinCount(stride_of(self._num_frames), self._blocks_per_chunk)
        self.loading = PinCount(stride_of(self._num_frames), self._blocks_per_chunk)
        """Of loads in flight: what they leave is shared out."""
        self.leased: dict[ReqId, Tracker] = {}
        self.told_to_wait: dict[ReqId, Tracker] = {}
        """For the disk, or for another's load."""
        self.in_line: set[ReqId] = set()
        """Told to wait until others pin less: to ask about these must cost next to nothing."""
        self._step = 0
        self._first: Tracker | None = None
        """The first in this step that waits with pins, or for them."""
        self._without_turn: ReqId | None = None
        """The first in this step that must wait until others pin less: those behind it wait, too."""
        self._no_turns_until_s = float("-inf")
        """The disk did not keep up: until then none waits for its turn, for it would wait as long as all before it."""
        self._next_expiry_s = float("-inf")

    # -- asking ---------------------------------------------------------------------------------------------------

    def still_waits(self, req_id: ReqId, local_tokens: int) -> bool:
        """Whether the last answer was "ask again", and it would be again. Thousands are asked about in every step."""
        if req_id in self.in_line:
            return self._without_turn not in (None, req_id)
        tracker = self.told_to_wait.get(req_id)
        if tracker is None:
            return False
        lease, flight = tracker.lease, tracker.flight
        now = self._asked(tracker)
        if self._first is None and lease is not None:
            self._first = tracker
        if flight is not None:
            is_same = not flight.has_ended and tracker.local_tokens == local_tokens
        else:
            is_same = lease is not None and lease.poll()[1] > 0
        return is_same and tracker.waiting_since is not None and now - tracker.waiting_since < self._wait_s

    def _asked(self, tracker: Tracker) -> float:
        """The time. While vLLM did not ask, because no seat was free, it was not us whom the request waited for."""
        now = self._clock()
        if tracker.waiting_since is not None and tracker.asked_step < self._step - 1:
            tracker.waiting_since += now - tracker.asked_s
        tracker.asked_s, tracker.asked_step = now, self._step
        return now

    def match(self, tracker: Tracker, local_tokens: int, *, may_wait: bool) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded now; None means ask again, for ``wait_s`` at most once it has its turn.

        May be called any number of times and its answer dropped (I9).
        """
        self.forget(tracker.req_id)
        tracker.flight = None
        num_tokens = tracker.extend_chain(FIRST_LOOK_TOKENS)
        tracker.local_tokens = local_tokens
        if tracker.lease is not None and tracker.lease_tokens != num_tokens:
            tracker.drop_lease()
        num_offered = self._match(tracker, num_tokens, self._asked(tracker), may_wait=may_wait)
        if num_offered is None and tracker.lease is None and tracker.flight is None:
            self.in_line.add(tracker.req_id)
        elif num_offered is None:
            self.told_to_wait[tracker.req_id] = tracker
        return num_offered

    def _match(self, tracker: Tracker, num_tokens: int, now: float, *, may_wait: bool) -> int | None:
        local_tokens = tracker.local_tokens
        if tracker.lease is None:
            host_blocks, stored_blocks = self._look_up(tracker)
            if stored_blocks * self._block_tokens <= local_tokens:
                return 0
            if may_wait and self._is_coming(tracker, num_tokens, now):
                return None
            if may_wait and self._seats_are_taken(now):
                self._stand_in_line(tracker)
                return None
            if stored_blocks > host_blocks and not self._has_turn(tracker, stored_blocks):
                if may_wait and now >= self._no_turns_until_s and self._wait_s > 0:
                    self._stand_in_line(tracker)
                    return None
                if host_blocks * self._block_tokens <= local_tokens:
                    return 0
                tracker.waited_out = True
            self._acquire(tracker, num_tokens, stored_blocks)
        assert tracker.lease is not None
        ready_blocks, pending_blocks = tracker.lease.poll()
        if pending_blocks:
            self._first = self._first or tracker
            if may_wait and self._has_time(tracker, now):
                return None
            if may_wait:
                self._no_turns_until_s = now + self._wait_s
        offered = ready_blocks * self._block_tokens - local_tokens
        if offered <= 0:
            if not pending_blocks:
                tracker.drop_lease()
            return 0
        if may_wait and (self._is_coming(tracker, num_tokens, now) or self._seats_are_taken(now)):
            self._first = self._first or tracker
            return None
        return offered

    def _seats_are_taken(self, now: float) -> bool:
        """Whether requests that load will take all seats. More loads would only hold blocks, which vLLM then takes from those that
        run: it cannot preempt a load. Some are loaded ahead, so that no seat stays empty for one.
        """
        if self.max_running is None:
            return False
        ahead = max(1, self.max_running // 8)
        return self.num_running + self._flights.num_since(now - self._wait_s) >= self.max_running + ahead

    def _stand_in_line(self, tracker: Tracker) -> None:
        self._first, self._without_turn = self._first or tracker, self._without_turn or tracker.req_id

    def _look_up(self, tracker: Tracker) -> tuple[int, int]:
        """Blocks of the request's prefix in host, and in any tier. Keys are made as far as they are found, and somewhat further."""
        limit = FIRST_LOOK_TOKENS
        while True:
            known = tracker.extend_chain(limit)
            host_blocks, stored_blocks = self._store.lookup(tracker.chain)
            # Whatever ends before the chain's last whole chunk ends there with a longer chain, too.
            if stored_blocks + self._blocks_per_chunk <= tracker.chain.num_blocks or tracker.chain.num_tokens >= known:
                return host_blocks, stored_blocks
            limit *= LOOK_FURTHER

    def _is_coming(self, tracker: Tracker, num_tokens: int, now: float) -> bool:
        """Whether another request's load brings the first block that this one lacks, and vLLM will share it."""
        block = tracker.local_tokens // self._block_tokens
        # vLLM computes the last token itself, so its own hits end before it.
        if not self.shares_blocks or (block + 1) * self._block_tokens >= num_tokens or block >= tracker.chain.num_blocks:
            return False
        flight = self._flights.find(tracker.chain, block)
        if flight is None or not self._has_time(tracker, now):
            return False
        tracker.flight = flight
        return True

    def _has_time(self, tracker: Tracker, now: float) -> bool:
        if tracker.waiting_since is None:
            tracker.waiting_since = now
        tracker.waited_out = tracker.waited_out or now - tracker.waiting_since >= self._wait_s
        return not tracker.waited_out

    # -- pins -----------------------------------------------------------------------------------------------------

    def _has_turn(self, tracker: Tracker, stored_blocks: int) -> bool:
        """Whether it may pin what it needs from disk. The first that asks always may, or all would wait for each other."""
        if self._without_turn not in (None, tracker.req_id):
            return False
        is_first = self._first in (None, tracker)
        if not is_first and self.waiting.num_with(self.waiting.pins_of(tracker.chain, stored_blocks)) > self._max_pinned:
            return False
        self._without_turn = None
        return True

    @property
    def _max_pinned(self) -> int:
        return (self._num_frames - self.loading.num_chunks) // 2

    def _acquire(self, tracker: Tracker, num_tokens: int, stored_blocks: int) -> None:
        tracker.lease = self._store.acquire(tracker.chain)
        tracker.lease_tokens = num_tokens
        tracker.pins = self.waiting.pins_of(tracker.chain, stored_blocks)
        self.waiting.add(tracker.pins)
        self.leased[tracker.req_id] = tracker
        tracker.stop_counting = self._stop_counting

    def _stop_counting(self, tracker: Tracker) -> None:
        if tracker.pins is not None:
            self.waiting.remove(tracker.pins)
            tracker.pins = None
            self.leased.pop(tracker.req_id, None)

    def begin_load(self, tracker: Tracker) -> Pins | None:
        """It is admitted, and its load has the lease: what that pins, until the load ends."""
        pins = tracker.pins
        self._stop_counting(tracker)
        if pins is not None:
            self.loading.add(pins)
        return pins

    # -- steps and ends -------------------------------------------------------------------------------------------

    def next_step(self) -> None:
        """vLLM asks from the front again. Leases fall whose requests it has not asked about for long."""
        if self.waiting.num_chunks > self._max_pinned:  # the first that asked needed much: those whom vLLM passes over give way
            for tracker in [tracker for tracker in self.leased.values() if tracker.asked_step < self._step]:
                tracker.drop_lease()
        self._step += 1
        self._first = self._without_turn = None
        if self.leased and (now := self._clock()) >= self._next_expiry_s:
            self._next_expiry_s = now + LEASE_S / 8
            for tracker in [tracker for tracker in self.leased.values() if now - tracker.asked_s > LEASE_S]:
                tracker.drop_lease()

    def forget(self, req_id: ReqId) -> None:
        """It was admitted, or it ended."""
        self.told_to_wait.pop(req_id, None)
        self.in_line.discard(req_id)

    def clear(self) -> None:
        """Unpin everything; whoever was told to wait is looked up afresh."""
        for tracker in list(self.leased.values()):
            tracker.drop_lease()
        self.told_to_wait.clear()
        self.in_line.clear()
