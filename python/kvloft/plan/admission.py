"""Admission: decides for a request that vLLM has not scheduled yet how many tokens to offer.

vLLM calls `match` for each waiting request in every step, in the order of its queue. An offer pins
its frames, so that it can be loaded; the next call, the admission, the end of the request, or
``LEASE_S`` without a call release them (I5, I9). A request waits for one of these reasons, in the
order in which they are checked:

| reason      | the request waits until                                 | at most               |
|-------------|---------------------------------------------------------|-----------------------|
| SHARED_LOAD | another load of its prefix ends; vLLM shares the blocks | ``wait_s``            |
| SLOTS       | running and loading requests leave a slot               | loads: ``wait_s``     |
| TURN        | requests ahead pin less host memory                     | `ReadTurns.pause`     |
| DISK        | its chunks are read, if that beats computing them       | ``wait_s``            |
| BLOCKS      | other loads leave GPU blocks (several KV cache groups)  | ``wait_s`` unchanged  |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvloft.plan.answers import Answer, Miss, Offer, Wait, WaitReason
from kvloft.plan.disk_wait import DiskWait
from kvloft.plan.leases import Lease
from kvloft.plan.load_gates import LoadGates
from kvloft.plan.lookup import PrefixLookup
from kvloft.plan.read_turns import ReadTurns
from kvloft.plan.request_state import RequestState
from kvloft.plan.settings import PlanSettings
from kvloft.seam.ids import ReqId
from kvloft.seam.store import Session

MIN_WAITING = 64
"""At least this many requests may wait in a step, and as many as there are running slots. vLLM
passes over each waiting request in every step, at some ten microseconds: with a disk that hangs,
the cost of a step would grow with the queue while slots stay empty.
"""

MAX_NEW_WAITING = 64
"""At most this many requests begin to wait in a step. The first lookup of a request takes some 40
microseconds; requests behind these are computed, for which the engine has time until the first
reads end.
"""

LEASE_S = 60.0
"""A lease ends after this time without a call for its request."""


class Admission:
    """Requests that vLLM has not admitted."""

    def __init__(
        self,
        store: Session,
        requests: Mapping[ReqId, RequestState],
        settings: PlanSettings,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._requests, self._clock = store, requests, clock
        self._unit_tokens = settings.shape.unit_tokens
        self._wait_s, self._max_running = settings.wait_s, settings.max_running
        self._lookup = PrefixLookup(store, settings.shape)
        self.disk = DiskWait(store, settings.shape)
        self.turns = ReadTurns(settings.shape, settings.arena)
        self.loads = LoadGates(settings, clock)
        self.step = 0
        self.waiting: dict[ReqId, RequestState] = {}
        """Requests whose last answer was Wait."""
        self._num_waited = 0
        """Requests whose last answer was Wait when this step began."""
        self._waited_now: set[ReqId] = set()
        """Requests whose answer in this step was Wait."""
        self._next_expiry_s = float("-inf")

    # -- repeated calls -------------------------------------------------------------------------

    def still_waits(self, req_id: ReqId, local_tokens: int) -> bool:
        """Return True if the last answer was Wait and `match` would return it again.

        Cheap: called for thousands of requests per step.
        """
        request = self.waiting.get(req_id)
        if request is None:
            return False
        if is_same := self._is_unchanged(request, local_tokens):
            self._waited_now.add(req_id)
        return is_same

    def _is_unchanged(self, request: RequestState, local_tokens: int) -> bool:
        lease, awaited = request.lease, request.awaited
        if awaited is None and self._is_crowded(request) and not self.loads.slots_were_taken:
            return False
        if lease is None and awaited is None:
            is_behind = self.turns.is_behind(request)
            return is_behind and self.disk.pays_for_reads(request, self._clock())
        now = self._record_call(request)
        if lease is not None:
            self.turns.note_pinned(request)
        if awaited is not None:
            is_same = self.loads.still_comes(awaited) and request.local_tokens == local_tokens
        else:
            assert lease is not None
            is_same = self.disk.pays_for_rest(request, *lease.poll(), now)
        since = request.waiting_since
        return is_same and since is not None and now - since < self._wait_s

    def _record_call(self, request: RequestState) -> float:
        """Return the time. Steps in which vLLM had no slot, and so did not call, do not count as
        waiting time.
        """
        now = self._clock()
        if request.waiting_since is not None and request.asked_step < self.step - 1:
            request.waiting_since += now - request.asked_s
        request.asked_s, request.asked_step = now, self.step
        return now

    def _is_crowded(self, request: RequestState) -> bool:
        """Return True if enough other requests wait in this step: this one must not."""
        if self._max_running is None:
            return False
        limit = min(max(MIN_WAITING, self._max_running), self._num_waited + MAX_NEW_WAITING)
        return len(self._waited_now) >= limit and request.req_id not in self._waited_now

    # -- matching -------------------------------------------------------------------------------

    def match(self, request: RequestState, local_tokens: int, *, may_wait: bool) -> Answer:
        """Return what can be loaded after ``local_tokens``.

        The call can be repeated and its answer dropped (I9). A request that may not wait is offered
        the chunks in host memory now.
        """
        self.waiting.pop(request.req_id, None)
        request.awaited, request.slow_tokens = None, 0
        num_tokens = self._lookup.begin(request)
        request.local_tokens = local_tokens
        if request.lease is not None and request.lease.num_tokens != num_tokens:
            request.drop_lease()
        now = self._record_call(request)
        answer: Answer | Lease = request.lease or self._acquire(request, now, may_wait=may_wait)
        if isinstance(answer, Lease):
            answer = self._offer(request, answer, now, may_wait=may_wait)
        if isinstance(answer, Wait):
            self.waiting[request.req_id] = request
            self._waited_now.add(request.req_id)
        return answer

    def _acquire(self, request: RequestState, now: float, *, may_wait: bool) -> Lease | Wait | Miss:
        """Pin the stored units of a request without a lease, or return why it gets none."""
        local_tokens, unit_tokens = request.local_tokens, self._unit_tokens
        host_units, stored_units = self._lookup.find(request, request.num_confirmed)
        if stored_units * unit_tokens <= local_tokens:
            return Miss()
        if may_wait and self._awaits_load(request, now):
            return Wait(WaitReason.SHARED_LOAD)
        num_missing = stored_units - max(host_units, local_tokens // unit_tokens)
        request.num_on_disk = self.disk.num_chunks(num_missing)
        is_crowded = self._is_crowded(request)
        pays = request.num_on_disk > 0 and not is_crowded
        pays = pays and self.disk.pays_for_reads(request, now)
        if may_wait and self.loads.are_slots_taken(now):
            self.turns.wait(request)
            return Wait(WaitReason.SLOTS)
        if stored_units > host_units:
            if pays:
                may_read = self.turns.take(request, stored_units)
            else:  # only while the disk is idle, which measures its rate
                may_read = may_wait and not is_crowded and self.disk.pacing.is_disk_idle
            if not may_read:
                if pays and may_wait and self._awaits_turn(request, now):
                    return Wait(WaitReason.TURN)
                if host_units * unit_tokens <= local_tokens:
                    return Miss()
                request.waited_out |= pays
        return self._pin(request, stored_units)

    def _pin(self, request: RequestState, stored_units: int) -> Lease:
        pinned = self.turns.waiting
        lease = self._store.acquire(request.chain, stored_units)
        strides = pinned.strides(request.chain, stored_units)
        request.lease = Lease(request.req_id, lease, pinned, strides, request.num_confirmed)
        request.reads_end = self.disk.pacing.observe_reads_wanted(request.num_on_disk)
        return request.lease

    def _offer(self, request: RequestState, lease: Lease, now: float, *, may_wait: bool) -> Answer:
        """Return what of the lease can be loaded now, or why the request waits with it."""
        ready_units, pending_units = lease.poll()
        if pending_units:
            self.turns.note_pinned(request)
            pays = not self._is_crowded(request)
            pays = pays and self.disk.pays_for_rest(request, ready_units, pending_units, now)
            if may_wait and pays and self._awaits_disk(request, now):
                return Wait(WaitReason.DISK)
        ready_tokens = ready_units * self._unit_tokens
        if ready_tokens <= request.local_tokens:
            if not pending_units:
                request.drop_lease()
            return Miss()
        reason = self._reason_not_to_load(request, ready_tokens, now, may_wait=may_wait)
        if reason is None:
            return Offer(ready_tokens - request.local_tokens)
        # If the loads that hold the blocks hang, it is better to compute.
        awaits_blocks = may_wait and self.loads.expects_blocks(now)
        if reason is WaitReason.BLOCKS and not awaits_blocks:
            request.drop_lease()
            return Miss()
        self.turns.note_pinned(request)
        return Wait(reason)

    def _reason_not_to_load(
        self, request: RequestState, ready_tokens: int, now: float, *, may_wait: bool
    ) -> WaitReason | None:
        if may_wait and self._awaits_load(request, now):
            return WaitReason.SHARED_LOAD
        if may_wait and self.loads.are_slots_taken(now):
            return WaitReason.SLOTS
        if self.loads.lacks_blocks(request, request.num_confirmed, ready_tokens):
            return WaitReason.BLOCKS
        return None

    # -- waiting --------------------------------------------------------------------------------

    def _awaits_load(self, request: RequestState, now: float) -> bool:
        units = self.loads.incoming_for(request, request.num_confirmed)
        if units is None or not request.has_time(now, self._wait_s):
            return False
        request.awaited = units
        return True

    def _awaits_turn(self, request: RequestState, now: float) -> bool:
        if self._wait_s <= 0 or self.turns.are_paused(now):
            return False
        self.turns.wait(request)
        return True

    def _awaits_disk(self, request: RequestState, now: float) -> bool:
        """Return True if the request has time to wait for its reads. If it has waited too long, the
        disk does not keep up, and turns are paused.
        """
        if request.has_time(now, self._wait_s):
            return True
        self.turns.pause(now + self._wait_s)
        return False

    # -- steps and ends -------------------------------------------------------------------------

    def begin_load(
        self, request: RequestState, lease: Lease, num_tokens: int, *, is_whole: bool
    ) -> None:
        """Count an offer as a load. Others wait for it if it ``is_whole``."""
        lease.move_to(self.turns.loading)
        if is_whole:
            self.loads.begin(request, num_tokens)

    def begin_step(self) -> None:
        """Start a step: vLLM asks from the front of its queue again. Drops outdated leases."""
        if self.turns.is_over_limit:  # requests that vLLM passed over make room for the first one
            self._drop_leases(lambda request: request.asked_step < self.step)
        self.step += 1
        self.turns.begin_step()
        self.loads.begin_step()
        self._waited_now.clear()
        self._num_waited = len(self.waiting)
        if self.turns.waiting.leases and (now := self._clock()) >= self._next_expiry_s:
            self._next_expiry_s = now + LEASE_S / 8
            self._drop_leases(lambda request: now - request.asked_s > LEASE_S)

    def _drop_leases(self, is_outdated: Callable[[RequestState], bool]) -> None:
        req_ids = [lease.req_id for lease in self.turns.waiting.leases]
        requests = filter(None, map(self._requests.get, req_ids))
        for request in filter(is_outdated, requests):
            request.drop_lease()
            self.waiting.pop(request.req_id, None)  # it is looked up again; its waiting time counts

    def forget(self, req_id: ReqId) -> None:
        """Drop the state of a request that was admitted or finished."""
        self.disk.backlog.leave(req_id)
        self.waiting.pop(req_id, None)
        self.loads.end(req_id)

    def release_all(self) -> None:
        """Release all leases of waiting requests; each request is looked up again."""
        self._drop_leases(lambda _: True)
        self.waiting.clear()

    def close(self) -> None:
        """Forget all requests and loads."""
        self.release_all()
        self.loads.incoming.clear()
