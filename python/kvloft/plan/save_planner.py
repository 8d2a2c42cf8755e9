"""Plans saves: finds the units that a step completes, and reserves frames for their chunks.

If a unit gets no frame, later steps retry the save while the request owns the blocks. After that,
the unit is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import compress, islice, repeat
from operator import attrgetter, is_not

from kvloft.plan.block_writers import BlockWriters
from kvloft.plan.complete_units import (
    longest_request,
    num_complete_units,
    refresh_tables,
    take_complete_units,
)
from kvloft.plan.context import PlanContext
from kvloft.plan.request_state import NEVER, RequestState
from kvloft.plan.save_schedule import SaveSchedule
from kvloft.plan.state_planner import StatePlanner
from kvloft.seam.batch import Tables
from kvloft.seam.ids import ReqId
from kvloft.seam.plan import Chunks, SavePlan
from kvloft.seam.views import NewRequest, StepView

MAX_RETRIES = 8
"""Maximum number of requests that retry a save in one step. Each retry costs a lookup, and host
memory can stay full for a long time.
"""

_new_save: Callable[[tuple[ReqId, Chunks]], SavePlan] = partial(tuple.__new__, SavePlan)
"""Creates a `SavePlan` from a tuple of its fields. This is three times as fast as calling the
constructor.
"""
_req_id: Callable[[RequestState], ReqId] = attrgetter("req_id")


class SavePlanner:
    """Plans the saves of one engine's requests."""

    def __init__(self, context: PlanContext, writers: BlockWriters) -> None:
        settings = context.settings
        self._store, self._requests = context.store, context.requests
        self._context, self._breaker, self._writers = context, context.breaker, writers
        self._unit_tokens = settings.shape.unit_tokens
        self._block_tokens = min(group.block_tokens for group in settings.shape.groups)
        self._draft_limit, self._is_dense = settings.draft_limit, settings.shape.is_dense
        self._has_draft_kv = settings.has_draft_kv
        self._schedule = SaveSchedule()
        self._states = StatePlanner(context)
        self._unsent: list[SavePlan] = []
        """Saves with reserved frames that are not in a step plan yet."""
        self._owed: dict[RequestState, int] = {}
        """Number of units without a frame for each request, in retry order."""

    def plan(self, step: StepView, admitted: Collection[ReqId]) -> list[SavePlan]:
        """Reserve frames for the units that ``step`` completes, and return their saves.

        ``admitted`` holds the requests admitted since the previous step.
        """
        self._unsent = []
        if self._draft_limit is not None and longest_request(step) > self._draft_limit:
            self._block_scheduled(step)
        due = self._examine_new(step) if step.new else []
        if step.tables is None:
            self._grow_tables(step)
        due += self._examine_running(step)
        for request in self._writers.check_hits(due, self._requests, admitted, step):
            self.block_saves(request)
            due = [each for each in due if each is not request]
        if due:
            self._reserve(due)
        if step.new:
            new_ids = [new.req_id for new in step.new]
            self._schedule.add(new_ids, self._next_saves(new_ids))
        if self._owed:
            self._retry_in_next_step()
        if step.states:
            self._unsent += self._states.plan(step)
        if step.num_draft_tokens:
            for request in self._known(step.num_draft_tokens):
                request.had_drafts = True
        return self._unsent

    def end_plan(self) -> None:
        """Record that a step plan contains the last planned saves."""
        self._unsent = []

    def abandon_plan(self) -> None:
        """Abort the reservations of a failed plan (I5).

        Block tables may lack the blocks that the failed step added, so all current requests' saves
        are blocked until the requests get new tables (I6).
        """
        self._store.abort([ticket for save in self._unsent for ticket in save.chunks.tickets()])
        self._writers.clear()
        for request in self._requests.values():
            self.block_saves(request)
            request.forget_saves()

    def block_saves(self, request: RequestState) -> None:
        """Block the request's saves until its next admission, and count the request."""
        self.count_blocked(request)
        request.save_blocked = True

    def count_blocked(self, request: RequestState) -> None:
        """Count the request if it has GPU blocks and its saves are not blocked yet."""
        if request.blocks.has_blocks and not (request.save_blocked or request.kv_outdated):
            self._context.counters["save_blocked_requests"] += 1

    def drop_owed(self, request: RequestState) -> None:
        """Drop and count units that got no frame while the request owned the blocks."""
        if num_units := self._owed.pop(request, 0):
            self._context.counters["save_dropped_chunks"] += num_units

    def _known(self, req_ids: Iterable[ReqId]) -> Iterable[RequestState]:
        return filter(None, map(self._requests.get, req_ids))

    def _next_saves(self, req_ids: Iterable[ReqId]) -> list[int]:
        requests = map(self._requests.get, req_ids)
        return [NEVER if request is None else request.next_save for request in requests]

    def _block_scheduled(self, step: StepView) -> None:
        """Block the saves of all scheduled requests. The engine skips the draft model in this step,
        so the scheduled tokens have no draft KV.
        """
        for request in self._known(step.num_scheduled_tokens):
            self.block_saves(request)

    def _grow_tables(self, step: StepView) -> None:
        requests = self._requests
        for req_id, blocks in step.grown:
            if (request := requests.get(req_id)) is not None:
                request.blocks.grow(blocks)

    # -- complete units -------------------------------------------------------------------------

    def _examine_new(self, step: StepView) -> list[RequestState]:
        due: list[RequestState] = []
        scheduled, drafts = step.num_scheduled_tokens, step.num_draft_tokens
        for new in step.new:
            if (request := self._requests.get(new.req_id)) is None:
                continue
            if step.tables is None:
                request.blocks = Tables([list(new.block_ids)])
            request.was_examined = True
            if self._has_sibling_load(request, new):
                self.block_saves(request)
            num_tokens = new.num_computed_tokens + scheduled[new.req_id]
            if self._examine(request, num_tokens - drafts.get(new.req_id, 0), step):
                due.append(request)
        return due

    def _has_sibling_load(self, request: RequestState, new: NewRequest) -> bool:
        """Return True if a sibling is loading KV for the request in this step. The load may still
        fail. With Mamba states, vLLM's own hit can exceed its local tokens by part of a block.
        """
        if not self._context.has_siblings or request.keeps_kv:
            return False
        return new.num_computed_tokens - request.local_tokens >= self._block_tokens

    def _examine_running(self, step: StepView) -> list[RequestState]:
        """Examine the running requests that are due, which are few in most steps."""
        due: list[RequestState] = []
        running, computed = step.running, step.num_computed_tokens
        scheduled = step.num_scheduled_tokens
        schedule, requests, unit_tokens = self._schedule, self._requests, self._unit_tokens
        if schedule.running != running:
            due = self._examine_left_out(step)
            schedule.line_up(running, self._next_saves(running))
        one_each = step.total_scheduled_tokens == len(scheduled)
        positions = schedule.due(
            computed, None if one_each else map(scheduled.__getitem__, running)
        )
        is_plain = step.tables is None and not self._has_draft_kv and not self._breaker.has_tripped
        drafts, next_saves = step.num_draft_tokens, []
        for i in positions:
            request = requests[req_id := running[i]]
            frontier = computed[i] + scheduled[req_id]
            if drafts:
                frontier -= drafts.get(req_id, 0)
            if is_plain:
                is_due = take_complete_units(request, unit_tokens, frontier)
            else:
                is_due = self._examine(request, frontier, step)
            if is_due:
                due.append(request)
            next_saves.append(request.next_save)
        schedule.put(positions, computed, next_saves)
        return due

    def _examine_left_out(self, step: StepView) -> list[RequestState]:
        """Examine requests that were in the previous step but are not in this step. With async
        scheduling, their last tokens were unknown in the previous step.

        Since then, draft tokens may have been rejected, or a streaming session may have replaced
        the last sampled token. vLLM's number of computed tokens reflects both changes.
        """
        due: list[RequestState] = []
        for req_id in self._schedule.running:
            request = self._requests.get(req_id)
            if request is None or not request.was_examined or req_id in step.num_scheduled_tokens:
                continue
            if self._examine(request, request.live.num_computed_tokens, step):
                due.append(request)
        return due

    def _examine(self, request: RequestState, frontier: int, step: StepView) -> bool:
        """Set ``next_save``. Return True if any units are due to be saved at ``frontier``."""
        if step.tables is not None and not refresh_tables(request, step):
            request.next_save = frontier + 1
            return False
        is_due = False
        if self._breaker.has_tripped and not self._breaker.allows(self._context.clock()):
            num_tokens = len(request.confirmed_tokens())
            num_units = num_complete_units(request, num_tokens, frontier, self._unit_tokens)
            request.num_complete = num_units
            request.next_save = frontier + self._unit_tokens
        else:
            is_due = take_complete_units(request, self._unit_tokens, frontier)
        if self._has_draft_kv:
            self._record(request, frontier)
        elif not self._is_dense:
            # vLLM can reassign blocks before a window before the next call.
            self._writers.record(request)
        return is_due

    def _record(self, request: RequestState, frontier: int) -> None:
        """Record the blocks that the request wrote, and schedule its next examination.

        The next examination is due when vLLM caches the request's next block, because a later
        request can hit and save that block if this request does not.
        """
        num_tokens = request.num_confirmed
        num_units = num_complete_units(request, num_tokens, frontier, self._unit_tokens)
        request.num_complete = num_units
        self._writers.record(request)
        lag = 0 if request.had_drafts else max(0, frontier - num_tokens)
        next_end = (num_units + 1) * self._unit_tokens + lag
        request.next_save = min(request.next_save, next_end)

    # -- frames ---------------------------------------------------------------------------------

    def _reserve(self, due: list[RequestState]) -> None:
        """Reserve frames for all due requests in a single call, because the forward pass waits for
        it.
        """
        rows = [
            (
                each.chain,
                each.token_ids,
                each.num_save_tokens,
                each.save_start,
                each.saved_units,
                each.blocks.tables,
            )
            for each in due
        ]
        reserved, dropped = self._store.reserve(rows)
        has_frames = map(is_not, reserved, repeat(None))
        # Record the reservations first so that a later error does not leak them (I5).
        pairs = zip(map(_req_id, due), reserved, strict=True)
        self._unsent += map(_new_save, compress(pairs, has_frames))
        self._context.notes.add_saves(due)
        if self._owed or any(dropped):
            self._note_owed(due, dropped)
        if self._has_draft_kv:
            for save in self._writers.find_others(self._unsent, self._requests):
                self.block_saves(self._requests[save.req_id])
                self._store.abort(save.chunks.tickets())
                self._unsent.remove(save)

    def _note_owed(self, due: list[RequestState], dropped: Sequence[int]) -> None:
        """Record the units that received no frame, and set the first unit to be retried."""
        is_late = self._store.is_save_late
        for request, num_units in zip(due, dropped, strict=True):
            self._owed.pop(request, None)
            if not num_units:
                continue
            self._owed[request] = num_units
            first = request.save_start
            if not is_late:  # host memory may have evicted chunks
                host_units, _ = self._store.lookup(request.chain)
                first = min(request.saved_units, host_units)
            request.saved_units = first

    def _retry_in_next_step(self) -> None:
        """Schedule retries in the next step for the first requests in retry order.

        These requests move to the end of the order, so that requests that are not running do not
        delay the other requests.
        """
        for request in list(islice(self._owed, MAX_RETRIES)):
            self._owed[request] = self._owed.pop(request)
            request.next_save = 0
        running = self._schedule.running
        self._schedule.line_up(running, self._next_saves(running))
