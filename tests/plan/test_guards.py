"""Tests the scheduler side in situations that the symbolic engine rarely produces.

The tests call each hook directly.
"""

from typing import Any

import pytest
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, serve, tables

from kvloft.plan.answers import Miss
from kvloft.plan.save_planner import SavePlanner
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import StepPlan, StepReport
from kvloft.seam.shape import ArenaSpec
from kvloft.seam.views import NewRequest, StepView

A = ReqId("a")


def saved_blocks(plan: StepPlan) -> list[tuple[BlockId, ...]]:
    return [copy.blocks for save in plan.saves for copy in save.chunks]


def settled(engine: SymbolicEngine, plan: StepPlan) -> None:
    """Report every copy as failed, because no data was written."""
    engine.core.absorb(
        StepReport(failed=tuple(copy.ticket for save in plan.saves for copy in save.chunks))
    )


def view_of_new(
    computed: int, table: list[int], scheduled: int, req_id: ReqId = A, **more: Any
) -> StepView:
    new: Any = NewRequest(req_id, computed, table)  # type: ignore[arg-type]
    return StepView(new=[new], num_scheduled_tokens={req_id: scheduled}, **more)


def view_of_running(computed: int, scheduled: int, grown: list[int] | None = None) -> StepView:
    added: Any = [(A, grown)] if grown else []
    return StepView(
        running=[A],
        num_computed_tokens=[computed],
        grown=added,
        num_scheduled_tokens={A: scheduled},
    )


def started(table: list[int], scheduled: int) -> tuple[SymbolicEngine, Request, StepPlan]:
    """Admit a request with 12 tokens in blocks of 2, and plan its first step. Return the engine,
    the request and the plan.
    """
    engine = SymbolicEngine(Setup(block_tokens=2))
    request = Request(A, PROMPT[:12], 9)
    engine.core.admit(request, 0, tables(table))
    return engine, request, engine.core.plan_step(view_of_new(0, table, scheduled))


def test_tokens_that_became_fewer_are_offered_only_as_far_as_they_go() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("b", list(PROMPT), 2))
    request = Request(A, list(PROMPT), 2)
    assert engine.match(request, 0) == 16
    del request.token_ids[9:]
    assert engine.match(request, 0) == 8
    engine.core.finish(A)


def test_tokens_that_became_more_are_offered_too() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("b", list(PROMPT), 2))
    request = Request(A, PROMPT[:12], 2)
    assert engine.match(request, 0) == 12
    request.token_ids += PROMPT[12:]
    assert engine.match(request, 0) == 16
    engine.core.finish(A)


def test_a_block_that_comes_later_than_its_tokens_is_saved_when_it_comes() -> None:
    engine, request, _ = started([1, 2, 3, 4, 5], 12)
    request.token_ids += [1, 2]
    assert saved_blocks(engine.core.plan_step(view_of_running(12, 2, [6, 7]))) == [(6,), (7,)]


def test_a_unit_is_saved_as_soon_as_its_tokens_are_known_though_drafts_were_rejected() -> None:
    """While draft tokens are in flight, the frontier is further ahead of the known tokens than
    afterwards.
    """
    engine, request, _ = started([1, 2, 3, 4, 5, 6, 7, 8, 9], 12)
    drafts: Any = {A: 2}
    for computed in (12, 15):
        view = view_of_running(computed, 3)._replace(num_draft_tokens=drafts)
        assert not engine.core.plan_step(view).saves
    request.token_ids += [1, 2]
    assert saved_blocks(engine.core.plan_step(view_of_running(13, 1))) == [(7,)]


def test_a_hit_of_a_block_that_the_last_result_of_its_request_completed_is_continued() -> None:
    """With async scheduling, vLLM caches a block that the last result of a request completes. The
    request has no further step.
    """
    engine, request, _ = started([1, 2, 3, 4, 5, 6, 7, 8], 12)
    engine.core.plan_step(view_of_running(12, 1))
    engine.core.plan_step(view_of_running(13, 1))
    request.token_ids += [1, 2]
    request.num_computed_tokens = 14
    engine.core.finish(A)
    table, name = [1, 2, 3, 4, 5, 6, 7, 10, 11], ReqId("b")
    other: Any = Request(name, [*request.token_ids, 0, 0, 0], 9)
    engine.match(other, 14)
    engine.core.admit(other, 0, tables(table))
    assert (10,) in saved_blocks(engine.core.plan_step(view_of_new(14, table, 3, name)))


