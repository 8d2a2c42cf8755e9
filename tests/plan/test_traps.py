"""Tests the known traps of vLLM's connector contract on the symbolic engine. Each test checks which
chunks must be hits and which must be misses.
"""

from random import Random
from typing import Any

import pytest
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, both_modes, serve, stored, tables, whole_blocks

from kvloft.plan.admission import LEASE_S
from kvloft.seam.views import MediaItem, NewRequest, StepView

# -- saves
# -------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("budget", [5, 1000])
@pytest.mark.parametrize("num_outputs", [1, 2, 6, 7, 8, 9, 23])
def test_prompt_and_output_are_found_again_but_never_the_last_token(
    run_ahead: bool, num_drafts: int, budget: int, num_outputs: int
) -> None:
    setup = Setup(run_ahead=run_ahead, num_drafts=num_drafts)
    engine = SymbolicEngine(setup)
    request = serve(engine, Request("a", list(PROMPT), num_outputs), budget)
    assert request.num_tokens == len(PROMPT) + num_outputs
    assert stored(engine, request) == whole_blocks(request.num_tokens - 1)
    settle(engine)


@both_modes
def test_second_turn_loads_all_of_the_first(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead, local_cache=False))
    first = serve(engine, Request("a", list(PROMPT), 8))
    second = serve(engine, Request("b", [*first.token_ids, 2, 0, 1], 4))
    assert engine.num_loaded_tokens == whole_blocks(first.num_tokens - 1)
    assert second.num_tokens == first.num_tokens + 7


def test_whole_prompt_may_be_offered() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", PROMPT[:16], 3))
    again = Request("b", PROMPT[:16], 3)
    assert engine.match(again, 0) == 16
    serve(engine, again)
    assert engine.num_loaded_tokens == 16


def test_blocks_of_vllms_own_cache_are_not_loaded() -> None:
    engine = SymbolicEngine(Setup())
    serve(engine, Request("a", PROMPT[:16], 3))
    again = Request("b", PROMPT[:16], 3)
    assert [engine.match(again, local) for local in (0, 4, 8, 12, 16, 8, 0)] == [
        16,
        12,
        8,
        4,
        0,
        8,
        16,
    ]
    engine.core.finish(again.req_id)
    settle(engine)


def test_nothing_is_copied_twice() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", PROMPT[:16], 1))
    before = engine.num_saved_blocks
    serve(engine, Request("b", PROMPT[:16], 1))
    assert engine.num_saved_blocks == before


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "pepper"},
        {"adapter": ("lora", "/lora")},
        {"rows": dict.fromkeys(range(18), "row")},
        {"items": (MediaItem("image", 0, 4),)},
    ],
)
def test_equal_tokens_with_other_differences_are_not_shared(other: dict[str, Any]) -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    serve(engine, Request("b", list(PROMPT), 2, **other))
    assert engine.num_loaded_tokens == 0
    serve(engine, Request("c", list(PROMPT), 2, **other))
    assert engine.num_loaded_tokens == 16


def test_embeddings_never_alias_zero_tokens() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", [0] * 12, 2, rows=dict.fromkeys(range(12), "row")))
    serve(engine, Request("b", [0] * 12, 2))
    serve(engine, Request("c", [0] * 12, 2, rows=dict.fromkeys(range(4, 12), "row")))
    assert engine.num_loaded_tokens == 4, "c shares its first block with b, and nothing with a"


# -- steps that skip a request
# --------------------------------------------------------------------------------


@both_modes
def test_rejected_drafts_are_not_saved_when_a_step_leaves_the_request_out(run_ahead: bool) -> None:
    """All results have arrived, draft tokens of two steps were rejected, and the next step does not
    include the request.
    """
    depth = 2 if run_ahead else 1
    for seed in range(60):
        engine = SymbolicEngine(Setup(run_ahead=run_ahead, num_drafts=3, block_tokens=2))
        engine.add(Request("a", PROMPT[:4], 12))
        rng = Random(seed)
        for budget in [1000, 0] * 9:
            for _ in range(depth):
                engine.schedule(budget)
            for _ in range(depth):
                engine.execute(rng)
            for _ in range(depth):
                engine.update()
            engine.check()
        settle(engine)


