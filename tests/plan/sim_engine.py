"""A symbolic vLLM: the part of the 0.32 scheduler that a connector can observe, with symbolic paged
KV.

The engine calls hooks in vLLM's order: lookup, admission, plan. Token counts advance after the
plan, and results can arrive one step late. The engine checks the invariants I1, I2, I4, I6, I7, I9
and I10 at each hook. It supports sync and async scheduling, chunked prefill, draft tokens,
preemption, and sessions.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from plan_store import KeyBook, ModelStore
from sim_checks import check_held, check_plan, check_visible
from sim_paged import BlockPool, Work, Workers
from sim_request import Request, Setup, tokens_of

from kvloft.plan import PlanSettings, SchedulerCore
from kvloft.plan.breaker import RETRY_S
from kvloft.seam.batch import Tables
from kvloft.seam.plan import StepPlan
from kvloft.seam.shape import ArenaSpec, CacheShape, GroupShape
from kvloft.seam.views import NewRequest, StepView


@dataclass
class Step:
    works: list[Work]
    plan: StepPlan
    reports: list[Any] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)
    executed: bool = False


class SymbolicEngine:
    """An engine that contains kvloft's scheduler side.

    `schedule`, `execute` and `update` may be called in any valid order.
    """

    def __init__(
        self, setup: Setup, store: ModelStore | None = None, book: KeyBook | None = None
    ) -> None:
        self.setup = setup
        self.book = book or KeyBook(setup.block_tokens, setup.lookahead)
        self.store = store or ModelStore(
            setup.num_frames, setup.with_disk, num_ranks=setup.num_ranks
        )
        self.store.check_visible = partial(check_visible, self)
        self.now = 0.0
        self.core = SchedulerCore(
            self.store,
            self.book.new_chain,
            PlanSettings(
                CacheShape(
                    (GroupShape(setup.block_tokens),),
                    num_ranks=setup.num_ranks,
                    lookahead=setup.lookahead,
                ),
                arena=ArenaSpec(
                    "", setup.num_frames * 4096, 4096, (GroupShape(setup.block_tokens),)
                ),
                wait_s=setup.wait_s,
                shares_blocks=setup.local_cache,
                save_prompts_only=setup.save_prompts_only,
                max_running=setup.max_running,
                draft_limit=setup.draft_limit,
            ),
            clock=lambda: self.now,
        )
        self.pool = BlockPool(setup.num_blocks)
        self.workers = Workers(
            self.store,
            num_ranks=setup.num_ranks,
            num_blocks=setup.num_blocks,
            block_tokens=setup.block_tokens,
        )
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.core.meet_engine(lambda: len(self.running), RETRY_S)
        self.steps: deque[Step] = deque()
        self.preempted_by_reset: set[str] = set()
        self.received: dict[str, int] = {}
        self.ready: set[str] = set()
        self.failed_loads: set[str] = set()
        self.load_ids: set[int] = set()
        self.finished: list[Request] = []
        self.failure_rate = 0.0
        self.num_preemptions = self.num_loaded_tokens = self.num_saved_blocks = 0
        self.unreadable_step = False

    # -- arrivals
    # -----------------------------------------------------------------------------------------

    def add(self, request: Request) -> Request:
        assert request.req_id not in self.requests
        self.requests[request.req_id] = request
        self.waiting.append(request)
        return request

    def feed_session(self, request: Request, update: list[int] | None) -> None:
        """Add input to a session, or end the session if ``update`` is None.

        The input is used after the current turn has finished.
        """
        assert request.updates is not None
        request.updates.append(update)  # type: ignore[arg-type]
        if request.status == "session":
            self._continue_session(request)

    # -- schedule
    # -----------------------------------------------------------------------------------------

    def can_schedule(self) -> bool:
        return len(self.steps) < (2 if self.setup.run_ahead else 1)

    def schedule(
        self, budget: int = 1 << 30, rng: Random | None = None, *, fussy: float = 0.0
    ) -> StepPlan:
        """Run schedule() once.

        Requests are skipped, matched twice, or dropped after a match, each with probability
        ``fussy``.
        """
        rng = rng or Random(0)
        self._num, self._drafts = dict[str, int](), dict[str, int]()
        self._new_blocks: dict[str, list[int]] = {}
        self._preempted: set[str] = set(self.preempted_by_reset)
        self.preempted_by_reset.clear()
        num_preempted = len(self._preempted)
        budget = self._schedule_running(budget, rng, fussy)
        was_running = [r for r in self.running if r.req_id in self._num]
        new: list[Request] = []
        if len(self._preempted) == num_preempted:
            new = self._schedule_waiting(budget, rng, fussy)
        view = StepView(
            new=[NewRequest(r.req_id, r.num_computed_tokens, list(r.blocks)) for r in new],
            running=[r.req_id for r in was_running],
            num_computed_tokens=[r.num_computed_tokens for r in was_running],
            grown=[(r.req_id, ids) for r in was_running if (ids := self._new_blocks.get(r.req_id))],  # type: ignore[misc]
            num_scheduled_tokens=self._num,  # type: ignore[arg-type]
            total_scheduled_tokens=sum(self._num.values()),
            num_draft_tokens=self._drafts,  # type: ignore[arg-type]
            preempted=frozenset(self._preempted),  # type: ignore[arg-type]
        )
        if self.unreadable_step:
            self.unreadable_step = False
            plan = self.core.plan_loads_only()
        else:
            plan = self.core.plan_step(view)
        check_plan(self, plan)
        fresh = {r.req_id for r in new}
        works = [self._work(r, r.req_id in fresh) for r in (*was_running, *new)]
        for request in (*was_running, *new):
            self._advance(request)
        self.steps.append(Step(works, plan))
        return plan

    def _schedule_running(self, budget: int, rng: Random, fussy: float) -> int:
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            last_step_planned = (
                request.placeholders > 0
                and request.num_computed_tokens + 2 - request.placeholders
                >= request.num_prompt_tokens + request.max_tokens
            )
            count = (
                request.num_tokens
                + request.spec
                + request.placeholders
                - request.num_computed_tokens
            )
            count = min(count, budget)
            if last_step_planned or count <= 0 or rng.random() < fussy:
                at += 1
                continue
            while (taken := self._grow(request, request.num_computed_tokens + count)) is None:
                victim = rng.choice(self.running[at:]) if rng.random() < fussy else self.running[-1]
                self.running.remove(victim)
                self._preempt(victim, self._preempted)
                if victim is request:
                    break
            if taken is None:
                break
            self._new_blocks[request.req_id] = taken
            self._note(request, count)
            budget -= count
            at += 1
        return budget

    def _note(self, request: Request, count: int) -> None:
        self._num[request.req_id] = count
        drafts = request.num_computed_tokens + count - request.num_tokens - request.placeholders
        if drafts > 0:
            self._drafts[request.req_id] = drafts
        request.spec = 0
        self._publish(request, min(request.num_computed_tokens + count, request.num_tokens))

    def _schedule_waiting(self, budget: int, rng: Random, fussy: float) -> list[Request]:
        new: list[Request] = []
        for request in sorted(
            self.waiting, key=lambda r: not r.blocks
        ):  # requests that hold blocks come first, as in vLLM
            if budget <= 0 or len(self.running) >= self.setup.max_running:
                break
            if not self._unblocked(request):
                continue
            external, local = 0, []
            if request.num_computed_tokens == 0:
                local = self._local_hit(request)
                answer = self._ask(request, len(local) * self.setup.block_tokens, rng, fussy)
                if answer is None or rng.random() < fussy:
                    continue
                external = answer
            computed = (
                len(local) * self.setup.block_tokens + external or request.num_computed_tokens
            )
            count = 0 if external else min(request.num_tokens - computed, budget)
            if count == 1 and self.setup.num_drafts and computed and budget > self.setup.num_drafts:
                # vLLM schedules as many tokens as for a decode with draft tokens
                count += self.setup.num_drafts
            if not self._admit(request, local, computed + count, external):
                break
            request.num_computed_tokens = computed
            if external:
                request.status = "loading"
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            new.append(request)
            self._note(request, count)
            budget -= count
        return new

    def match(self, request: Request, local: int, *, may_wait: bool = True) -> int | None:
        return tokens_of(self.core.match(request, local, may_wait=may_wait))  # type: ignore[arg-type]

    def _ask(self, request: Request, local: int, rng: Random, fussy: float) -> int | None:
        answer = self.match(request, local)
        while rng.random() < fussy:
            if answer == 0:
                # after a miss, a repeated call can return a different result
                answer = self.match(request, local)
                continue
            before = {key: (e.state, e.frame, e.pins) for key, e in self.store.entries.items()}
            assert self.match(request, local) == answer, "I9: a repeated call changed the result"
            after = {key: (e.state, e.frame, e.pins) for key, e in self.store.entries.items()}
            assert before == after, "I9: asking again changed the store"
        assert answer is None or answer >= 0
        if answer:
            assert local + answer <= request.num_tokens, "matched more than is stored"
            assert answer % self.setup.block_tokens == 0
            assert not request.skip_load
        return answer

    def _admit(self, request: Request, local: list[int], num_tokens: int, external: int) -> bool:
        size = self.setup.block_tokens
        fresh = max(0, -(-num_tokens // size) - len(local) - len(request.blocks))
        available = len(self.pool.free) - sum(self.pool.refs[b] == 0 for b in local)
        if external:  # an async load must not take blocks that other requests need to continue
            available -= sum(self._missing(r) for r in self.requests.values() if r.blocks)
        if max(fresh, self._missing(request) - len(local) if external else 0) > available:
            return False
        self.pool.touch(local)
        request.blocks += [*local, *self.pool.take(fresh)]
        request.load = (len(local) * size, external) if external else None
        self.core.admit(request, external, Tables([list(request.blocks)]))  # type: ignore[arg-type]
        self.num_loaded_tokens += external
        assert not external or sum(self.core.hit_tokens(request.req_id).values()) == external
        return True

    def _unblocked(self, request: Request) -> bool:
        if request.status == "session":
            return False
        if request.status == "loading":
            if request.req_id not in self.ready:
                return False
            self.ready.discard(request.req_id)
            if request.req_id in self.failed_loads:
                self.failed_loads.discard(request.req_id)
                if request.num_computed_tokens == 0:
                    self._free(request)
            self._publish(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
            request.status, request.load = "waiting", None
        return True

    def _work(self, request: Request, fresh: bool) -> Work:
        return Work(
            request.req_id,
            request.root,
            request.num_computed_tokens,
            self._num[request.req_id],
            self._drafts.get(request.req_id, 0),
            tuple(request.blocks),
            request.contents() if fresh else None,
        )

    def _advance(self, request: Request) -> None:
        count = self._num[request.req_id]
        request.num_computed_tokens += count
        request.in_flight += count
        prefilling = request.num_computed_tokens < request.num_tokens + request.placeholders
        if self.setup.run_ahead and not prefilling:
            request.placeholders += 1 + self._drafts.get(request.req_id, 0)
            request.spec = self.setup.num_drafts

    def _preempt(self, request: Request, told: set[str], drop_stale: bool = False) -> None:
        self._free(request)
        request.status, request.num_computed_tokens, request.spec = "preempted", 0, 0
        request.drop_stale = drop_stale or (request.drop_stale and request.stale > 0)
        request.stale, request.placeholders = request.in_flight, 0
        self.waiting.insert(0, request)
        told.add(request.req_id)
        self.num_preemptions += 1

    # -- blocks
    # -----------------------------------------------------------------------------------------

    def _name(self, request: Request, block: int) -> Any:
        return (
            request.root,
            tuple(request.content(at) for at in range((block + 1) * self.setup.block_tokens)),
        )

    def _local_hit(self, request: Request) -> list[int]:
        hit: list[int] = []
        while (
            self.setup.local_cache and (len(hit) + 1) * self.setup.block_tokens < request.num_tokens
        ):
            block = self.pool.find(self._name(request, len(hit)))
            if block is None:
                break
            hit.append(block)
        return hit

    def _publish(self, request: Request, num_tokens: int) -> None:
        if self.setup.local_cache:
            for block in range(min(num_tokens, request.num_tokens) // self.setup.block_tokens):
                self.pool.publish(self._name(request, block), request.blocks[block])

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        need = -(-num_tokens // self.setup.block_tokens) - len(request.blocks)
        if need > len(self.pool.free):
            return None
        taken = self.pool.take(max(0, need))
        request.blocks += taken
        return taken

    def _missing(self, request: Request) -> int:
        """Return the number of additional blocks that the request needs to compute all of its
        tokens and to run one more step.
        """
        num_tokens = request.num_tokens + 1 + self.setup.num_drafts
        return max(0, -(-num_tokens // self.setup.block_tokens) - len(request.blocks))

    def _free(self, request: Request) -> None:
        self.pool.give_back(request.blocks)
        request.blocks = []

    # -- execute and update
    # ---------------------------------------------------------------------------------------

    def can_execute(self) -> bool:
        return any(not step.executed for step in self.steps)

    def execute(self, rng: Random | None = None, num_copies: list[int] | None = None) -> None:
        """Run the oldest pending step.

        Rank i then completes ``num_copies[i]`` of its copies, or all of them by default.
        """
        rng = rng or Random(0)
        step = next(step for step in self.steps if not step.executed)
        self.workers.forward(step.works, rng)
        self.workers.begin_copies(step.plan, rng, self.failure_rate)
        num_copies = num_copies or [1 << 30] * self.setup.num_ranks
        step.reports, step.loaded, step.bad = self.workers.finish_copies(num_copies)
        step.executed = True

    def can_update(self) -> bool:
        return bool(self.steps) and self.steps[0].executed

    def update(self) -> None:
        """Call update_from_output for the oldest step."""
        step = self.steps.popleft()
        if step.works:  # vLLM does not report the end of every empty step
            self.core.end_step(step.plan.prompt_step)
        failed = self._invalid_blocks(step.bad)
        for work in step.works:
            request = self.requests.get(work.req_id)
            if request is not None and request.status != "finished" and work.req_id not in failed:
                self._take_output(request, work)
        for report in step.reports:
            self.core.absorb(report)
        for req_id in step.loaded:
            self._received(req_id)

    def _invalid_blocks(self, bad: set[int]) -> set[str]:
        failed: set[str] = set()
        for request in list(self.requests.values()):
            if request.status != "loading" or not request.load:
                continue
            local, external = request.load
            first = local // self.setup.block_tokens
            lost = [
                i
                for i in range(first, first + external // self.setup.block_tokens)
                if request.blocks[i] in bad
            ]
            if not lost:
                continue
            failed.add(request.req_id)
            request.num_failed_loads += 1
            if self.setup.fail_policy:
                self.finish(request, aborted=True)
            else:
                request.num_computed_tokens = min(
                    request.num_computed_tokens, lost[0] * self.setup.block_tokens
                )
                self.failed_loads.add(request.req_id)
        return failed

    def _received(self, req_id: str) -> None:
        """Handle finished_recving from one rank. A load is complete after the last rank has
        reported it.
        """
        self.received[req_id] = self.received.get(req_id, 0) + 1
        assert self.received[req_id] <= self.setup.num_ranks, "I10: a load reported twice"
        if self.received[req_id] < self.setup.num_ranks:
            return
        del self.received[req_id]
        assert req_id in self.requests, "I10: finished_recving for an id vLLM does not hold"
        request = self.requests[req_id]
        if request.status == "finished":
            self._free(request)
            del self.requests[req_id]
        else:
            assert request.status == "loading"
            self.ready.add(req_id)

    def _take_output(self, request: Request, work: Work) -> None:
        request.in_flight -= work.num_scheduled
        is_stale = request.stale > 0
        if is_stale:
            request.stale -= work.num_scheduled
            if request.drop_stale:
                return
        if work.num_drafts and work.sampled:
            rejected = work.num_drafts - (len(work.sampled) - 1)
            if not is_stale:
                request.num_computed_tokens -= rejected if request.num_computed_tokens > 0 else 0
                request.placeholders -= rejected if request.placeholders > 0 else 0
        stopped = False
        for i, token in enumerate(work.sampled):
            request.token_ids.append(token)
            request.num_outputs += 1
            stopped = request.num_outputs >= request.max_tokens
            if stopped:
                del work.sampled[i + 1 :]
                break
        if self.setup.run_ahead and not is_stale:
            request.placeholders -= len(work.sampled)
            assert request.placeholders >= 0
        if stopped:
            self._stop(request)
        elif not self.setup.run_ahead and work.sampled and request.status == "running":
            request.spec = self.setup.num_drafts

    def _stop(self, request: Request) -> None:
        if request.updates is None:
            self.finish(request)
            return
        assert not self.setup.num_drafts, "sessions with drafts are not modelled"
        request.num_computed_tokens -= request.placeholders
        request.spec = request.placeholders = 0
        request.drop_stale, request.stale = True, request.in_flight
        if request.status == "running":
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.waiting.append(request)
        request.status = "session"
        if request.updates:
            self._continue_session(request)

    def _continue_session(self, request: Request) -> None:
        """Continue a session as vLLM's `_update_request_as_session` does: keep the computed tokens,
        drop the last sampled token, and extend the prompt.
        """
        assert request.updates
        update = request.updates.pop(0)
        if update is None:
            self.finish(request)
            return
        # If the last output of a turn arrives after the session was preempted, the session has no
        # computed tokens, and vLLM drops its prompt.
        request.tainted |= request.num_computed_tokens < request.num_prompt_tokens
        request.history.append((request.num_outputs, list(update)))
        del request.token_ids[request.num_computed_tokens :]
        request.token_ids += update
        request.num_prompt_tokens = request.num_tokens
        request.num_outputs = 0
        request.status = "waiting"

    def finish(self, request: Request, *, aborted: bool = False) -> None:
        """Finish a request for any reason and call request_finished.

        The blocks of a load in flight stay allocated until all ranks have received the load.
        """
        self.core.finish(request.req_id)
        held = request.status == "loading" and request.req_id not in self.ready
        self.running = [r for r in self.running if r is not request]
        self.waiting = [r for r in self.waiting if r is not request]
        self.ready.discard(request.req_id)
        self.failed_loads.discard(request.req_id)
        request.status = "finished"
        request.tainted = request.tainted or aborted
        self.finished.append(request)
        if not held:
            self._free(request)
            del self.requests[request.req_id]

    # -- resets
    # -----------------------------------------------------------------------------------------

    def reset_prefix_cache(self, *, with_connector: bool = True) -> bool:
        """Act like vLLM's reset_prefix_cache(reset_running_requests=True). With ``with_connector``,
        the weights also change.
        """
        while self.running:
            request = self.running.pop()
            self._preempt(request, self.preempted_by_reset, drop_stale=True)
        if not self.pool.reset():
            return False
        if with_connector:
            self.core.reset()
            self._new_weights()
        return True

    def swap_weights_hot(self) -> None:
        """Change the weights while requests run.

        The KV of these requests then mixes two sets of weights and must never be saved.
        """
        assert not self.setup.local_cache
        self.core.reset()
        self._new_weights()

    def _new_weights(self) -> None:
        self.workers.weights += 1
        for request in self.requests.values():
            request.tainted = True

    # -- to the end
    # -----------------------------------------------------------------------------------------

    def run(self, num_steps: int = 1, budget: int = 1 << 30) -> None:
        for _ in range(num_steps):
            if self.can_schedule():
                self.schedule(budget)
            if self.can_execute() and (
                not self.setup.run_ahead or len(self.steps) == 2 or not self.steps[0].works
            ):
                self.execute()
            if self.can_update() and (
                len(self.steps) == 2 or not self.setup.run_ahead or not self.steps[0].works
            ):
                self.update()
            self.store.tick(1 << 30)
            self.now += 1.0

    def check(self) -> None:
        check_held(self)

    def drain(self) -> None:
        """Process all steps in flight without scheduling further steps."""
        while self.steps:
            if self.can_execute():
                self.execute()
            if self.can_update():
                self.update()