def test_a_request_admitted_again_outside_a_step_saves_nothing_until_a_step_names_it() -> None:
    """Until a step names the request, its `num_computed_tokens` may include tokens of a load that
    has not started.
    """
    engine, request, _ = started([1, 2, 3, 4, 5, 6], 2)
    engine.core.admit(request, 0, tables([7, 8, 9, 10, 11, 12]))
    request.num_computed_tokens = 8
    assert not engine.core.plan_step(StepView()).saves


def test_a_request_recomputed_after_a_reset_is_saved_with_an_equal_first_block() -> None:
    engine, request, _ = started([1, 2, 3, 4, 5, 6], 12)
    engine.core.reset()
    assert not engine.core.plan_step(view_of_running(12, 1)).saves
    engine.core.admit(request, 0, tables([1, 8, 9, 10, 11, 12]))
    view = view_of_new(0, [1, 8, 9, 10, 11, 12], 12, preempted=frozenset([A]))
    assert len(saved_blocks(engine.core.plan_step(view))) == 6


def test_blocks_that_a_save_still_reads_are_fenced_in_every_kind_of_step() -> None:
    engine, _, first = started([1, 2, 3, 4, 5, 6], 6)
    assert saved_blocks(first) == [(1,), (2,), (3,)]
    assert first.rewritten == (), "the request's own step writes before the save reads"
    assert engine.core.plan_step(view_of_new(0, [3, 9, 2], 5, ReqId("b"))).rewritten == (3, 2)
    assert set(engine.core.plan_loads_only().rewritten) == {1, 2, 3}
    assert engine.core.plan_step(view_of_running(6, 1, [2])).rewritten == (2,)
    settled(engine, first)
    assert engine.core.plan_step(view_of_new(0, [3, 9, 2], 5, ReqId("b"))).rewritten == ()


@pytest.mark.parametrize(
    ("num_frames", "table"), [(5, [1, 2, 3, 4, 5, 6]), (5, [1, 0, 3, 4, 5, 6]), (1, [1, 2])]
)
def test_reservations_are_aborted_if_planning_fails(
    num_frames: int, table: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails during the lookup after a reservation that got no frame."""
    engine = SymbolicEngine(Setup(block_tokens=2, num_frames=num_frames))
    engine.core.admit(Request(A, PROMPT[:12], 9), 0, tables(table))

    def lookup(chain: Any) -> Any:
        assert len(engine.store.tickets) == num_frames - table.count(0), (
            "expected one ticket per frame, without null blocks"
        )
        raise RuntimeError

    monkeypatch.setattr(engine.store, "lookup", lookup)
    with pytest.raises(RuntimeError):
        engine.core.plan_step(view_of_new(0, table, 12))
    assert not engine.core.plan_loads_only().saves
    assert not engine.store.tickets, "frames would stay reserved until the engine exits"
    engine.core.close()


def test_reservations_that_cannot_be_recorded_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planning fails in its last action before the caller receives the plan."""
    engine = SymbolicEngine(Setup(block_tokens=2, num_frames=1))
    table = list(range(1, 7))
    engine.core.admit(Request(A, PROMPT[:10], 9), 0, tables(table))

    def remember(*_: Any, **__: Any) -> None:
        assert engine.store.tickets
        raise RuntimeError

    monkeypatch.setattr(SavePlanner, "_note_owed", remember)
    with pytest.raises(RuntimeError):
        engine.core.plan_step(view_of_new(0, table, 10))
    assert not engine.core.plan_loads_only().saves
    assert not engine.store.tickets, "frames would stay reserved until the engine exits"
    engine.core.close()


def test_frames_that_some_rank_cannot_copy_to_are_not_taken() -> None:
    engine = SymbolicEngine(Setup(num_ranks=2))
    for rank, num_frames, limit in ((0, 9, 9), (1, 4, 4), (0, 30, 4), (1, 1 << 31, 30)):
        engine.core.absorb(StepReport(usable_bytes=(rank, num_frames * 4096)))
        assert engine.store.frame_limit == limit
    engine.core.close()


def saved(engine: SymbolicEngine, plan: StepPlan) -> None:
    engine.core.absorb(
        StepReport(saved=tuple(copy.ticket for save in plan.saves for copy in save.chunks))
    )


def test_a_new_store_gets_all_saves_again() -> None:
    engine, _, first = started([5, 6, 7, 8, 9, 10], 8)
    engine.store.check_visible = lambda *_: None  # the frames have no valid content
    saved(engine, first)
    assert saved_blocks(first) == [(5,), (6,), (7,), (8,)]
    again = engine.core.plan_step(view_of_running(8, 2))
    assert saved_blocks(again) == [(9,)], "the other blocks are known to be stored"
    saved(engine, again)
    arena = ArenaSpec("", 7 * 4096, 4096, (), id=2)
    engine.core.absorb(StepReport(usable_bytes=(0, 3 * 4096)))
    engine.store.clear()
    engine.store.frame_limit = 7
    engine.core.meet_store(arena)
    plan = engine.core.plan_step(view_of_running(10, 2))
    assert (saved_blocks(plan), plan.arena) == ([(5,), (6,), (7,), (8,), (9,), (10,)], arena)
    settled(engine, plan)
    engine.core.absorb(StepReport(usable_bytes=(1, 6 * 4096)))
    assert engine.store.frame_limit == 6, "reports about the old arena must be ignored"
    engine.core.close()


def test_nothing_is_offered_of_a_store_that_is_gone_and_queued_loads_name_its_frames() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("b", list(PROMPT), 2))
    request = Request(A, list(PROMPT), 2)
    assert engine.match(request, 0) == 16
    assert not engine.core.has_queued_loads
    engine.core.meet_store(None)
    assert engine.store.stats()["leases"] == 0, "an offer of the previous store must be released"
    assert engine.match(request, 0) == 16
    engine.core.admit(request, 16, tables([1, 2, 3, 4, 5]))
    assert engine.core.has_queued_loads
    assert engine.core.plan_loads_only().loads
    assert not engine.core.has_queued_loads
    engine.core.close()


