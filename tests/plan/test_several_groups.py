"""Tests the scheduler side on the real store, with multiple KV cache groups or only sliding
windows: saves, skipped saves and loads.
"""

from typing import Any

import pytest
from sim_request import Request, tokens_of

from kvloft import _core
from kvloft.plan import PlanSettings, SchedulerCore
from kvloft.plan.breaker import MAX_FAILED_LOADS
from kvloft.plan.settings import PoolSize
from kvloft.seam.batch import Tables
from kvloft.seam.ids import ReqId
from kvloft.seam.plan import LoadResult, StepPlan, StepReport
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.seam.views import BoundaryState, NewRequest, StepView
from kvloft.store import arena_of, groups_of

BLOCK = 4
FRAME = 8192
SHAPE = CacheShape(
    (GroupShape(BLOCK, kind="window", reach=5), GroupShape(BLOCK), GroupShape(BLOCK, kind="state")),
)
PROMPT = list(range(100, 117))


class Bench:
    """The scheduler side of an engine, with a real store."""

    def __init__(self, shape: CacheShape = SHAPE, pool: PoolSize | None = None) -> None:
        self.store = _core.Session(
            frame_bytes=FRAME, host_bytes=FRAME * 64, namespace=bytes(32), groups=groups_of(shape)
        )
        self.main = shape.main
        root = _core.root_key(bytes(32), None, None)
        arena = arena_of(self.store, shape)
        chains = lambda _, lookahead: _core.KeyChain(  # noqa: E731
            root, block_tokens=BLOCK, lookahead=lookahead
        )
        self.now_s = 0.0
        self.core = SchedulerCore(
            self.store,
            chains,
            PlanSettings(shape, arena, wait_s=10.0, shares_blocks=True, pool=pool),
            clock=lambda: self.now_s,
        )

    def step(
        self,
        request: Request,
        num: int,
        tables: Tables | None,
        *,
        new: bool = True,
        states: Any = (),
    ) -> StepPlan:
        """Plan a step with ``num`` tokens of ``request``."""
        req_id, computed = ReqId(request.req_id), request.num_computed_tokens
        columns: dict[str, Any] = {"new": [NewRequest(req_id, computed, ())]} if new else {}
        if not new:
            columns = {"running": [req_id], "num_computed_tokens": [computed]}
        view = StepView(
            **columns,
            num_scheduled_tokens={req_id: num},
            total_scheduled_tokens=num,
            tables=lambda _: tables,
            states=states,
        )
        request.num_computed_tokens += num
        return self.core.plan_step(view)

    def match(self, request: Request, local_tokens: int) -> int | None:
        return tokens_of(self.core.match(request, local_tokens))  # type: ignore[arg-type]

    def finish(self, plan: StepPlan) -> None:
        tickets = [ticket for save in plan.saves for ticket in save.chunks.tickets()]
        self.core.absorb(StepReport(saved=tuple(tickets)))


def tables_of(window: list[int]) -> Tables:
    return Tables([window, [11, 12, 13, 14, 15], [0, 0, 0, 34, 35]], SHAPE.main)  # type: ignore[list-item]


def request_of(req_id: str = "a", ids: list[int] = PROMPT) -> Request:
    return Request(ReqId(req_id), list(ids), 9, num_prompt_tokens=len(ids))


def saved(plan: StepPlan) -> set[tuple[int, int]]:
    """Return (group, block) of every saved chunk."""
    batches = [each for save in plan.saves for each in save.chunks.by_group()]
    return {(group, block) for group, batch in batches for block in batch.block_ids()}


def saving_step(bench: Bench, request: Request) -> StepPlan:
    tables = tables_of([0, 22, 23, 24, 25])
    bench.core.admit(request, 0, tables)
    state = BoundaryState(ReqId(request.req_id), 2, 34, 16)  # type: ignore[arg-type]
    return bench.step(request, 17, tables, states=[state])


