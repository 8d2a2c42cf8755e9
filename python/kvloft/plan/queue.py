"""Lookups of requests that wait to be admitted: what is offered, who waits for what, and who may pin host memory meanwhile.

An offer pins the frames behind it, so that what was offered can be delivered; the pins belong to the tracker and fall with the
next offer, the admission, the request's end, or after ``LEASE_S`` without being asked (I5, I9). vLLM asks in its queue's order,
every step as far as it gets, and a request that is told "ask again" is passed by others. So nothing else keeps the order here:
what is on disk is read for the first that asks, then for those behind it as long as all of them pin half of the frames at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvloft.plan.flights import Flights
from kvloft.plan.pins import PinBudget, Pins
from kvloft.plan.tracker import Tracker
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Store

LEASE_S = 60.0
"""How long a lease may live without its request being asked about again."""

FIRST_LOOK_TOKENS, LOOK_FURTHER = 2048, 4
"""So many tokens get keys for the first lookup, and so many times more for the next. Of a prompt that nobody has seen the first
chunk says all, and its first forward waits for the keys."""


class Queue:
    """Requests that vLLM has not admitted. ``flights`` None: vLLM shares no blocks between requests, so none waits for another's."""

    def __init__(
        self, store: Store, shape: CacheShape, *, wait_s: float, clock: Callable[[], float], num_frames: int | None, flights: Flights | None
    ) -> None:
        self._store = store
        self._block_tokens = shape.full.block_tokens
        self._blocks_per_chunk = shape.full.blocks_per_chunk
        self._wait_s = wait_s
        self._clock = clock
        self._flights = flights
        self.budget = PinBudget(num_frames, self._blocks_per_chunk)
        self.leased: dict[ReqId, Tracker] = {}
        self.told_to_wait: dict[ReqId, Tracker] = {}
        self._step = 0
        self._first: Tracker | None = None
        """The first in this step that waits with pins, or for them."""
        self._without_turn: Tracker | None = None
        """The first in this step that must wait until others pin less: those behind it wait, too."""
        self._no_turns_until_s = float("-inf")
        """The disk did not keep up: until then none waits for its turn, for it would wait as long as all before it."""
        self._next_expiry_s = float("-inf")

    # -- asking ---------------------------------------------------------------------------------------------------

    def still_waits(self, req_id: ReqId, local_tokens: int) -> bool:
        """Whether the last answer was "ask again", and it would be again. Thousands are asked about in every step."""
        tracker = self.told_to_wait.get(req_id)
        if tracker is None:
            return False
        lease, flight = tracker.lease, tracker.flight
        if lease is None and flight is None:
            return self._without_turn not in (None, tracker)
        now = self._clock()
        if lease is not None:
            tracker.asked_s, tracker.asked_step = now, self._step
            if self._first is None:
                self._first = tracker
        if flight is not None:
            is_same = not flight.has_ended and tracker.local_tokens == local_tokens
        else:
            is_same = lease is not None and lease.poll()[1] > 0
        return is_same and tracker.waiting_since is not None and now - tracker.waiting_since < self._wait_s

    def match(self, tracker: Tracker, local_tokens: int, *, may_wait: bool) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded now; None means ask again, for ``wait_s`` at most once it has its turn.

        May be called any number of times and its answer dropped (I9).
        """
        self.told_to_wait.pop(tracker.req_id, None)
        tracker.flight = None
        num_tokens = tracker.extend_chain(FIRST_LOOK_TOKENS)
        tracker.local_tokens = local_tokens
        if tracker.lease is not None and tracker.lease_tokens != num_tokens:
            tracker.drop_lease()
        now = self._clock()
        num_offered = self._match(tracker, num_tokens, now, may_wait=may_wait)
        if num_offered is None:
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
            if stored_blocks > host_blocks and not self._has_turn(tracker, stored_blocks, now):
                if may_wait and now >= self._no_turns_until_s and self._wait_s > 0:
                    self._first, self._without_turn = self._first or tracker, self._without_turn or tracker
                    return None
                if host_blocks * self._block_tokens <= local_tokens:
                    return 0
                tracker.waited_out = True
            self._acquire(tracker, num_tokens, stored_blocks)
        assert tracker.lease is not None
        tracker.asked_s, tracker.asked_step = now, self._step
        ready_blocks, pending_blocks = tracker.lease.poll()
        if pending_blocks and may_wait:
            if self._has_time(tracker, now):
                self._first = self._first or tracker
                return None
            self._no_turns_until_s = now + self._wait_s
        offered = ready_blocks * self._block_tokens - local_tokens
        if offered <= 0:
            if not pending_blocks:
                tracker.drop_lease()
            return 0
        if may_wait and self._is_coming(tracker, num_tokens, now):
            self._first = self._first or tracker
            return None
        return offered

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
        if not self._flights or (block + 1) * self._block_tokens >= num_tokens or block >= tracker.chain.num_blocks:
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

    def _has_turn(self, tracker: Tracker, stored_blocks: int, now: float) -> bool:
        """Whether it may pin what it needs from disk. The first that asks always may, or all would wait for each other."""
        if self._without_turn not in (None, tracker):
            return False
        is_first = self._first in (None, tracker)
        pins = self.budget.pins_of(tracker.chain, stored_blocks)
        if not self.budget.fits(pins):
            if not is_first:
                return False
            # It stands before all that are not asked now; what was read for them stays in host for a while.
            for other in list(self.leased.values()):
                if other.asked_step < self._step - 1:
                    other.drop_lease()
        if self._without_turn is tracker:
            self._without_turn = None
        return True

    def _acquire(self, tracker: Tracker, num_tokens: int, stored_blocks: int) -> None:
        tracker.lease = self._store.acquire(tracker.chain)
        tracker.lease_tokens = num_tokens
        pins = self.budget.pins_of(tracker.chain, stored_blocks)
        self.budget.add(pins)
        self.leased[tracker.req_id] = tracker
        tracker.uncount_pins = partial(self._uncount, tracker.req_id, pins)

    def _uncount(self, req_id: ReqId, pins: Pins) -> None:
        self.budget.remove(pins)
        self.leased.pop(req_id, None)

    # -- steps and ends -------------------------------------------------------------------------------------------

    def next_step(self) -> None:
        """vLLM asks from the front again. Leases fall whose requests it has not asked about for long."""
        self._step += 1
        self._first = self._without_turn = None
        if self.leased and (now := self._clock()) >= self._next_expiry_s:
            self._next_expiry_s = now + LEASE_S / 8
            for tracker in [tracker for tracker in self.leased.values() if now - tracker.asked_s > LEASE_S]:
                tracker.drop_lease()

    def forget(self, req_id: ReqId) -> None:
        """It was admitted, or it ended."""
        self.told_to_wait.pop(req_id, None)

    def clear(self) -> None:
        """Unpin everything; whoever was told to wait is looked up afresh."""
        for tracker in list(self.leased.values()):
            tracker.drop_lease()
        self.told_to_wait.clear()
