"""SchedulerCore: one method per scheduler hook, and the bookkeeping between them.

It answers lookups, remembers what was admitted, turns each step into a StepPlan and takes each StepReport back into the
store. It never touches bytes and knows no engine: views come in, plans go out. Deterministic but for the clock passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, count, repeat
from operator import is_not

from kvloft.plan.agenda import Agenda
from kvloft.plan.announce import Announcer
from kvloft.plan.block_writers import BlockWriters
from kvloft.plan.breaker import RETRY_S, Breaker
from kvloft.plan.loads import Loading, plan_load
from kvloft.plan.pins import Lease
from kvloft.plan.queue import Queue
from kvloft.plan.room import Room
from kvloft.plan.saves import SaveRow, complete_blocks, due_chunks, its_id, longest, new_save, note_dropped, rewritten
from kvloft.plan.tracker import NEVER, NOT_LOOKED, Tracker
from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LAYOUT, LoadPlan, SavePlan, StepPlan, StepReport
from kvloft.seam.shape import ArenaSpec, CacheShape
from kvloft.seam.store import KeyChain, Session
from kvloft.seam.views import BoundaryState, LiveRequest, RequestView, StepView


class SchedulerCore:
    """The scheduler half.

    Each rank of ``shape`` reports every ticket and load once; only then is it settled (I10). ``wait_s`` bounds how long one
    request may be told "ask again" while disk chunks are read, or while another's load brings what it wants: that only where
    vLLM ``shares_blocks``, which it does with its prefix cache. ``retry_loads_s``: when loads are tried again after many failed;
    infinite: never. ``save_prompts_only``: for requests that do not say. ``max_running``: seats of the engine; None: not known.
    ``draft_limit``: with a request of more tokens in a step, the engine leaves its drafter out of that step; None: it has none.
    ``announcer``: is told which chunks requests have; None where KV events are off. ``room``: of several groups in vLLM's pool.
    """

    def __init__(
        self,
        store: Session,
        new_chain: Callable[[RequestView], KeyChain],
        shape: CacheShape,
        *,
        arena: ArenaSpec | None,
        wait_s: float = 10.0,
        clock: Callable[[], float],
        loads_allowed: bool = True,
        saves_allowed: bool = True,
        shares_blocks: bool = False,
        retry_loads_s: float = RETRY_S,
        save_prompts_only: bool = False,
        max_running: int | None = None,
        draft_limit: int | None = None,
        announcer: Announcer | None = None,
        room: Room | None = None,
    ) -> None:
        self._store, self._new_chain, self._clock, self._arena = store, new_chain, clock, arena
        self._shape, self._unit_tokens = shape, shape.unit_tokens
        self._writers = BlockWriters(self._unit_tokens, sees_grants=shape.is_divisible)
        self._has_drafter = bool(shape.lookahead) or draft_limit is not None
        self._draft_limit, self._announcer = draft_limit, announcer
        self._queue = Queue(
            store, shape, clock, wait_s, arena.num_frames if arena is not None else 0, max_running=max_running,
            shares_blocks=shares_blocks and shape.is_divisible, room=room,
        )  # fmt: skip
        self.still_waits = self._queue.still_waits
        """Whether `match` would say None as it did before: to ask of thousands in every step, before anything is made for them."""
        self._breaker = Breaker(retry_loads_s)
        self._save_prompts_only = save_prompts_only
        self._loads_allowed, self._saves_allowed = loads_allowed, saves_allowed
        self._trackers: dict[ReqId, Tracker] = {}
        self._scheduled: Mapping[ReqId, int] = {}
        self._admitted: set[ReqId] = set()
        self._agenda = Agenda()
        """Of the requests of the last step: at which frontier a save of each can be planned."""
        self._load_ids = count()
        self._queued_loads: list[LoadPlan] = []
        self._loads: dict[int, Loading] = {}
        self._unsent: list[SavePlan] = []
        self._tables: Callable[[ReqId], Tables | None] | None = None
        """Of this step: see `StepView.tables`."""
        self._notes: list[Callable[[], None]] = []
        """See `take_notes`."""
        self._usable_frames: dict[int, int] = {}
        """By rank, where workers said so: how many of the first frames they can copy to."""
        self.counters: Counter[str] = Counter()
        """Since the last `take_counters`: tokens and events, by the names in ``kvloft.vllm.stats``."""

    # -- lookups and admission ------------------------------------------------------------------------------------

    def match(self, live: LiveRequest, local_tokens: int, *, may_wait: bool = True) -> int | None:
        """Tokens the store can give beyond ``local_tokens``; None means ask again next step (I9).

        Unless it ``may_wait``: then what can be loaded now is all there is.
        """
        tracker = self._tracker(live)
        tracker.local_tokens = local_tokens
        if not self._loads_allowed or live.skip_load:
            return 0
        if tracker.load_failed:
            # Offered again, the same load could fail again, and vLLM would ask again and again.
            return None if not self._shape.is_divisible and tracker.gives_way_once() else 0
        if self._breaker.has_tripped and (self._loads or not self._breaker.lets_pass(self._clock())):
            return 0  # one load at a time is tried
        return self._queue.match(tracker, local_tokens, may_wait=may_wait)

    def admit(self, live: LiveRequest, num_tokens: int, tables: Tables) -> None:
        """vLLM gave the request its blocks and takes ``num_tokens`` of the standing offer (0: none of it)."""
        tracker = self._tracker(live)
        # After a load, or with a streaming session's next input, a request is admitted again with the blocks it has.
        # A table of windows begins with null blocks then: that it begins alike says nothing.
        keeps_kv = bool(tracker.blocks) and (
            list(tracker.blocks[:1]) == list(tables[:1]) if self._shape.is_dense else live.num_computed_tokens > 0
        )
        if live.req_id in self._scheduled:  # a reset preempted it since, and vLLM may have kept its blocks
            self._writers.record(tracker)
        tracker.start_over(keeps_kv=keeps_kv)
        tracker.next_save = NOT_LOOKED
        tracker.blocks = tables.copy()
        tracker.num_local_blocks = tracker.local_tokens // self._unit_tokens
        tracker.is_hit_unchecked = tracker.num_local_blocks > 0 and self._shape.is_dense
        self._admitted.add(live.req_id)
        self._queue.forget(live.req_id)
        if num_tokens <= 0:
            tracker.drop_lease()
            self._queue.num_running += 1
            self._queue.line.enter(live.req_id, tracker.num_prompt_tokens - tracker.local_tokens)
            return
        self._queue.hold(tracker, num_tokens)
        plan, lease, by_tier = plan_load(tracker, self._unit_tokens, num_tokens, next(self._load_ids))
        if lease is not None:
            self._queue.begin_load(tracker, lease, num_tokens, is_whole=not plan.lost)
        tracker.loaded_tokens = by_tier
        self._note_states(live, tracker, tracker.local_tokens + num_tokens)
        self._queue_load(plan, lease)
        for tier, tokens in by_tier.items():
            self.counters[f"load_tokens_{tier}"] += tokens
        if plan.lost:
            tracker.fail_load()
            self.counters["load_lost_blocks"] += len(plan.lost)

    def fail_load(self, live: LiveRequest, num_tokens: int, tables: Tables) -> None:
        """Plan a load that brings nothing: its request hears at once that these blocks are not there."""
        begin, unit_tokens = 0, self._unit_tokens
        if (tracker := self._trackers.get(live.req_id)) is not None:
            begin = tracker.local_tokens // unit_tokens
            tracker.fail_load()
        lost = tuple(tables[begin : begin + num_tokens // unit_tokens])
        self._queue_load(LoadPlan(live.req_id, next(self._load_ids), lost=lost), None)

    def _queue_load(self, plan: LoadPlan, lease: Lease | None) -> None:
        self._loads[plan.load_id] = Loading(lease, self._shape.num_ranks, is_tried=bool(plan.chunks))
        self._queued_loads.append(plan)

    def hit_tokens(self, req_id: ReqId) -> Mapping[str, int]:
        """Tokens by tier of the load most recently planned for ``req_id``; what was lost counts for no tier."""
        return tracker.loaded_tokens if (tracker := self._trackers.get(req_id)) is not None else {}

    # -- steps ----------------------------------------------------------------------------------------------------

    def plan_step(self, view: StepView) -> StepPlan:
        """Turn one schedule() into the worker's plan: queued loads, and saves of what this step completes."""
        self._queue.num_running = len(view.running) + len(view.new)
        self._scheduled = view.num_scheduled_tokens
        for req_id in view.preempted:
            if (tracker := self._trackers.get(req_id)) is None:
                continue
            if req_id in self._admitted:  # a reset preempted it outside a step, and it was admitted before this one names it
                tracker.kv_outdated = False
            else:
                self._writers.record(tracker)
                tracker.start_over()
                self._queue.line.leave(req_id)
        self._note_prompts(view)
        self._writers.drop_given(view, self._trackers, self._admitted)
        fenced = rewritten(view, self._store, self._unit_tokens)
        saves = self._plan_saves(view) if self._saves_allowed else ()
        return self._finish_plan(tuple(saves), fenced)

    def _note_prompts(self, view: StepView) -> None:
        """Measure what the step computes of prompts, and what is left of them."""
        line, trackers = self._queue.line, self._trackers
        for new in view.new:
            if (tracker := trackers.get(new.req_id)) is not None:
                line.enter(new.req_id, tracker.num_prompt_tokens - new.num_computed_tokens)
        self._queue.pacing.observe_step_begin(self._clock(), line.compute(view.num_scheduled_tokens))

    def end_step(self) -> None:
        """The engine has executed the oldest step that it planned and had not executed."""
        self._queue.pacing.observe_step_end(self._clock())

    def take_notes(self) -> list[Callable[[], None]]:
        """What the announcer is to be told, each to be called now that the plan is made: if one fails, no plan does."""
        notes, self._notes = self._notes, []
        return notes

    def plan_loads_only(self) -> StepPlan:
        """A plan without saves, for a step that could not be read: requests that wait must not wait permanently.

        Block tables may have missed what that step added to them, so nothing of the requests that run is saved until they
        get a table afresh (I6); what the failed attempt reserved is given back (I5), and does not count as saved.
        """
        self._store.abort([ticket for save in self._unsent for ticket in save.chunks.tickets()])
        self._writers.clear()
        for tracker in self._trackers.values():
            tracker.save_blocked = True
            tracker.forget_saves()
        return self._finish_plan((), tuple(self._store.being_read()))

    def _finish_plan(self, saves: tuple[SavePlan, ...], fenced: tuple[BlockId, ...]) -> StepPlan:
        """The end of a step, however it was planned, and no sooner: one that failed half-way is planned once more."""
        self._queue.next_step()
        self._admitted.clear()
        self._unsent = []
        loads, self._queued_loads = tuple(self._queued_loads), []
        return StepPlan(self._queue.step, self._arena, loads, saves, fenced)

    def _plan_saves(self, view: StepView) -> list[SavePlan]:
        saves = self._unsent = []
        due: tuple[list[Tracker], list[SaveRow]] = [], []
        trackers, scheduled, drafts = self._trackers, view.num_scheduled_tokens, view.num_draft_tokens
        self._tables = view.tables
        if self._draft_limit is not None and longest(view) > self._draft_limit:
            for known in filter(None, map(trackers.get, scheduled)):  # what is computed now gets no draft KV
                known.save_blocked = True
        for new in view.new:
            if (tracker := trackers.get(new.req_id)) is not None:
                if view.tables is None:
                    tracker.blocks = Tables([list(new.block_ids)])
                else:
                    self._take_tables(tracker)
                self._look(tracker, new.num_computed_tokens + scheduled[new.req_id] - drafts.get(new.req_id, 0), *due)
        for req_id, blocks in view.grown if view.tables is None else ():
            if (tracker := trackers.get(req_id)) is not None:
                tracker.blocks.grow(blocks)
        self._look_at_running(view, *due)
        self._writers.leave_out_strange_hits(due, trackers, self._admitted, scheduled)
        if due[0]:
            self._save(*due, saves)
        if new_ids := [new.req_id for new in view.new]:
            self._agenda.add(new_ids, self._next_saves(new_ids))
        if view.states:
            self._save_states(view.states, saves)
        for req_id in drafts:
            if (tracker := trackers.get(req_id)) is not None:
                tracker.had_drafts = True
        return saves

    def _next_saves(self, req_ids: Iterable[ReqId]) -> list[int]:
        return [NEVER if tracker is None else tracker.next_save for tracker in map(self._trackers.get, req_ids)]

    def _look_at_running(self, view: StepView, due: list[Tracker], rows: list[SaveRow]) -> None:
        """Most running requests complete nothing in a step: those are not looked at one by one."""
        running, computed, scheduled, agenda = view.running, view.num_computed_tokens, view.num_scheduled_tokens, self._agenda
        if agenda.running != running:
            self._look_at_latecomers(scheduled, due, rows)
            agenda.line_up(running, self._next_saves(running))
        one_each = view.total_scheduled_tokens == len(scheduled)
        drafts, trackers = view.num_draft_tokens, self._trackers
        is_plain = view.tables is None and not self._has_drafter and not self._breaker.has_tripped
        unit_tokens, due_again = self._unit_tokens, []
        positions = agenda.due(computed, None if one_each else map(scheduled.__getitem__, running))
        for i in positions:
            tracker = trackers[req_id := running[i]]
            frontier = computed[i] + scheduled[req_id]
            if drafts:
                frontier -= drafts.get(req_id, 0)
            if not is_plain:
                self._look(tracker, frontier, due, rows)
            elif row := due_chunks(tracker, unit_tokens, frontier):
                due.append(tracker)
                rows.append(row)
            due_again.append(tracker.next_save)
        agenda.put(positions, computed, due_again)

    def _look_at_latecomers(self, scheduled: Mapping[ReqId, int], due: list[Tracker], rows: list[SaveRow]) -> None:
        """Requests of the last step that this one left out: under async scheduling their last token became known only now.

        By now drafts may have been rejected, or a session may have replaced the last sampled token; vLLM's own count has
        followed either.
        """
        for req_id in self._agenda.running:
            tracker = self._trackers.get(req_id)
            if tracker is not None and tracker.next_save != NOT_LOOKED and req_id not in scheduled:
                self._look(tracker, tracker.live.num_computed_tokens, due, rows)

    def _look(self, tracker: Tracker, frontier: int, due: list[Tracker], rows: list[SaveRow]) -> None:
        """Add what is complete at ``frontier`` to ``due`` and ``rows``, and note at which one to look again."""
        if self._tables is not None and not self._take_tables(tracker):
            tracker.next_save = frontier + 1
            return
        if self._breaker.has_tripped and not self._breaker.lets_pass(self._clock()):
            num_tokens = len(tracker.confirmed_tokens())
            tracker.num_complete = complete_blocks(tracker, num_tokens, frontier, self._unit_tokens)
            tracker.next_save = frontier + self._unit_tokens
        elif (row := due_chunks(tracker, self._unit_tokens, frontier)) is not None:
            due.append(tracker)
            rows.append(row)
        if self._has_drafter:
            self._writers.record(tracker)
            # What is not saved now may be by a later request, in whose prompt it is.
            tracker.next_save = min(tracker.next_save, frontier + self._unit_tokens)

    def _save(self, due: list[Tracker], rows: list[SaveRow], saves: list[SavePlan]) -> None:
        """Reserve frames for all that is due, in one call: every forward waits for this."""
        reserved, dropped = self._store.reserve(rows)
        # First of all, so that they are given back whatever happens (I5).
        is_some = map(is_not, reserved, repeat(None))
        saves += map(new_save, compress(zip(map(its_id, due), reserved, strict=True), is_some))
        if any(dropped):
            self._note_dropped(due, rows, dropped)
        if self._announcer is not None:
            self._notes += [partial(self._announcer.note, tracker.live, row) for tracker, row in zip(due, rows, strict=True)]
        if self._has_drafter:
            for save in self._writers.find_others(saves, self._trackers):
                self._store.abort(save.chunks.tickets())
                saves.remove(save)

    def _note_dropped(self, due: list[Tracker], rows: list[SaveRow], dropped: Sequence[int]) -> None:
        """Count chunks without a frame: tried again in the next step if the server was late, else with the next chunk."""
        self.counters["save_dropped_chunks"] += sum(dropped)
        for tracker, row in compress(zip(due, rows, strict=True), dropped):
            note_dropped(tracker, row, self._store, is_late=self._store.is_save_late)
        if self._store.is_save_late:
            self._agenda.line_up(self._agenda.running, self._next_saves(self._agenda.running))

    def _take_tables(self, tracker: Tracker) -> bool:
        """Have the request's tables as they are in this step; where they are not told, it keeps those of before and saves later."""
        if self._tables is None or not (tables := self._tables(tracker.req_id)):
            return False
        tracker.blocks = tables
        return True

    def _save_states(self, states: Iterable[BoundaryState], saves: list[SavePlan]) -> None:
        """A state is offered once, with its tokens known, for vLLM hashes them first; what has no frame now is not kept."""
        due = [(tracker, state) for state in states if (tracker := self._has_state(state)) is not None]
        if not due:
            return
        unit_tokens = self._unit_tokens
        rows = [(tracker.chain, state.group, state.num_tokens // unit_tokens - 1, state.block) for tracker, state in due]
        reserved = zip(due, self._store.reserve_states(rows), strict=True)
        saves += [SavePlan(tracker.req_id, chunks) for (tracker, _), chunks in reserved if chunks]
        for tracker, state in due:
            self._note_states(tracker.live, tracker, state.num_tokens)

    def _note_states(self, live: LiveRequest, tracker: Tracker, num_tokens: int) -> None:
        if self._announcer is not None:
            self._notes.append(partial(self._announcer.note_states, live, tracker.chain, num_tokens // self._unit_tokens))

    def _has_state(self, state: BoundaryState) -> Tracker | None:
        """Whose state it is, if it is to be saved.

        Under async scheduling vLLM offers what results of the step before confirmed, but gives up first what accepted drafts left
        behind: then the block may hold anything when this step is done, even where the same request got it again.
        """
        tracker, num_blocks = self._trackers.get(state.req_id), state.num_tokens // self._unit_tokens
        if tracker is None or state.num_tokens % self._unit_tokens or state.num_tokens > tracker.save_limit:
            return None
        if not self._take_tables(tracker) or tracker.blocks.tables[state.group][num_blocks - 1 : num_blocks] != [state.block]:
            return None
        tracker.extend_chain(state.num_tokens)
        is_known = tracker.chain.num_blocks >= num_blocks and not (tracker.save_blocked or tracker.kv_outdated)
        return tracker if is_known and not self._breaker.has_tripped else None

    # -- reports --------------------------------------------------------------------------------------------------

    def absorb(self, report: StepReport) -> None:
        """Settle what the workers report: commit or abort saves, release the pins of loads, forget what failed its check."""
        if report.usable_frames is not None:
            rank, num_frames = report.usable_frames
            self._usable_frames[rank] = num_frames
            self._store.limit_frames(min(self._usable_frames.values()))
        if report.saved or report.failed:
            num_saved, num_failed = self._store.settle(report.saved, report.failed)
            if num_saved:
                self.counters["saved_chunks"] += num_saved
            if num_failed:
                self.counters["save_failed_chunks"] += num_failed
                if self._breaker.has_tripped:
                    self._count_copies(failed=True)
        for result in report.loads:
            if result.bad_keys:
                damaged = [key for key, problem in result.bad_keys if problem != LAYOUT]
                if damaged:
                    self._store.discard(damaged)
                self.counters["verify_failures"] += len(damaged)
                self.counters["layout_mismatches"] += len(result.bad_keys) - len(damaged)
            if result.bad_keys or result.failed:
                self._queue.flights.pop(result.req_id, None)
                if (tracker := self._trackers.get(result.req_id)) is not None:
                    tracker.fail_load()
                    tracker.saved_chunks = 0
            if (loading := self._loads.get(result.load_id)) is None:
                continue
            if loading.take_in(result):
                del self._loads[result.load_id]
                loading.unpin()
                if loading.says_whether_copies_work:
                    self._count_copies(failed=loading.has_failed)

    def _count_copies(self, *, failed: bool) -> None:
        """A load ended on every rank, or, while they are tried again, a save failed."""
        if self._breaker.count(self._clock(), failed=failed):
            self.counters["load_breaker_trips"] += 1
            self._queue.clear()

    # -- ends -----------------------------------------------------------------------------------------------------

    def finish(self, req_id: ReqId) -> None:
        """The request ended, however it ended. Copies in flight settle by themselves (I5)."""
        tracker = self._trackers.pop(req_id, None)
        self._queue.forget(req_id)
        if req_id in self._scheduled:
            self._queue.num_running -= 1
        if tracker is not None:
            tracker.drop_lease()
            if tracker.live.num_computed_tokens > 0:
                self._writers.record(tracker)

    def reset(self) -> None:
        """Forget every stored chunk, also those being saved; KV that requests hold from before now is no longer saved."""
        for tracker in self._trackers.values():
            tracker.kv_outdated = bool(tracker.blocks)
            tracker.forget_saves()
        self._writers.clear()
        self._queue.clear()
        self._store.clear()

    def count_on(self, num_frames: int) -> None:
        """So many frames are the store's, of an arena in which others have theirs."""
        if self._arena is not None:
            self._queue.num_frames = min(self._arena.num_frames, num_frames)

    @property
    def has_queued_loads(self) -> bool:
        """The next plan will name frames that are known already: it must be of the same arena."""
        return bool(self._queued_loads)

    def meet_store(self, arena: ArenaSpec | None) -> None:
        """The store is another, or has lost all that it had: nothing that was saved is known to be there, and no frame is known.

        Not while there are queued loads.
        """
        for tracker in self._trackers.values():
            tracker.forget_saves()
        self._queue.clear()
        if arena is None or not arena.is_same_memory(self._arena):
            self._usable_frames.clear()
            self._queue.num_frames = arena.num_frames if arena is not None else 0
        self._arena = arena

    def stop(self) -> None:
        """Offer, save and forget nothing from now on; what is in flight settles as usual."""
        self._loads_allowed = self._saves_allowed = False
        self._queue.clear()
        if self._announcer is not None:
            self._announcer.withdraw()

    def close(self) -> None:
        """Release every pin. Reservations end with the store's session: workers may still write to their frames."""
        self._queue.clear()
        self._queue.flights.clear()
        self._trackers.clear()
        for loading in self._loads.values():
            loading.unpin()
        self._loads.clear()
        self._queued_loads.clear()

    @property
    def has_work_in_flight(self) -> bool:
        """Copies that some worker has not reported yet: the engine must go on polling."""
        return bool(self._store.num_in_flight or self._loads)

    def _tracker(self, live: LiveRequest) -> Tracker:
        tracker = self._trackers.get(live.req_id)
        if tracker is None:
            saves = live.saves
            prompt_only = self._save_prompts_only if saves is None else saves == "prompt"
            tracker = self._trackers[live.req_id] = Tracker(live, self._new_chain, self._shape.lookahead, prompt_only)
        return tracker