def test_each_group_s_complete_blocks_are_saved_and_found_again() -> None:
    bench = Bench()
    plan = saving_step(bench, request_of())
    assert saved(plan) == {(1, 11), (1, 12), (1, 13), (1, 14), (0, 22), (0, 23), (0, 24), (2, 34)}
    bench.finish(plan)
    bench.core.finish(ReqId("a"))
    other = request_of("b", [*PROMPT, 9])
    assert bench.match(other, 0) == 16
    bench.core.admit(other, 16, tables_of([0, 0, 53, 54, 55]))
    (load,) = bench.step(other, 0, tables_of([0, 0, 53, 54, 55])).loads
    assert not load.lost
    assert {group: batch.block_ids() for group, batch in load.chunks.by_group()} == {
        1: [11, 12, 13, 14],
        0: [53, 54],
        2: [34],
    }


def test_a_hung_load_keeps_its_frames_and_waiting_requests_compute() -> None:
    bench = Bench(pool=PoolSize(14, step_tokens=16))
    bench.finish(saving_step(bench, request_of()))
    bench.core.finish(ReqId("a"))
    first, second = request_of("b", [*PROMPT, 9]), request_of("c", [*PROMPT, 8])
    assert bench.match(first, 0) == 16
    bench.core.admit(first, 16, tables_of([0, 0, 53, 54, 55]))
    pins = bench.store.stats()["pins"]
    for now_s, answer in ((0.0, None), (9.9, None), (10.0, 0), (30.0, 0)):
        bench.now_s = now_s
        assert bench.match(second, 0) == answer
    assert bench.store.stats()["pins"] == pins, "the request must not pin chunks"
    bench.core.finish(ReqId("b"))
    assert bench.match(second, 0) == 16, "there are free blocks again"


def test_without_a_state_there_is_no_hit_and_with_one_less_it_ends_there() -> None:
    bench = Bench()
    plan = saving_step(bench, request_of())
    state = plan.saves[-1].chunks
    tickets = [ticket for save in plan.saves[:-1] for ticket in save.chunks.tickets()]
    bench.core.absorb(StepReport(saved=tuple(tickets), failed=tuple(state.tickets())))
    assert bench.match(request_of("b"), 0) == 0


@pytest.mark.parametrize("happens", ["reset", "plan_loads_only"])
def test_kv_computed_before_a_reset_or_an_unreadable_step_is_not_saved(happens: str) -> None:
    bench = Bench()
    request = request_of()
    bench.finish(saving_step(bench, request))
    request.token_ids += [1, 2, 3, 4]
    getattr(bench.core, happens)()
    state = BoundaryState(ReqId("a"), 2, 35, 20)  # type: ignore[arg-type]
    assert not bench.step(
        request, 4, tables_of([0, 22, 23, 24, 25]), new=False, states=[state]
    ).saves


@pytest.mark.parametrize("tables", [None, Tables([[], [], []], SHAPE.main)])
def test_a_step_without_tables_saves_later_and_keeps_resets(
    tables: Tables | None,
) -> None:
    bench = Bench()
    request = request_of()
    bench.core.admit(request, 0, tables_of([0, 22, 23, 24, 25]))
    assert not bench.step(request, 17, tables).saves
    request.token_ids += [1, 2, 3, 4]
    assert (1, 11) in saved(bench.step(request, 1, tables_of([0, 22, 23, 24, 25]), new=False))
    assert not bench.step(request, 2, tables, new=False).saves, (
        "the fifth block is complete but was not reported"
    )
    bench.core.reset()
    assert not bench.step(request, 1, tables_of([0, 22, 23, 24, 25]), new=False).saves


