"""Admission: decides how many tokens to offer for a request that vLLM has not scheduled yet.

vLLM calls `match` for each waiting request in every step, in queue order. An offer pins frames
until the request is looked up again, is admitted or finishes, or until ``LEASE_S`` passes without a
`match` call (I5, I9). A request can wait for these reasons:

| reason      | the request waits until                                | at most                   |
|-------------|--------------------------------------------------------|---------------------------|
| SHARED_LOAD | another load of the same prefix completes              | ``wait_s``                |
| SLOTS       | running and loading requests leave a slot free         | ``wait_s`` per load       |
| TURN        | requests ahead pin less host memory                    | until `ReadTurns.pause`   |
| DISK        | its chunks are read, if this is faster than computing  | ``wait_s``                |
| BLOCKS      | loads release GPU blocks (multiple KV cache groups)    | ``wait_s`` without change |
| FAILED_LOAD | vLLM has skipped the request once after a failed load  | one call                  |

`SchedulerCore.match` checks FAILED_LOAD, and `Admission.match` checks the rest: SHARED_LOAD, SLOTS
and TURN for a request without a lease, and DISK, SHARED_LOAD, SLOTS and BLOCKS for a request with a
lease.
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
"""Maximum number of requests that wait in a step (or vLLM's number of running slots, if larger).
Skipping a waiting request takes vLLM about ten microseconds in every step. Without a limit, a hung
disk would slow down every step as the queue grows, although slots are idle.
"""

MAX_NEW_WAITING = 64
"""Maximum number of requests that start to wait in a step. A request's first lookup takes about 40
microseconds. vLLM computes the prompts of later requests, which keeps the engine busy until the
first reads complete.
"""

LEASE_S = 60.0
"""Time in seconds after which a lease expires if vLLM does not call `match` for its request."""


class Admission:
    """Manages lookups, offers and leases for requests that vLLM has not admitted yet."""

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
        self.gates = LoadGates(settings, clock)
        self.step = 0
        self.waiting: dict[ReqId, RequestState] = {}
        """Requests for which `match` last returned Wait."""
        self._num_waited = 0
        """Number of requests that were in ``waiting`` when this step began."""
        self._waited_now: set[ReqId] = set()
        """Requests for which `match` returned Wait or `still_waits` returned True in this step."""
        self._next_expiry_s = float("-inf")

    # -- repeated calls -------------------------------------------------------------------------

    def still_waits(self, req_id: ReqId, local_tokens: int) -> bool:
        """Return True if the last result was Wait and `match` would return Wait again.

        This must be cheap, because vLLM may call it for thousands of requests per step.
        """
        request = self.waiting.get(req_id)
        if request is None:
            return False
        if still_waits := self._keep_waiting(request, local_tokens):
            self._waited_now.add(req_id)
        return still_waits

    def _keep_waiting(self, request: RequestState, local_tokens: int) -> bool:
        """Record the call. Return True if the request's reason for waiting still holds."""
        lease, awaited = request.lease, request.awaited
        if awaited is None and self._is_crowded(request) and not self.gates.slots_were_taken:
            return False
        if lease is None and awaited is None:
            is_behind = self.turns.is_behind(request)
            return is_behind and self.disk.pays_for_reads(request, self._clock())
        now = self._record_call(request)
        if lease is not None:
            self.turns.note_pinned(request)
        if awaited is not None:
            has_reason = self.gates.still_comes(awaited) and request.local_tokens == local_tokens
        else:
            assert lease is not None
            has_reason = self.disk.pays_for_rest(request, *lease.store_lease.poll(), now)
        since = request.waiting_since
        return has_reason and since is not None and now - since < self._wait_s

    def _record_call(self, request: RequestState) -> float:
        """Record a `match` call for the request, and return the current time.

        The waiting time excludes steps without such a call, in which vLLM had no free slot.
        """
        now = self._clock()
        if request.waiting_since is not None and request.asked_step < self.step - 1:
            request.waiting_since += now - request.asked_s
        request.asked_s, request.asked_step = now, self.step
        return now

    def _is_crowded(self, request: RequestState) -> bool:
        """Return True if this request must not wait, because too many are already waiting."""
        if self._max_running is None:
            return False
        limit = min(max(MIN_WAITING, self._max_running), self._num_waited + MAX_NEW_WAITING)
        return len(self._waited_now) >= limit and request.req_id not in self._waited_now

    # -- matching -------------------------------------------------------------------------------

    def match(self, request: RequestState, local_tokens: int, *, may_wait: bool) -> Answer:
        """Offer the tokens after ``local_tokens`` that can be loaded, or return Wait or Miss.

        The caller may repeat the call or ignore the result (I9). Without ``may_wait``, only chunks
        in host memory are offered.
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
        """Pin the stored units for a request that has no lease yet, or return Wait or Miss."""
        host_units, stored_units = self._lookup.find(request, request.num_confirmed)
        if stored_units * self._unit_tokens <= request.local_tokens:
            return Miss()
        answer = self._reason_not_to_pin(request, host_units, stored_units, now, may_wait=may_wait)
        return self._pin(request, stored_units) if answer is None else answer

    def _reason_not_to_pin(
        self,
        request: RequestState,
        host_units: int,
        stored_units: int,
        now: float,
        *,
        may_wait: bool,
    ) -> Wait | Miss | None:
        """Return None if the stored units may be pinned now. Otherwise, return `match`'s result."""
        local_tokens, unit_tokens = request.local_tokens, self._unit_tokens
        if may_wait and self._awaits_load(request, now):
            return Wait(WaitReason.SHARED_LOAD)
        num_missing = stored_units - max(host_units, local_tokens // unit_tokens)
        request.num_on_disk = self.disk.num_chunks(num_missing)
        pays = request.num_on_disk > 0 and not self._is_crowded(request)
        pays = pays and self.disk.pays_for_reads(request, now)
        if may_wait and self.gates.check_slots_taken(now):
            self.turns.wait(request)
            return Wait(WaitReason.SLOTS)
        if stored_units <= host_units:
            return None
        if self._may_read(request, stored_units, pays=pays, may_wait=may_wait):
            return None
        if pays and may_wait and self._awaits_turn(request, now):
            return Wait(WaitReason.TURN)
        if host_units * unit_tokens <= local_tokens:
            return Miss()
        request.waited_out |= pays
        return None

    def _may_read(
        self, request: RequestState, stored_units: int, *, pays: bool, may_wait: bool
    ) -> bool:
        """Return True if the request may start reading its chunks from disk."""
        if pays:
            return self.turns.take(request, stored_units)
        # If waiting is not worthwhile, read only to measure the rate of an idle disk.
        return may_wait and not self._is_crowded(request) and self.disk.pacing.is_disk_idle

    def _pin(self, request: RequestState, stored_units: int) -> Lease:
        pinned = self.turns.waiting
        lease = self._store.acquire(request.chain, stored_units)
        strides = pinned.counts.strides(request.chain, stored_units)
        request.lease = Lease(request.req_id, lease, pinned, strides, request.num_confirmed)
        request.reads_end = self.disk.pacing.observe_reads_wanted(request.num_on_disk)
        return request.lease

    def _offer(self, request: RequestState, lease: Lease, now: float, *, may_wait: bool) -> Answer:
        """Return the result of `match` for a request that has a lease."""
        ready_units, pending_units = lease.store_lease.poll()
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
        # If hung loads hold the blocks, compute the prompt instead of waiting.
        awaits_blocks = may_wait and self.gates.expects_blocks(now)
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
        if may_wait and self.gates.check_slots_taken(now):
            return WaitReason.SLOTS
        if self.gates.lacks_blocks(request, request.num_confirmed, ready_tokens):
            return WaitReason.BLOCKS
        return None

    # -- waiting --------------------------------------------------------------------------------

    def _awaits_load(self, request: RequestState, now: float) -> bool:
        units = self.gates.incoming_for(request, request.num_confirmed)
        if units is None or not request.record_wait(now, self._wait_s):
            return False
        request.awaited = units
        return True

    def _awaits_turn(self, request: RequestState, now: float) -> bool:
        if self._wait_s <= 0 or self.turns.are_paused(now):
            return False
        self.turns.wait(request)
        return True

    def _awaits_disk(self, request: RequestState, now: float) -> bool:
        """Return True if the request may wait longer for its reads.

        A request that has waited too long means that the disk is too slow, so no request waits for
        its turn during the next ``wait_s``.
        """
        if request.record_wait(now, self._wait_s):
            return True
        self.turns.pause(now + self._wait_s)
        return False

    # -- steps and finished requests ------------------------------------------------------------

    def begin_load(
        self, request: RequestState, lease: Lease, num_tokens: int, *, is_whole: bool
    ) -> None:
        """Start a load that takes over an offer's lease.

        If ``is_whole``, other requests with the same prefix wait for the load.
        """
        lease.move_to(self.turns.loading)
        if is_whole:
            self.gates.begin(request, num_tokens)

    def begin_step(self) -> None:
        """Begin a step, in which vLLM walks through its queue from the front. Release outdated
        leases.
        """
        if self.turns.is_over_limit:  # drop leases without a `match` call in the last step
            self._drop_leases(lambda request: request.asked_step < self.step)
        self.step += 1
        self.turns.begin_step()
        self.gates.begin_step()
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
            # The next call repeats the lookup. The request's waiting time continues.
            self.waiting.pop(request.req_id, None)

    def forget(self, req_id: ReqId) -> None:
        """Remove an admitted or finished request."""
        self.disk.backlog.leave(req_id)
        self.waiting.pop(req_id, None)
        self.gates.end(req_id)

    def release_all(self) -> None:
        """Release the leases of all waiting requests. A request's next call repeats the lookup."""
        self._drop_leases(lambda _: True)
        self.waiting.clear()

    def close(self) -> None:
        """Release all leases and remove all requests and loads."""
        self.release_all()
        self.gates.incoming.clear()
