"""The scheduler side: matches and admits requests, and plans each step.

`SchedulerCore` connects `Admission`, `LoadPlanner` and `SavePlanner`. It takes requests and steps,
returns results and plans, and processes the workers' reports. Apart from the clock, which is passed
in, it is deterministic.
"""

from collections.abc import Callable, Mapping

from kvloft.plan.admission import Admission
from kvloft.plan.announcer import Announcer
from kvloft.plan.answers import Answer, Miss, Wait, WaitReason
from kvloft.plan.block_writers import BlockWriters
from kvloft.plan.breaker import CircuitBreaker
from kvloft.plan.complete_units import num_complete_units, rewritten_blocks
from kvloft.plan.context import EventNotes, PlanContext
from kvloft.plan.load_planner import LoadPlanner
from kvloft.plan.request_state import NEVER, RequestState
from kvloft.plan.save_planner import SavePlanner
from kvloft.plan.settings import PlanSettings
from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import StepPlan, StepReport
from kvloft.seam.shape import ArenaSpec
from kvloft.seam.store import KeyChain, Session
from kvloft.seam.views import LiveRequest, RequestView, StepView


class SchedulerCore:
    """One engine's scheduler side. ``announcer`` is None if KV events are disabled."""

    def __init__(
        self,
        store: Session,
        new_chain: Callable[[RequestView, int], KeyChain],
        settings: PlanSettings,
        *,
        clock: Callable[[], float],
        announcer: Announcer | None = None,
    ) -> None:
        self._store, self._new_chain, self._settings = store, new_chain, settings
        self._clock, self._arena = clock, settings.arena
        self._shape, self._unit_tokens = settings.shape, settings.shape.unit_tokens
        self._loads_allowed, self._saves_allowed = settings.loads_allowed, settings.saves_allowed
        self._breaker = CircuitBreaker()
        self._notes = EventNotes(announcer)
        context = PlanContext(store, settings, clock, self._breaker, self._notes)
        self._context, self._requests, self.counters = context, context.requests, context.counters
        self._writers = BlockWriters(
            self._unit_tokens,
            all_groups=settings.has_draft_kv or not self._shape.is_dense,
            lookahead=self._shape.lookahead,
        )
        self._admission = Admission(store, context.requests, settings, clock)
        self._loads = LoadPlanner(context, self._admission)
        self._saves = SavePlanner(context, self._writers)
        self._scheduled: Mapping[ReqId, int] = {}
        self._admitted: set[ReqId] = set()
        """Requests admitted since the last step."""
        self._usable_bytes: dict[int, int] = {}
        """Number of leading arena bytes that each rank reported as usable."""
        self._is_caching_paused = False
        self._is_pool_empty = False
        """True if vLLM cleared its prefix cache since the last step."""
        self._hits_may_be_outdated = False
        """True if vLLM's prefix cache may hold KV from before a reset, and hits are not checked
        against their writers because no group has full attention.
        """
        self._hits_are_mixed = False
        """Like `_hits_may_be_outdated`, but permanent: running requests may use the new weights of
        a replaced adapter at any time, and vLLM caches their KV under the old name.
        """

    def meet_engine(self, count_running: Callable[[], int], retry_loads_s: float) -> None:
        """Set the function that counts vLLM's running requests, and the length of the pause, in
        seconds, after too many failed loads. Both depend on vLLM's scheduler, which does not exist
        yet at construction.
        """
        self._admission.gates.count_running = count_running
        self._breaker.retry_s = retry_loads_s

    def meet_siblings(self) -> None:
        """Record that this connector is one of several children of a MultiConnector."""
        self._context.has_siblings = True

    # -- lookups and admission ------------------------------------------------------------------

    def still_waits(self, req_id: ReqId, local_tokens: int) -> bool:
        """Return True if the last result was Wait and `match` would return Wait again."""
        return self._admission.still_waits(req_id, local_tokens)

    def match(self, live: LiveRequest, local_tokens: int, *, may_wait: bool = True) -> Answer:
        """Offer the tokens after ``local_tokens`` that can be loaded, or return Wait or Miss (I9).

        Without ``may_wait``, only chunks in host memory are offered.
        """
        request = self._request(live)
        request.local_tokens = local_tokens
        if not self._loads_allowed or self._is_caching_paused or live.skip_load:
            return Miss()
        if request.load_failed:  # the load could fail again, and vLLM would retry indefinitely
            yields = not self._shape.is_divisible and request.take_yield()
            return Wait(WaitReason.FAILED_LOAD) if yields else Miss()
        if self._breaker.has_tripped and not self._may_retry_load():
            return Miss()
        return self._admission.match(request, local_tokens, may_wait=may_wait)

    def _may_retry_load(self) -> bool:
        """Return True if the tripped breaker allows a load and no other load is in progress."""
        return not self._loads.in_progress and self._breaker.allows(self._clock())

    def admit(self, live: LiveRequest, num_tokens: int, tables: Tables) -> None:
        """Record the block tables of a request that vLLM admits, and plan the load of the accepted
        ``num_tokens`` tokens.
        """
        request = self._request(live)
        keeps_kv = self._keeps_blocks(request, tables)
        if live.req_id in self._scheduled:  # preempted by a reset; vLLM may have kept its blocks
            self._writers.record(request)
        if not keeps_kv:
            self._saves.drop_owed(request)
        request.start_over(keeps_kv=keeps_kv)
        request.was_examined, request.next_save = False, NEVER
        request.blocks = tables.copy()
        request.num_local_units = request.local_tokens // self._unit_tokens
        request.keeps_kv = keeps_kv
        is_unsafe = self._hits_may_be_outdated or self._hits_are_mixed
        if is_unsafe and request.num_local_units > 0:
            self._saves.block_saves(request)
        request.is_hit_unchecked = request.num_local_units > 0
        self._admitted.add(live.req_id)
        self._admission.forget(live.req_id)
        if request.slow_tokens:
            self.counters["disk_slow_tokens"] += request.slow_tokens
            request.slow_tokens = 0
        if num_tokens > 0:
            self._loads.plan(request, num_tokens)
            return
        request.drop_lease()
        num_left = request.num_prompt_tokens - request.local_tokens
        self._admission.disk.backlog.enter(live.req_id, num_left)

    def _keeps_blocks(self, request: RequestState, tables: Tables) -> bool:
        """Return True if the request is readmitted with its current blocks: after a load, or when
        a streaming session receives its next input.
        """
        # After a preemption or a failed load, vLLM can return the same first block from its cache.
        if not request.blocks.has_blocks or request.live.num_computed_tokens == 0:
            return False
        # Sliding-window tables begin with null blocks, so comparing blocks would not work.
        is_dense = self._shape.is_dense
        return not is_dense or list(request.blocks.main_table[:1]) == list(tables.main_table[:1])

    def fail_load(self, live: LiveRequest, num_tokens: int, tables: Tables) -> None:
        """Plan a load that is certain to fail. Call this if `admit` failed for a request that vLLM
        admits.
        """
        self._loads.plan_failure(live.req_id, num_tokens, tables)

    def hit_tokens(self, req_id: ReqId) -> Mapping[str, int]:
        """Return the number of tokens per tier in a request's last planned load, excluding lost
        blocks.
        """
        request = self._requests.get(req_id)
        return request.loaded_tokens if request is not None else {}

    # -- steps ----------------------------------------------------------------------------------

    def plan_step(self, step: StepView) -> StepPlan:
        """Return the workers' plan with all queued loads and new saves."""
        self._is_pool_empty = False
        self._scheduled = step.num_scheduled_tokens
        for req_id in step.preempted:
            self._preempt(req_id)
        prompt_step = self._note_prompts(step)
        self._writers.drop_given(step, self._requests, self._admitted)
        rewritten = rewritten_blocks(step, self._store, self._unit_tokens)
        sibling_blocks = self._sibling_blocks(step) if self._context.has_siblings else ()
        may_save = self._saves_allowed and not self._is_caching_paused
        saves = self._saves.plan(step, self._admitted) if may_save else ()
        return self._end_plan(
            StepPlan(
                saves=tuple(saves),
                rewritten=rewritten,
                sibling_blocks=sibling_blocks,
                prompt_step=prompt_step,
            )
        )

    def _sibling_blocks(self, step: StepView) -> tuple[BlockId, ...]:
        """Return the blocks that a sibling may load into in this step while saves are still reading
        them.

        A sibling loads for requests admitted since the previous step that do not run yet, or that
        begin with more computed tokens than vLLM's prefix cache held.
        """
        computed = {new.req_id: new.num_computed_tokens for new in step.new}
        blocks: list[BlockId] = []
        for req_id in self._admitted:
            request = self._requests.get(req_id)
            if request is not None and computed.get(req_id, NEVER) > request.local_tokens:
                for group, table in enumerate(request.blocks.tables):
                    blocks += table[request.num_local_units * request.blocks.size_of(group) :]
        return tuple(self._store.being_read(blocks)) if blocks else ()

    def _preempt(self, req_id: ReqId) -> None:
        if (request := self._requests.get(req_id)) is None:
            return
        if req_id in self._admitted:  # a reset preempted it before its readmission
            request.kv_outdated = False
            return
        self._writers.record(request)
        request.start_over()
        self._admission.disk.backlog.leave(req_id)

    def _note_prompts(self, step: StepView) -> int | None:
        """Record how many prompt tokens the step computes and how many remain. Return the step's
        number among steps that compute prompt tokens, or None if the step computes no prompt
        tokens.
        """
        disk, requests = self._admission.disk, self._requests
        for new in step.new:
            if (request := requests.get(new.req_id)) is not None:
                num_left = request.num_prompt_tokens - new.num_computed_tokens
                disk.backlog.enter(new.req_id, num_left)
        num_tokens = disk.backlog.compute(step.num_scheduled_tokens)
        return disk.pacing.observe_step_begin(self._clock(), num_tokens)

    def end_step(self, prompt_step: int | None) -> None:
        """Record that the engine executed a step. ``prompt_step`` comes from the step's plan."""
        self._admission.disk.pacing.observe_step_end(self._clock(), prompt_step)

    def plan_loads_only(self) -> StepPlan:
        """Return a plan with queued loads but no saves, for a step whose planning failed."""
        self._saves.abandon_plan()
        blocks = tuple(self._store.being_read())
        is_shared = self._context.has_siblings
        return self._end_plan(
            StepPlan(rewritten=blocks, sibling_blocks=blocks if is_shared else ())
        )

    def _end_plan(self, plan: StepPlan) -> StepPlan:
        """Return ``plan`` with the arena and all queued loads, and begin the next step.

        This must be the last call in planning, because a failed plan is retried without saves.
        """
        self._admission.begin_step()
        self._admitted.clear()
        self._saves.end_plan()
        return plan._replace(arena=self._arena, loads=self._loads.take_queued())

    def take_notes(self) -> list[Callable[[], None]]:
        """Return the queued announcer calls. Make these calls after the plan is complete."""
        return self._notes.take()

    # -- reports --------------------------------------------------------------------------------

    def absorb(self, report: StepReport) -> None:
        """Process a worker's report: settle saves and loads, and remove damaged chunks."""
        if report.usable_bytes is not None:
            rank, num_bytes = report.usable_bytes
            self._usable_bytes[rank] = num_bytes
            self._store.limit_memory(min(self._usable_bytes.values()))
        if report.saved or report.failed:
            misfits = (report.misfits,) if report.misfits else ()
            num_saved, num_failed = self._store.settle(report.saved, report.failed, *misfits)
            if num_saved:
                self.counters["saved_chunks"] += num_saved
            if num_failed:
                self.counters["save_failed_chunks"] += num_failed
                if self._breaker.has_tripped:
                    self._loads.count_copy(failed=True)
        for result in report.loads:
            self._loads.settle(result)

    @property
    def has_work_in_flight(self) -> bool:
        """True while any copies are unreported, so that the engine keeps polling the workers."""
        return bool(self._store.num_in_flight or self._loads.in_progress)

    # -- finish, reset and close ----------------------------------------------------------------

    def finish(self, req_id: ReqId) -> None:
        """Remove a finished or aborted request. In-flight copies still settle (I5)."""
        request = self._requests.pop(req_id, None)
        self._admission.forget(req_id)
        if request is not None:
            self._saves.drop_owed(request)
            request.drop_lease()
            if request.live.num_computed_tokens > 0:
                self._record_last(request)

    def _record_last(self, request: RequestState) -> None:
        """Record a finished request's blocks.

        With async scheduling, vLLM also caches blocks whose tokens became known in the last step.
        """
        if request.was_examined:
            num_tokens = len(request.confirmed_tokens())
            frontier = request.live.num_computed_tokens
            num_units = num_complete_units(request, num_tokens, frontier, self._unit_tokens)
            request.num_complete = max(request.num_complete, num_units)
        self._writers.record(request)

    def reset(self) -> None:
        """Clear the store, discard in-flight saves, and block saves of all other existing KV."""
        self._mark_kv_outdated()
        self.release_waiting()
        self._store.clear()

    def _mark_kv_outdated(self) -> None:
        """Block saves of all KV currently in GPU memory."""
        for request in self._requests.values():
            self._saves.count_blocked(request)
            request.kv_outdated = request.blocks.has_blocks
            request.forget_saves()
        self._writers.clear()
        self._hits_may_be_outdated = not (self._shape.is_dense or self._is_pool_empty)

    def release_waiting(self) -> None:
        """Release the chunks that waiting requests pin in host memory. `match` then looks these
        requests up again.
        """
        self._admission.release_all()

    def replace_adapter(self, number: int) -> None:
        """Recompute the keys of a LoRA adapter's requests, because the adapter's weights may be
        replaced. The requests then have unique keys, and their KV is not saved.
        """
        for request in self._requests.values():
            if request.live.uses_adapter(number):
                self._saves.count_blocked(request)
                self._saves.drop_owed(request)
                request.restart_keys()
        self._hits_are_mixed = not self._shape.is_dense

    def note_pool_reset(self) -> None:
        """Record that vLLM's prefix cache is empty, so it holds no KV from before a reset."""
        self._is_pool_empty, self._hits_may_be_outdated = True, False

    def pause_caching(self) -> None:
        """Pause offers and saves until `resume_caching`, because no valid weights are loaded."""
        self._is_caching_paused = True
        self.release_waiting()

    def resume_caching(self) -> None:
        """Resume offers and saves, but never save KV computed since `pause_caching`."""
        if self._is_caching_paused:
            self._is_caching_paused = False
            self._mark_kv_outdated()

    def count_on(self, num_bytes: int) -> None:
        """Set how many bytes of a shared arena this store may use."""
        if self._arena is not None:
            self._admission.turns.set_memory(min(self._arena.size_bytes, num_bytes))

    @property
    def has_queued_loads(self) -> bool:
        """True if loads are queued. Queued loads use the current arena, so do not replace it."""
        return bool(self._loads.queued)

    def meet_store(self, arena: ArenaSpec | None) -> None:
        """Switch to a new store, or to a store that has lost its chunks.

        ``arena`` is the store's arena, or None if the store is unavailable. Do not call this while
        loads are queued.
        """
        for request in self._requests.values():
            request.forget_saves()
        self._admission.release_all()
        if arena is None or not arena.is_same_memory(self._arena):
            self._usable_bytes.clear()
            self._admission.turns.set_memory(arena.size_bytes if arena is not None else 0)
        self._arena = arena

    def stop(self) -> None:
        """Stop offers, saves and KV events. In-flight copies still settle."""
        self._loads_allowed = self._saves_allowed = False
        self._admission.release_all()
        self._notes.withdraw()

    def close(self) -> None:
        """Release all leases. Reservations last until the session closes, because workers may still
        write to the reserved frames.
        """
        self._admission.close()
        self._requests.clear()
        self._loads.close()

    def _request(self, live: LiveRequest) -> RequestState:
        request = self._requests.get(live.req_id)
        if request is None:
            wish = live.saves
            prompt_only = self._settings.save_prompts_only if wish is None else wish == "prompt"
            lookahead = self._shape.lookahead
            request = RequestState(live, self._new_chain, lookahead, prompt_only)
            self._requests[live.req_id] = request
        return request