def test_a_state_between_two_boundaries_is_not_kept_as_that_of_the_first() -> None:
    bench, tables = Bench(), tables_of([0, 22, 23, 24, 25])
    bench.core.admit(request := request_of(), 0, tables)
    assert (2, 34) not in saved(
        bench.step(request, 17, tables, states=[BoundaryState(ReqId("a"), 2, 34, 17)])
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(("saves", "is_kept"), [("all", True), ("prompt", False)])
def test_a_state_behind_the_prompt_is_kept_unless_prompts_only_are(
    saves: str, is_kept: bool
) -> None:
    bench, tables = Bench(), tables_of([0, 22, 23, 24, 25])
    request = Request(ReqId("a"), PROMPT[:14], 9, num_prompt_tokens=14, saves=saves)
    bench.core.admit(request, 0, tables)
    bench.step(request, 14, tables)
    request.token_ids += [1, 2, 3]
    plan = bench.step(request, 3, tables, new=False, states=[BoundaryState(ReqId("a"), 2, 34, 16)])  # type: ignore[arg-type]
    assert ((2, 34) in saved(plan)) == is_kept


def test_a_state_freed_in_the_same_pass_is_not_saved() -> None:
    bench, tables = Bench(), tables_of([0, 22, 23, 24, 25])
    bench.core.admit(request := request_of(), 0, tables)
    state = BoundaryState(ReqId("a"), 2, 35, 16)  # type: ignore[arg-type]
    assert not any(
        group == 2 for group, _ in saved(bench.step(request, 17, tables, states=[state]))
    )


def test_a_hit_leaves_a_token_of_the_prompt_to_compute() -> None:
    bench = Bench()
    bench.finish(saving_step(bench, request_of()))
    assert bench.match(request_of("b", PROMPT[:16]), 0) == 0, (
        "only the end of the prompt has a state"
    )
    assert bench.match(request_of("c", PROMPT[:17]), 0) == 16


def test_no_state_is_saved_while_loads_fail() -> None:
    bench = Bench()
    bench.finish(saving_step(bench, request_of()))
    for nth in range(MAX_FAILED_LOADS):
        request = request_of(f"load{nth}", [*PROMPT, 9])
        assert bench.match(request, 0) == 16
        bench.core.admit(request, 16, tables_of([0, 0, 53, 54, 55]))
        (load,) = bench.step(request, 0, tables_of([0, 0, 53, 54, 55])).loads
        bench.core.absorb(StepReport(loads=(LoadResult(load.req_id, load.load_id, failed=True),)))
    assert not saved(saving_step(bench, request_of("b", [7, *PROMPT[1:]])))


def test_a_state_with_unknown_tokens_is_not_saved() -> None:
    bench = Bench()
    request = request_of(ids=PROMPT[:15])
    tables = tables_of([0, 22, 23, 24, 25])
    bench.core.admit(request, 0, tables)
    bench.step(request, 15, tables)
    plan = bench.step(request, 1, tables, new=False, states=[BoundaryState(ReqId("a"), 2, 34, 16)])  # type: ignore[arg-type]
    assert (2, 34) not in saved(plan)


# -- windows in every layer
# ---------------------------------------------------------------------------------------

WINDOW_ONLY = CacheShape((GroupShape(BLOCK, kind="window", reach=5, part_bytes=FRAME),))


def windows(*blocks: int) -> Tables:
    return Tables([blocks], 0)  # type: ignore[list-item]


def test_windows_only_are_saved_and_found_from_the_window_on() -> None:
    bench, request = Bench(WINDOW_ONLY), request_of()
    bench.core.admit(request, 0, windows(21, 22, 23, 24, 25))
    plan = bench.step(request, 17, windows(21, 22, 23, 24, 25))
    assert saved(plan) == {(0, 21), (0, 22), (0, 23), (0, 24)}
    bench.finish(plan)
    other = request_of("b", [*PROMPT, 9])
    assert bench.match(other, 0) == 16
    bench.core.admit(other, 16, windows(0, 0, 53, 54, 55))
    (load,) = bench.step(other, 0, windows(0, 0, 53, 54, 55)).loads
    assert (load.lost, load.chunks.block_ids()) == ((), [53, 54])
    assert bench.core.hit_tokens(ReqId("b")) == {"host": 16}


def test_lost_blocks_of_a_load_exclude_null_blocks() -> None:
    bench, request = Bench(WINDOW_ONLY), request_of()
    bench.core.admit(request, 0, windows(21, 22, 23, 24, 25))
    bench.finish(bench.step(request, 17, windows(21, 22, 23, 24, 25)))
    other = request_of("b", [*PROMPT, 9])
    assert bench.match(other, 0) == 16
    bench.core.admit(other, 16, windows(0, 0, 0, 54, 55))  # vLLM never passes such a table
    (load,) = bench.step(other, 0, None).loads
    assert (load.lost, len(load.chunks)) == ((54,), 0)


def test_a_session_with_a_moved_window_keeps_blocks_from_before_a_reset() -> None:
    bench, request = Bench(WINDOW_ONLY), request_of()
    bench.core.admit(request, 0, windows(21, 22, 23, 24, 25))
    bench.finish(bench.step(request, 17, windows(21, 22, 23, 24, 25)))
    bench.core.reset()
    request.token_ids += range(8)
    bench.core.admit(request, 0, windows(0, 0, 23, 24, 25, 26, 27))
    assert not bench.step(request, 8, windows(0, 0, 23, 24, 25, 26, 27)).saves


def test_windows_of_a_preempted_request_are_computed_again_from_null_blocks() -> None:
    bench, request = Bench(WINDOW_ONLY), request_of()
    bench.core.admit(request, 0, windows(0, 22, 23, 24, 25))
    bench.finish(bench.step(request, 17, windows(0, 22, 23, 24, 25)))
    bench.core.reset()
    request.num_computed_tokens = 0
    bench.core.admit(request, 0, windows(0, 32, 33, 34, 35))
    assert saved(bench.step(request, 17, windows(0, 32, 33, 34, 35))) == {(0, 32), (0, 33), (0, 34)}


def test_a_hit_on_window_blocks_from_before_a_reset_is_not_saved() -> None:
    bench, request = Bench(WINDOW_ONLY), request_of()
    bench.core.admit(request, 0, windows(21, 22, 23, 24, 25))
    bench.finish(bench.step(request, 17, windows(21, 22, 23, 24, 25)))
    bench.core.finish(ReqId("a"))
    bench.core.note_pool_reset()  # simulates an earlier reset of vLLM's own prefix cache
    bench.core.plan_step(StepView())
    bench.core.reset()  # vLLM keeps its own prefix cache
    other = request_of("b", [*PROMPT, 9, 9, 9, 9])
    bench.match(other, 16)
    other.num_computed_tokens = 16
    bench.core.admit(other, 0, windows(0, 0, 23, 24, 55, 56))
    assert not bench.step(other, 5, windows(0, 0, 23, 24, 55, 56)).saves
    assert bench.core.counters["save_blocked_requests"] == 1


@pytest.mark.parametrize("how", ["together", "later"])
def test_a_hit_on_window_blocks_computed_after_a_reset_is_saved(how: str) -> None:
    bench, request = Bench(WINDOW_ONLY), request_of()
    if how == "later":
        bench.core.reset()
        bench.core.plan_step(StepView())
    bench.core.note_pool_reset()  # vLLM clears its own prefix cache, then kvloft's
    if how == "together":
        bench.core.pause_caching()
        bench.core.reset()
        bench.core.resume_caching()
    bench.core.admit(request, 0, windows(21, 22, 23, 24, 25))
    bench.finish(bench.step(request, 17, windows(21, 22, 23, 24, 25)))
    bench.core.finish(ReqId("a"))
    other = request_of("b", [*PROMPT, 9, 9, 9, 9])
    bench.match(other, 16)
    other.num_computed_tokens = 16
    bench.core.admit(other, 0, windows(0, 0, 23, 24, 55, 56))
    assert bench.step(other, 5, windows(0, 0, 23, 24, 55, 56)).saves


# -- hits with a wrong block in one group
# ---------------------------------------------------------------------------------------

WINDOW = GroupShape(BLOCK, kind="window", reach=5, part_bytes=FRAME)
FULL = GroupShape(BLOCK, part_bytes=FRAME)


def compute(bench: Bench, request: Request, *tables: list[int]) -> StepPlan:
    """Schedule an uncached prompt, fail all its saves, and finish the request. Return the plan."""
    blocks = Tables(tables, bench.main)  # type: ignore[arg-type]
    bench.core.admit(request, 0, blocks)
    plan = bench.step(request, len(request.token_ids), blocks)
    tickets = [ticket for save in plan.saves for ticket in save.chunks.tickets()]
    bench.core.absorb(StepReport(failed=tuple(tickets)))
    bench.core.finish(ReqId(request.req_id))
    return plan


def plan_hit(bench: Bench, request: Request, local_tokens: int, *tables: list[int]) -> StepPlan:
    """Schedule a prompt whose first ``local_tokens`` tokens are in vLLM's prefix cache."""
    blocks = Tables(tables, bench.main)  # type: ignore[arg-type]
    bench.match(request, local_tokens)
    request.num_computed_tokens = local_tokens
    bench.core.admit(request, 0, blocks)
    return bench.step(request, len(request.token_ids) - local_tokens, blocks)


@pytest.mark.parametrize(
    ("first", "second", "is_saved"),
    [
        (WINDOW, [0, 0, 43, 44, 85, 86], True),
        (WINDOW, [0, 0, 73, 74, 85, 86], False),
        (FULL, [0, 0, 73, 74, 85, 86], True),
    ],
    ids=["correct", "wrong", "not-checked"],
)
def test_a_wrong_window_block_prevents_saves_only_without_full_attention(
    first: GroupShape, second: list[int], is_saved: bool
) -> None:
    bench = Bench(CacheShape((first, WINDOW)))
    compute(bench, request_of("a"), [21, 22, 23, 24, 25], [41, 42, 43, 44, 45])
    compute(bench, request_of("x", [7] * 17), [61, 62, 63, 64, 65], [71, 72, 73, 74, 75])
    plan = plan_hit(
        bench, request_of("b", [*PROMPT, 9, 9, 9, 9]), 16, [21, 22, 23, 24, 55, 56], second
    )
    assert bool(plan.saves) == is_saved


@pytest.mark.parametrize(("block", "is_saved"), [(42, True), (72, False)])
def test_with_a_draft_model_a_block_for_a_different_next_token_is_not_saved(
    block: int, is_saved: bool
) -> None:
    bench = Bench(CacheShape((FULL, WINDOW), lookahead=1))
    compute(bench, request_of("a"), [21, 22, 23, 24, 25], [41, 42, 43, 44, 45])
    other = request_of("x", [*PROMPT[:8], *[7] * 9])
    compute(bench, other, [61, 62, 63, 64, 65], [71, 72, 73, 74, 75])
    plan = plan_hit(bench, request_of("b"), 8, [21, 22, 53, 54, 55], [41, block, 83, 84, 85])
    assert bool(plan.saves) == is_saved


# -- blocks that are shorter than a unit
# ---------------------------------------------------------------------------------------

SHORT_BLOCKS = CacheShape((GroupShape(2, 2), GroupShape(BLOCK, kind="window", reach=8)))


def short_blocks(*blocks: int) -> Tables:
    return Tables([blocks, [21]], 0, (2, 1))  # type: ignore[list-item]


def test_a_request_with_less_than_a_unit_is_not_saved_after_a_reset() -> None:
    bench, request = Bench(SHORT_BLOCKS), request_of(ids=PROMPT[:2])
    bench.core.admit(request, 0, short_blocks(11))
    bench.step(request, 2, short_blocks(11))
    bench.core.reset()
    request.token_ids += [1, 2]
    assert not bench.step(request, 2, short_blocks(11, 12), new=False).saves


def test_a_short_load_of_a_sibling_keeps_the_blocks() -> None:
    bench, request = Bench(SHORT_BLOCKS), request_of(ids=PROMPT[:9])
    bench.core.meet_siblings()
    bench.match(request, 0)
    bench.core.admit(request, 0, short_blocks(11))
    bench.core.plan_step(StepView())
    request.num_computed_tokens = 2  # the sibling has loaded one block
    table = short_blocks(11, 12, 13, 14, 15)
    bench.core.admit(request, 0, table)
    assert bench.step(request, 7, table).saves