def running_alone(num_tokens: int, num_computed: int) -> tuple[SymbolicEngine, Request]:
    """Return an engine and a request in the middle of its prefill, with blocks 1, 2, 3, ... and no
    saves. The tests plan the request's steps by hand.
    """
    engine = SymbolicEngine(Setup(block_tokens=2))
    request = Request("a", PROMPT[:num_tokens], 9)
    request.num_computed_tokens = num_computed
    engine.core.admit(request, 0, tables(list(range(1, num_tokens))))
    return engine, request


@pytest.mark.parametrize("as_new", [False, True])
def test_scheduled_drafts_do_not_count_even_if_more_is_known(as_new: bool) -> None:
    engine, request = running_alone(12, 4)
    req_id: Any = request.req_id
    counts: Any = {"num_scheduled_tokens": {req_id: 5}, "num_draft_tokens": {req_id: 3}}
    if as_new:
        view = StepView(new=[NewRequest(req_id, 4, [1, 2, 3, 4, 5])], **counts)  # type: ignore[list-item]
    else:
        first = StepView(
            new=[NewRequest(req_id, 0, [1, 2, 3, 4, 5])], num_scheduled_tokens={req_id: 4}
        )  # type: ignore[list-item]
        assert [copy.blocks for copy in engine.core.plan_step(first).saves[0].chunks] == [
            (1,),
            (2,),
        ]
        view = StepView(running=[req_id], num_computed_tokens=[4], **counts)
    (plan,) = engine.core.plan_step(view).saves
    assert [copy.blocks for copy in plan.chunks] == [(1,), (2,), (3,)][0 if as_new else 2 :]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_session_that_had_drafts_saves_nothing_of_its_next_input(num_drafts: int) -> None:
    """If the end of a turn cuts off accepted draft tokens, vLLM keeps their KV even if the next
    input has different tokens.
    """
    engine, request = running_alone(12, 4)
    req_id: Any = request.req_id
    drafts: Any = {req_id: num_drafts} if num_drafts else {}
    first = StepView(
        new=[NewRequest(req_id, 4, [1, 2, 3, 4, 5, 6])],
        num_scheduled_tokens={req_id: 1 + num_drafts},
        num_draft_tokens=drafts,
    )  # type: ignore[arg-type]
    assert engine.core.plan_step(first).saves
    request.token_ids = [*request.token_ids[:9], 1, 1, 2, 1]
    request.num_prompt_tokens = 13
    engine.core.admit(request, 0, tables([1, 2, 3, 4, 5, 6]))
    again = StepView(
        new=[NewRequest(req_id, 8, [1, 2, 3, 4, 5, 6])], num_scheduled_tokens={req_id: 4}
    )  # type: ignore[list-item]
    assert bool(engine.core.plan_step(again).saves) == (not num_drafts)


def test_a_preempted_request_is_reset_for_any_token_count() -> None:
    engine, request = running_alone(12, 4)
    req_id: Any = request.req_id
    counts: Any = {"num_scheduled_tokens": {req_id: 1}}
    engine.core.plan_step(StepView(new=[NewRequest(req_id, 1, [1, 2, 3, 4, 5, 6])], **counts))  # type: ignore[list-item]
    request.num_computed_tokens = 8
    assert not engine.core.plan_step(StepView(preempted=frozenset([req_id]))).saves


def test_last_token_of_a_run_ahead_engine_is_not_lost() -> None:
    engine = SymbolicEngine(Setup(run_ahead=True))
    request = serve(engine, Request("a", PROMPT[:3], 6))
    assert request.num_tokens == 9
    assert stored(engine, request) == 8


@both_modes
def test_session_replaces_its_last_token(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead, block_tokens=2))
    request = serve(engine, Request("a", PROMPT[:5], 3, updates=[[2, 2, 0], [1], None]))  # type: ignore[list-item]
    assert request.num_tokens == 5 + 2 + 3 + 2 + 1 + 3
    assert stored(engine, request) == whole_blocks(request.num_tokens - 1, 2)
    settle(engine)


# -- preemption
# ---------------------------------------------------------------------------------------------


@both_modes
def test_preempted_request_loads_its_saved_tokens(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead, local_cache=False))
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.run(4)
    assert engine.reset_prefix_cache(with_connector=False)
    engine.run(1)
    assert request.status == "loading"
    assert engine.num_loaded_tokens >= 16
    settle(engine)
    assert engine.num_preemptions == 1