def test_an_unplanned_save_does_not_count_after_recomputation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SymbolicEngine(Setup(block_tokens=2))
    table, tokens = list(range(1, 402)), list(range(800))
    request = Request(A, tokens[:601], 9)
    engine.core.admit(request, 0, tables(table))
    settled(engine, engine.core.plan_step(view_of_new(0, table, 601)))
    request.token_ids += tokens[601:603]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(engine.store, "reserve", fail)
        engine.core.plan_step(view_of_running(601, 2))
    engine.core.plan_loads_only()
    engine.core.plan_step(StepView(preempted=frozenset([A])))
    request.token_ids += tokens[603:]
    assert engine.match(request, 0) == 0
    engine.core.admit(request, 0, tables(table))
    plan = engine.core.plan_step(view_of_new(0, table, 702))
    assert saved_blocks(plan)[0] == (1,)
    engine.core.close()


def fail(*_: Any) -> Any:
    raise RuntimeError


def test_kv_events_follow_the_plan() -> None:
    """The announcer runs later, so that its errors cannot affect a plan or an admission."""
    engine = SymbolicEngine(Setup(block_tokens=2))
    told: list[Any] = []

    class Announcer:
        def note(self, live: Any, _chain: Any, units: range) -> None:
            told.append((live.req_id, (units.start, units.stop)))

        def note_states(self, live: Any, _chain: Any, num_blocks: int) -> None:
            told.append((live.req_id, num_blocks))

    engine.core._notes.announcer = Announcer()  # type: ignore[assignment]
    serve(engine, Request("b", list(PROMPT), 2))
    request = Request(A, PROMPT[:12], 9)
    num_tokens = engine.match(request, 0)
    assert num_tokens
    engine.core.admit(request, num_tokens, tables([1, 2, 3, 4, 5, 6]))
    engine.core.plan_step(view_of_new(num_tokens, [1, 2, 3, 4, 5, 6], 12 - num_tokens))
    assert not told
    for note in engine.core.take_notes():
        note()
    assert ("b", (0, len(PROMPT) // 2)) in told and (A, num_tokens // 2) in told
    assert not engine.core.take_notes()


def test_kv_computed_without_weights_is_neither_saved_nor_loaded() -> None:
    """Sleep at level 2 discards the weights, and waking up does not load new weights."""
    engine, _, plan = started([1, 2, 3, 4, 5, 6], 4)
    assert saved_blocks(plan) == [(1,), (2,)]
    engine.core.pause_caching()
    assert engine.core.plan_step(view_of_running(4, 4)).saves == ()
    engine.core.resume_caching()
    assert engine.core.plan_step(view_of_running(8, 4)).saves == (), "the KV depends on garbage"
    engine.core.finish(A)
    other = Request(ReqId("b"), PROMPT[:12], 9)
    engine.core.admit(other, 0, tables([7, 8, 9, 10, 11, 12]))
    plan = engine.core.plan_step(view_of_new(0, [7, 8, 9, 10, 11, 12], 12, ReqId("b")))
    assert saved_blocks(plan), "a request that began with the new weights is saved"


def test_nothing_is_offered_while_there_are_no_weights() -> None:
    engine = SymbolicEngine(Setup(block_tokens=2))
    serve(engine, Request(A, PROMPT[:12], 1))
    request = Request(ReqId("b"), PROMPT[:12], 9)
    engine.core.pause_caching()
    assert engine.core.match(request, 0) == Miss()
    engine.core.resume_caching()
    assert engine.core.match(request, 0) != Miss()


@pytest.mark.parametrize(
    ("num_loaded", "is_loaded_in_step"),
    [(None, True), (8, False), (0, True)],
    ids=["in the step", "before", "in the step, after a failed load"],
)
def test_kv_that_a_sibling_loads_during_the_forward_pass_is_not_saved(
    num_loaded: int | None, is_loaded_in_step: bool
) -> None:
    """The load can still fail, and vLLM reports this after the step."""
    engine = SymbolicEngine(Setup(block_tokens=2))
    engine.core.meet_siblings()
    request, table = Request(A, PROMPT[:12], 9), [1, 2, 3, 4, 5, 6]
    engine.core.match(request, 0)
    engine.core.admit(request, 0, tables(table))
    if num_loaded is not None:  # an asynchronous load, after which vLLM admits the request again
        engine.core.plan_step(StepView())
        request.num_computed_tokens = num_loaded
        engine.core.admit(request, 0, tables(table))
    plan = engine.core.plan_step(view_of_new(8, table, 4))
    assert bool(saved_blocks(plan)) == (not is_loaded_in_step)
    assert engine.core.counters["save_blocked_requests"] == int(is_loaded_in_step)


def test_the_plan_lists_blocks_that_a_sibling_may_overwrite_while_saves_read_them() -> None:
    engine, _, plan = started([1, 2, 3, 4, 5, 6], 12)
    engine.core.meet_siblings()
    assert saved_blocks(plan)
    engine.core.finish(A)  # vLLM reuses the blocks, but the copies have not finished
    other = Request(ReqId("b"), [3] * 12, 9)
    engine.core.match(other, 0)
    engine.core.admit(other, 0, tables([5, 6, 7, 8, 9, 10]))
    assert set(engine.core.plan_step(StepView()).sibling_blocks) == {5, 6}
    settled(engine, plan)
    third = Request(ReqId("c"), [3] * 12, 9)
    engine.core.match(third, 0)
    engine.core.admit(third, 0, tables([1, 2, 3, 4, 11, 12]))
    assert engine.core.plan_step(StepView()).sibling_blocks == ()


def test_a_failed_plan_lists_all_blocks_that_saves_read_for_siblings() -> None:
    engine, _, _ = started([1, 2, 3, 4, 5, 6], 12)
    assert engine.core.plan_loads_only().sibling_blocks == ()
    engine, _, _ = started([1, 2, 3, 4, 5, 6], 12)
    engine.core.meet_siblings()
    assert set(engine.core.plan_loads_only().sibling_blocks) == {1, 2, 3, 4, 5, 6}


def test_a_hit_on_part_of_a_block_is_not_a_siblings_load() -> None:
    engine = SymbolicEngine(Setup(block_tokens=2))
    engine.core.meet_siblings()
    request, table = Request(A, PROMPT[:12], 9), [1, 2, 3, 4, 5, 6]
    engine.core.match(request, 0)
    engine.core.admit(request, 0, tables(table))
    assert saved_blocks(engine.core.plan_step(view_of_new(1, table, 11)))


@pytest.mark.parametrize("ends", ["pause_caching", "release_waiting"])
def test_waiting_requests_release_their_chunks(ends: str) -> None:
    """Requests can wait for minutes while weights are replaced."""
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("first", list(PROMPT), 1))
    assert engine.match(Request("r", list(PROMPT), 1), 0)
    assert any(entry.pins for entry in engine.store.entries.values())
    getattr(engine.core, ends)()
    assert not any(entry.pins for entry in engine.store.entries.values())
