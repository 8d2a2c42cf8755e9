"""Requests that wait to be admitted: what is offered, who waits for what, and who may pin host memory meanwhile.

An offer pins the frames behind it, so that what was offered can be delivered; the pins fall with the next offer, the admission,
the request's end, or after ``LEASE_S`` without being asked (I5, I9). vLLM asks in its queue's order, every step as far as it
gets, and a request that is told "ask again" is passed by others. So nothing else keeps the order here: what is on disk is read
for the first that asks, then for those behind it as long as all of them pin half of the frames at most.

Loads on their way are shared: a request that wants the same blocks waits for them, and finds them in vLLM's own cache, where
vLLM puts them when it promotes the request that waited for the load, which it does before it asks about others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvloft.plan.disk_pacing import DiskPacing, PromptLine
from kvloft.plan.pins import Lease, Pins
from kvloft.plan.room import Need, Room
from kvloft.plan.tracker import Flight, Tracker
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session

MIN_WAITING = 64
"""So many requests may wait in a step, or as many as there are seats. vLLM passes over each that waits, in every step, at some
ten microseconds: a disk that hangs would cost each step more the longer the queue is, while seats stay empty."""

LEASE_S = 60.0
"""How long a lease may live without its request being asked about again."""

FIRST_LOOK_TOKENS, LOOK_FURTHER = 512, 4
"""So many tokens get keys for the first lookup, and so many times more for the next. Of a prompt not seen before the first
chunk says all, and its first forward waits for the keys."""


@dataclass(slots=True, eq=False)
class Queue:
    """Requests that vLLM has not admitted, and what those pin and bring whose loads are in flight."""

    store: Session
    shape: CacheShape
    clock: Callable[[], float]
    wait_s: float
    num_frames: int
    """That the store can count on: beside others in one memory, those that it has, or its share."""
    shares_blocks: bool
    """vLLM shares blocks among requests; where it does not, none waits for another's load."""
    max_running: int | None
    room: Room | None = None
    """The pool's blocks, where vLLM does not keep those free that a load needs."""
    unit_tokens: int = field(init=False)
    num_running: int = 0
    step: int = 0
    pacing: DiskPacing = field(default_factory=DiskPacing)
    line: PromptLine = field(default_factory=PromptLine)
    waiting: Pins = field(init=False)
    loading: Pins = field(init=False)
    """Of loads in flight: what they leave is shared out."""
    flights: dict[ReqId, Flight] = field(default_factory=dict)
    """From a request's admission until vLLM admits it again with what was loaded, or that is known to be bad."""
    told_to_wait: dict[ReqId, Tracker] = field(default_factory=dict)
    """For the disk, for another's load, or, with neither lease nor flight, until others pin less."""
    _told: set[ReqId] = field(default_factory=set)
    """Requests that were told to wait in this step."""
    _seats_were_taken: bool = False
    """In this step, when one asked."""
    _first: Tracker | None = None
    """The first in this step that waits with pins, or for them."""
    _without_turn: ReqId | None = None
    """The first in this step that must wait until others pin less: those behind it wait, too."""
    _without_room: ReqId | None = None
    """The first in this step for whose blocks there is no room beside those of others' loads: those behind it wait, too."""
    _room_changed_s: float = float("-inf")
    _no_turns_until_s: float = float("-inf")
    """The disk did not keep up: until then none waits for its turn, for it would wait as long as all before it."""
    _next_expiry_s: float = float("-inf")

    def __post_init__(self) -> None:
        self.unit_tokens = self.shape.unit_tokens
        self.waiting = Pins(self.num_frames)
        self.loading = Pins(self.num_frames)

    # -- asking ---------------------------------------------------------------------------------------------------

    def still_waits(self, req_id: ReqId, local_tokens: int) -> bool:
        """Whether the last answer was "ask again", and it would be again. Thousands are asked about in every step."""
        tracker = self.told_to_wait.get(req_id)
        if tracker is None:
            return False
        if is_same := self._waits_as_before(tracker, local_tokens):
            self._told.add(req_id)
        return is_same

    def _waits_as_before(self, tracker: Tracker, local_tokens: int) -> bool:
        lease, flight = tracker.lease, tracker.flight
        if flight is None and self._is_crowded(tracker) and not self._seats_were_taken:
            return False
        if lease is None and flight is None:
            return self._without_turn not in (None, tracker.req_id) and self._turn_pays(tracker, self.clock())
        now = self._asked(tracker)
        if self._first is None and lease is not None:
            self._first = tracker
        if flight is not None:
            is_same = self.flights.get(flight.req_id) is flight and tracker.local_tokens == local_tokens
        else:
            is_same = lease is not None and self._disk_pays(tracker, *lease.poll(), now)
        return is_same and tracker.waiting_since is not None and now - tracker.waiting_since < self.wait_s

    def _asked(self, tracker: Tracker) -> float:
        """The time. While vLLM did not ask, because no seat was free, it was not us whom the request waited for."""
        now = self.clock()
        if tracker.waiting_since is not None and tracker.asked_step < self.step - 1:
            tracker.waiting_since += now - tracker.asked_s
        tracker.asked_s, tracker.asked_step = now, self.step
        return now

    def match(self, tracker: Tracker, local_tokens: int, *, may_wait: bool) -> int | None:
        """Tokens beyond ``local_tokens`` that can be loaded now; None means ask again, for ``wait_s`` at most once it has its turn.

        May be called any number of times and its answer dropped (I9).
        """
        self.told_to_wait.pop(tracker.req_id, None)
        tracker.flight = None
        num_tokens = tracker.extend_chain(FIRST_LOOK_TOKENS)
        tracker.local_tokens = local_tokens
        if tracker.lease is not None and tracker.lease.num_tokens != num_tokens:
            tracker.drop_lease()
        num_offered = self._match(tracker, num_tokens, self._asked(tracker), may_wait=may_wait)
        if num_offered is None:
            self.told_to_wait[tracker.req_id] = tracker
            self._told.add(tracker.req_id)
        return num_offered

    def _is_crowded(self, tracker: Tracker) -> bool:
        """Return True if enough others wait in this step: a request behind them gets what is in host memory."""
        if self.max_running is None or len(self._told) < max(MIN_WAITING, self.max_running):
            return False
        return tracker.req_id not in self._told

    def _match(self, tracker: Tracker, num_tokens: int, now: float, *, may_wait: bool) -> int | None:
        unit_tokens, local_tokens = self.unit_tokens, tracker.local_tokens
        is_crowded = self._is_crowded(tracker)
        if tracker.lease is None:
            host_units, stored_units = self._look_up(tracker)
            if stored_units * unit_tokens <= local_tokens:
                return 0
            if may_wait and self._is_coming(tracker, num_tokens, now):
                return None
            must_wait = may_wait and self._seats_are_taken(now)
            tracker.num_on_disk = self._num_chunks(stored_units - max(host_units, local_tokens // unit_tokens))
            pays = not is_crowded and tracker.num_on_disk > 0 and self._turn_pays(tracker, now)
            can_probe = may_wait and not is_crowded and self.pacing.is_disk_idle
            may_read = self._has_turn(tracker, stored_units) if pays else can_probe
            if must_wait or (stored_units > host_units and not may_read):
                if must_wait or (may_wait and pays and now >= self._no_turns_until_s and self.wait_s > 0):
                    self._first, self._without_turn = self._first or tracker, self._without_turn or tracker.req_id
                    return None
                if host_units * unit_tokens <= local_tokens:
                    return 0
                tracker.waited_out = tracker.waited_out or pays
            acquired = self.store.acquire(tracker.chain, stored_units)
            tracker.lease = Lease(tracker, acquired, self.waiting, num_tokens, stored_units)
            tracker.reads_end = self.pacing.observe_reads_wanted(tracker.num_on_disk)
        ready_units, pending_units = tracker.lease.poll()
        if pending_units:
            self._first = self._first or tracker
            pays = not is_crowded and self._disk_pays(tracker, ready_units, pending_units, now)
            if may_wait and pays and self._has_time(tracker, now):
                return None
            if may_wait and pays:
                self._no_turns_until_s = now + self.wait_s
        offered = ready_units * unit_tokens - local_tokens
        if offered <= 0:
            if not pending_units:
                tracker.drop_lease()
            return 0
        if may_wait and (self._is_coming(tracker, num_tokens, now) or self._seats_are_taken(now)):
            self._first = self._first or tracker
            return None
        if self._lacks_room(tracker, num_tokens, ready_units * unit_tokens):
            # Whose load hangs keeps its blocks, and then it is better to compute.
            if may_wait and now - self._room_changed_s < self.wait_s:
                self._first = self._first or tracker
                return None
            tracker.drop_lease()
            return 0
        return offered

    def _look_up(self, tracker: Tracker) -> tuple[int, int]:
        """Return the deepest hits in host memory and in any tier, in units. Keys are made little further than they are found."""
        limit = FIRST_LOOK_TOKENS
        while True:
            known = tracker.extend_chain(limit)
            host_units, stored_units = self.store.lookup(tracker.chain)
            # What ends before the chain does ends there with a longer chain, too.
            if stored_units < tracker.chain.num_blocks or tracker.chain.num_tokens >= known:
                break
            limit *= LOOK_FURTHER
        if self.shape.is_divisible:
            return host_units, stored_units
        most = self._most(known)
        return self.store.deepest_hit(tracker.chain, min(host_units, most), min(stored_units, most))

    def _most(self, num_tokens: int) -> int:
        """Units of the deepest hit: with windows and states vLLM cannot go back a token to have one to compute."""
        return (num_tokens - 1) // self.unit_tokens

    def _is_coming(self, tracker: Tracker, num_tokens: int, now: float) -> bool:
        """Whether another request's load brings the first block that this one lacks, and vLLM will share it."""
        chain, block = tracker.chain, tracker.local_tokens // self.unit_tokens
        last = block + (self.shape.lookahead > 0)
        # vLLM computes the last token itself, so its own hits end before it.
        if not self.shares_blocks or (last + 1) * self.unit_tokens >= num_tokens or last >= chain.num_blocks:
            return False
        for flight in self.flights.values():  # keys cover all that comes before a block
            if flight.begin <= block and last < flight.end and flight.chain.key(last) == chain.key(last):
                tracker.flight = flight if self._has_time(tracker, now) else None
                break
        return tracker.flight is not None

    def _has_time(self, tracker: Tracker, now: float) -> bool:
        if tracker.waiting_since is None:
            tracker.waiting_since = now
        tracker.waited_out = tracker.waited_out or now - tracker.waiting_since >= self.wait_s
        return not tracker.waited_out

    # -- disk -----------------------------------------------------------------------------------------------------

    def _num_chunks(self, num_units: int) -> int:
        """Chunks of so many units, at most: windows need fewer."""
        return max(0, num_units) * len(self.shape.groups)

    def _turn_pays(self, tracker: Tracker, now: float) -> bool:
        """Whether it pays to wait for chunks whose reads have not been started, behind all that have."""
        return self._pays(tracker, tracker.num_on_disk, None, now)

    def _disk_pays(self, tracker: Tracker, ready_units: int, pending_units: int, now: float) -> bool:
        """Whether it pays to wait for the rest of a lease."""
        missing = pending_units + min(0, ready_units - tracker.local_tokens // self.unit_tokens)
        return missing > 0 and self._pays(tracker, self._num_chunks(missing), tracker.reads_end, now)

    def _pays(self, tracker: Tracker, num_chunks: int, reads_end: int | None, now: float) -> bool:
        pacing = self.pacing
        if pacing.is_sample_due(now):
            pacing.observe_disk(now, self.store.stats())
        if tracker.turn_at_s is None:
            tracker.turn_at_s = now + (pacing.expected_compute_s(self.line.num_tokens) or 0.0)
        num_ahead = pacing.num_pending
        if reads_end is not None:
            num_ahead = max(0, min(num_ahead, reads_end - pacing.num_done) - num_chunks)
        num_tokens = num_chunks // len(self.shape.groups) * self.unit_tokens
        line_s = max(0.0, tracker.turn_at_s - now)
        return pacing.pays(now, num_ahead=num_ahead, num_chunks=num_chunks, num_tokens=num_tokens, line_s=line_s)

    # -- turns ----------------------------------------------------------------------------------------------------

    def _seats_are_taken(self, now: float) -> bool:
        """Whether requests that load will take all seats. More loads would only hold blocks, which vLLM then takes from those that
        run: it cannot preempt a load. Some are loaded ahead, so that no seat stays empty for one; one that hangs takes none.
        """
        if self.max_running is None:
            return False
        num_loading = sum(flight.began_s >= now - self.wait_s for flight in self.flights.values())
        self._seats_were_taken = self.num_running + num_loading >= self.max_running + max(1, self.max_running // 8)
        return self._seats_were_taken

    def _has_turn(self, tracker: Tracker, stored_units: int) -> bool:
        """Whether it may pin what it needs from disk. The first that asks always may, or all would wait for each other."""
        if self._without_turn not in (None, tracker.req_id):
            return False
        is_first = self._first in (None, tracker)
        if not is_first and self.waiting.num_with(self.waiting.strides(tracker.chain, stored_units)) > self._max_pinned:
            return False
        self._without_turn = None
        return True

    @property
    def _max_pinned(self) -> int:
        """Of all frames, also those that are not pinned by a GPU's driver: what is read from disk takes any."""
        return max(0, self.num_frames - self.loading.num_chunks) // 2

    def _lacks_room(self, tracker: Tracker, num_tokens: int, loaded_tokens: int) -> bool:
        if self.room is None:
            return False
        has_turn = self._without_room in (None, tracker.req_id)
        if has_turn and self.room.has(self._need(tracker, num_tokens, loaded_tokens)):
            return False
        self._without_room = self._without_room or tracker.req_id
        return True

    def _need(self, tracker: Tracker, num_tokens: int, loaded_tokens: int) -> Need:
        assert self.room is not None
        return self.room.need(tracker.chain, num_tokens, tracker.local_tokens, loaded_tokens)

    # -- loads, steps and ends ------------------------------------------------------------------------------------

    def begin_load(self, tracker: Tracker, lease: Lease, num_tokens: int, *, is_whole: bool) -> None:
        """What was offered is being loaded, and pinned until that ends. Unless it ``is_whole``, none waits for it."""
        lease.count_in(self.loading)
        if is_whole:
            begin = tracker.local_tokens // self.unit_tokens
            end = begin + num_tokens // self.unit_tokens
            self.flights[tracker.req_id] = Flight(tracker.req_id, tracker.chain, begin, end, self.clock())

    def hold(self, tracker: Tracker, num_tokens: int) -> None:
        """It was given blocks for a load of so many tokens, and keeps them until vLLM admits it again."""
        if self.room is not None:
            self.room.take(tracker.req_id, self._need(tracker, tracker.num_confirmed, tracker.local_tokens + num_tokens))
            self._room_changed_s = self.clock()

    def next_step(self) -> None:
        """vLLM asks from the front again. Leases fall whose requests it has not asked about for long."""
        if self.waiting.num_chunks > self._max_pinned:  # the first that asked needed much: those whom vLLM passes over give way
            self._drop_leases(lambda tracker: tracker.asked_step < self.step)
        self.step += 1
        self._first = self._without_turn = self._without_room = None
        self._told.clear()
        self._seats_were_taken = False
        if self.waiting.leases and (now := self.clock()) >= self._next_expiry_s:
            self._next_expiry_s = now + LEASE_S / 8
            self._drop_leases(lambda tracker: now - tracker.asked_s > LEASE_S)

    def _drop_leases(self, falls: Callable[[Tracker], bool]) -> None:
        for tracker in [lease.tracker for lease in self.waiting.leases]:
            if falls(tracker):
                tracker.drop_lease()
                self.told_to_wait.pop(tracker.req_id, None)  # it is looked up afresh, and its time goes on

    def forget(self, req_id: ReqId) -> None:
        """It was admitted, or it ended."""
        self.line.leave(req_id)
        self.told_to_wait.pop(req_id, None)
        self.flights.pop(req_id, None)
        if self.room is not None and self.room.give_back(req_id):
            self._room_changed_s = self.clock()

    def clear(self) -> None:
        """Unpin what requests wait with; requests that were told to wait are looked up afresh."""
        self._drop_leases(lambda _: True)
        self.told_to_wait.clear()