def test_blocks_refilled_by_another_request_are_not_saved_as_the_first_ones() -> None:
    """Two requests run in a pool that holds one and a half requests. Each preemption hands blocks
    over to the other request, but outputs and frames must stay correct.
    """
    engine = SymbolicEngine(Setup(num_blocks=12, block_tokens=2))
    engine.add(Request("a", PROMPT[:7], 9))
    engine.add(Request("b", [2, *PROMPT[:6]], 9))
    settle(engine)
    assert engine.num_preemptions >= 1
    assert engine.num_loaded_tokens > 0


def test_preemption_named_after_readmission_does_not_undo_it() -> None:
    """reset_prefix_cache preempts requests between steps.

    The step that reports the preemption can also be the step that resumes the request.
    """
    engine = SymbolicEngine(Setup())
    engine.store.drop_next = 1 << 30  # nothing is stored, so the request is resumed without a load
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.run(2)
    engine.reset_prefix_cache(with_connector=False)
    engine.store.drop_next = 0
    plan = engine.schedule()
    assert request.status == "running"
    assert [copy.blocks for save in plan.saves for copy in save.chunks] == [
        (b,) for b in request.blocks[:5]
    ]
    settle(engine)


# -- matching
# ---------------------------------------------------------------------------------------------


def test_a_match_never_taken_is_unpinned_after_a_while() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    asked = Request("b", list(PROMPT), 2)
    assert engine.match(asked, 0) == 16
    for _ in range(100):  # steps of an engine without a free slot for the request
        engine.now += LEASE_S / 100
        engine.schedule()
        engine.drain()
        assert len(engine.store.open_leases) == 1
    engine.now += LEASE_S / 4
    engine.schedule()
    engine.drain()
    assert not engine.store.open_leases
    assert engine.match(asked, 0) == 16, "another call must pin the chunks again"
    engine.core.finish(asked.req_id)
    assert not engine.store.open_leases


def test_asking_without_taking_pins_once() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    asked = Request("b", list(PROMPT), 2)
    assert {engine.match(asked, 0) for _ in range(50)} == {16}
    assert len(engine.store.open_leases) == 1
    assert not engine.core.has_work_in_flight
    engine.core.admit(asked, 0, tables([1, 2, 3, 4, 5]))
    assert not engine.store.open_leases


def test_request_that_skips_reading_is_never_offered_anything_but_is_saved() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", PROMPT[:8], 2))
    request = serve(engine, Request("b", list(PROMPT), 2, skip_load=True))
    assert engine.num_loaded_tokens == 0
    assert stored(engine, request) == 16


def test_pins_of_tokens_that_were_replaced_are_not_offered() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    session = Request("b", list(PROMPT), 2)
    assert engine.match(session, 0) == 16
    session.token_ids = [2, *PROMPT[1:]]
    session.num_prompt_tokens = 5
    assert engine.match(session, 0) == 0
    assert not engine.store.open_leases


def evict_all(engine: SymbolicEngine) -> None:
    while leaves := [
        e
        for e in engine.store.entries.values()
        if e.frame is not None
        and not e.pins
        and e.key not in {c.parent for c in engine.store.entries.values() if c.frame is not None}
    ]:
        engine.store.evict(leaves[0])


def test_disk_chunks_are_waited_for_and_then_loaded() -> None:
    engine = SymbolicEngine(Setup(local_cache=False, with_disk=True))
    serve(engine, Request("a", PROMPT[:16], 2))
    evict_all(engine)
    again = Request("b", list(PROMPT), 2)
    assert [engine.match(again, 0) for _ in range(3)] == [None] * 3
    engine.store.tick(100)
    assert engine.match(again, 0) == 16
    serve(engine, again)
    assert engine.core.counters["load_tokens_disk"] == 16


def test_a_slow_disk_is_waited_for_at_most_load_timeout() -> None:
    engine = SymbolicEngine(Setup(local_cache=False, with_disk=True))
    serve(engine, Request("a", PROMPT[:16], 2))
    evict_all(engine)
    again = Request("b", list(PROMPT), 2)
    assert engine.match(again, 0) is None
    engine.store.tick(2)
    engine.now += engine.setup.wait_s - 0.1
    assert engine.match(again, 0) is None
    engine.now += 0.2
    assert engine.match(again, 0) == 8, "expected the chunks read until then"
    engine.core.finish(again.req_id)
    settle(engine)
