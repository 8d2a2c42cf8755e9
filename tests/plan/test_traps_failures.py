"""Tests more traps in vLLM's connector contract: failed or late copies, resets, unreadable
steps, and finished requests.
"""

from typing import Any

import pytest
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, both_modes, serve, stored, tables, whole_blocks

from kvloft.plan import save_planner
from kvloft.plan.save_planner import MAX_RETRIES
from kvloft.seam.plan import StepReport
from kvloft.seam.views import NewRequest, StepView

# -- copies that fail, are late, or never complete -------------------------------------------------


def test_a_chunk_is_visible_only_when_every_rank_saved_it() -> None:
    engine = SymbolicEngine(Setup(num_ranks=2))
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.schedule()
    engine.execute(None, [100, 0])
    engine.update()
    assert stored(engine, request) == 0
    assert engine.core.has_work_in_flight, "an idle engine must keep polling"
    engine.schedule()
    engine.execute(None, [100, 2])
    engine.update()
    assert stored(engine, request) == 8
    settle(engine)


def test_a_save_that_failed_on_one_rank_is_never_visible_and_is_made_again() -> None:
    engine = SymbolicEngine(Setup(num_ranks=2, local_cache=False))
    request = engine.add(Request("a", list(PROMPT), 12))
    plan = engine.schedule()
    torn = plan.saves[0].chunks[1].ticket
    engine.execute(None, [0, 0])
    engine.update()
    engine.workers.ranks[1].in_flight[1].fails = True
    engine.schedule()
    engine.execute()
    engine.update()
    assert torn not in engine.store.tickets
    assert stored(engine, request) == 4, "the children have no parent"
    settle(engine)
    assert stored(engine, request) > 16, "the save must be retried with the next chunks"


@both_modes
@pytest.mark.parametrize("num_dropped", [1, 2])
def test_a_unit_without_a_frame_is_retried_until_its_request_ends(
    run_ahead: bool, num_dropped: int
) -> None:
    """The request is aborted before its next unit is complete."""
    engine = SymbolicEngine(Setup(run_ahead=run_ahead))
    request = engine.add(Request("a", list(PROMPT), 5))
    while stored(engine, request) < 16:
        engine.run(1)
    engine.store.drop_next = num_dropped
    settle(engine)
    assert not engine.store.drop_next
    assert stored(engine, request) == 20
    assert not engine.core.counters["save_dropped_chunks"]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_units_that_never_find_a_frame_are_counted_once_when_their_request_loses_its_blocks(
    is_preempted: bool,
) -> None:
    engine = SymbolicEngine(Setup())
    request = engine.add(Request("a", list(PROMPT), 12))
    engine.store.drop_next = 1 << 30
    engine.run(4)
    assert not engine.core.counters["save_dropped_chunks"]
    if is_preempted:
        engine.reset_prefix_cache(with_connector=False)
        engine.schedule()
    else:
        engine.finish(request, aborted=True)
    assert engine.core.counters["save_dropped_chunks"] == 5
    settle(engine)


def test_few_requests_retry_in_one_step_and_each_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SymbolicEngine(
        Setup(block_tokens=16, num_frames=99, num_blocks=99, max_running=MAX_RETRIES + 4)
    )
    prompts = [[i, *PROMPT[:15]] for i in range(MAX_RETRIES + 4)]
    requests = [engine.add(Request(f"r{i}", prompt, 9)) for i, prompt in enumerate(prompts)]
    engine.store.drop_next = 1 << 30
    engine.run(1)
    tried: list[Any] = []
    lookup = engine.store.lookup

    def record(chain: Any) -> Any:
        tried.append(chain)
        return lookup(chain)

    monkeypatch.setattr(engine.store, "lookup", record)
    chains = [engine.core._requests[request.req_id].chain for request in requests]
    engine.run(1)
    assert tried == chains[:MAX_RETRIES]
    engine.run(1)
    assert tried[MAX_RETRIES:] == [*chains[: MAX_RETRIES - 4], *chains[MAX_RETRIES:]]
    engine.store.drop_next = 0
    settle(engine)
    assert all(stored(engine, request) == 16 for request in requests)


def test_a_session_that_waits_for_input_delays_no_retry_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(save_planner, "MAX_RETRIES", 1)
    engine = SymbolicEngine(Setup(block_tokens=16))
    engine.store.drop_next = 1 << 30
    session = engine.add(Request("a", [2, *PROMPT[:15]], 2, updates=[]))
    engine.run(4)
    assert session.status == "session"
    request = engine.add(Request("b", PROMPT[:16], 9))
    engine.run(1)
    engine.store.drop_next = 0
    engine.run(9)
    assert stored(engine, request) == 16
    engine.feed_session(session, None)
    settle(engine)


@both_modes
def test_a_unit_whose_prefix_left_host_memory_is_saved_with_it_in_the_next_step(
    run_ahead: bool,
) -> None:
    """The request finishes before its next unit is complete."""
    engine = SymbolicEngine(Setup(run_ahead=run_ahead))
    request = engine.add(Request("a", list(PROMPT), 5))
    while stored(engine, request) < 16:
        engine.run(1)
    for entry in reversed(list(engine.store.entries.values())):
        engine.store.evict(entry)
    assert stored(engine, request) == 0
    settle(engine)
    assert request.num_tokens == 23
    assert stored(engine, request) == 20


@pytest.mark.parametrize("fail_policy", [False, True])
def test_a_bad_frame_is_removed_and_affects_only_its_request(fail_policy: bool) -> None:
    engine = SymbolicEngine(Setup(local_cache=False, fail_policy=fail_policy))
    serve(engine, Request("a", list(PROMPT), 2))
    key = sorted(engine.store.entries.values(), key=lambda e: len(engine.book.prefix_of[e.key]))[
        2
    ].key
    engine.workers.corrupt.add(key)
    request = engine.add(Request("b", list(PROMPT), 3))
    engine.run(1)
    assert engine.core.counters["verify_failures"] == 1
    assert key not in engine.store.entries
    assert stored(engine, request) == 8
    engine.workers.corrupt.clear()
    settle(engine)
    assert request.tainted == fail_policy
    if not fail_policy:
        assert stored(engine, request) == whole_blocks(request.num_tokens - 1), (
            "the computed blocks must be saved again"
        )


def test_loads_that_always_fail_are_not_offered_for_ever() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    engine.workers.broken = True
    request = serve(engine, Request("b", list(PROMPT), 2))
    assert request.num_failed_loads == 1
    assert stored(engine, request) == 16, "a failure without bad frames must not remove chunks"


def test_a_load_that_cannot_be_planned_is_heard_of_at_once_and_only_once() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    request = Request("b", list(PROMPT), 2)
    assert engine.match(request, 4) == 12
    engine.core.fail_load(request, 12, tables([9, 10, 11, 12]))
    plan = engine.core.plan_step(StepView())
    assert [(load.req_id, load.chunks, load.lost) for load in plan.loads] == [
        ("b", (), (10, 11, 12))
    ]
    assert engine.match(request, 4) == 0
    engine.core.finish(request.req_id)
    assert not engine.store.open_leases


def test_aborted_while_loading_keeps_the_pins_until_reported() -> None:
    engine = SymbolicEngine(Setup(local_cache=False, num_ranks=2))
    serve(engine, Request("a", list(PROMPT), 2))
    request = engine.add(Request("b", list(PROMPT), 2))
    engine.schedule()
    engine.execute(None, [1, 0])
    engine.finish(request, aborted=True)
    assert len(engine.store.open_leases) == 1
    engine.update()
    assert len(engine.store.open_leases) == 1, "the other rank is still reading"
    settle(engine)


def test_null_block_is_never_saved() -> None:
    engine = SymbolicEngine(Setup())
    request = Request("a", list(PROMPT), 2)
    table = [5, 0, 6, 7, 8]
    engine.core.admit(request, 0, tables(table))
    view = StepView(
        new=[NewRequest(request.req_id, 0, table)], num_scheduled_tokens={request.req_id: 18}
    )  # type: ignore[arg-type]
    plan = engine.core.plan_step(view)
    assert [copy.blocks for copy in plan.saves[0].chunks] == [(5,), (6,), (7,)]
    engine.core.absorb(StepReport(saved=tuple(copy.ticket for copy in plan.saves[0].chunks[1:])))
    assert not engine.store.entries.keys() - {plan.saves[0].chunks[0].key}, (
        "chunks without their parent must never be visible"
    )


# -- resets, unreadable steps, ends ----------------------------------------------------------------


@both_modes
def test_chunks_in_flight_over_a_reset_stay_invisible(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead, local_cache=False))
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.schedule()
    engine.execute(None, [0])
    engine.swap_weights_hot()
    engine.update()
    settle(engine)
    assert stored(engine, request) == 0, "KV computed with two sets of weights was saved"


def test_a_session_does_not_save_kv_computed_before_a_reset() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    request = engine.add(Request("a", PROMPT[:8], 2, updates=[]))
    engine.run(4)
    assert request.status == "session"
    engine.swap_weights_hot()
    engine.feed_session(request, [1, 1, 2])
    engine.run(3)
    engine.feed_session(request, None)
    settle(engine)
    assert stored(engine, request) == 0


def test_a_preempted_request_saves_again_after_a_reset() -> None:
    engine = SymbolicEngine(Setup())
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.run(3)
    assert engine.reset_prefix_cache(with_connector=True)
    settle(engine)
    assert stored(engine, request) == whole_blocks(request.num_tokens - 1)


def test_after_an_unreadable_step_only_requests_with_a_fresh_table_are_saved() -> None:
    engine = SymbolicEngine(Setup(block_tokens=2))
    old = engine.add(Request("a", PROMPT[:6], 14))
    engine.run(2)
    engine.unreadable_step = True
    engine.run(4)
    assert stored(engine, old) == 6
    new = engine.add(Request("b", [2, 2, *PROMPT[:6]], 4))
    settle(engine)
    assert stored(engine, old) == 6
    assert stored(engine, new) == whole_blocks(new.num_tokens - 1, 2)


def test_a_failed_step_aborts_its_reservations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SymbolicEngine(Setup())
    engine.add(Request("a", list(PROMPT), 4))
    engine.add(Request("b", [2, *PROMPT], 4))
    reserve_one = engine.store.reserve_one

    def failing(chain: Any, *args: Any) -> Any:
        if chain.positions[0][1] == 2:
            raise RuntimeError("store")
        return reserve_one(chain, *args)

    monkeypatch.setattr(engine.store, "reserve_one", failing)
    with pytest.raises(RuntimeError, match="store"):
        engine.schedule()
    plan = engine.core.plan_loads_only()
    assert not plan.saves
    assert not engine.store.tickets
    assert not engine.core.has_work_in_flight


def test_close_releases_every_pin_and_leaves_frames_that_workers_may_write_reserved() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    engine.add(Request("b", list(PROMPT), 2))
    engine.add(Request("c", [2, *PROMPT], 2))
    engine.schedule()
    engine.match(Request("d", list(PROMPT), 2), 0)
    late = Request("e", list(PROMPT), 2)
    engine.match(late, 0)
    engine.core.admit(late, 16, tables([11, 12, 13, 14, 15]))
    assert engine.store.tickets
    assert len(engine.store.open_leases) == 3
    engine.core.close()
    assert engine.store.tickets, "tickets must be kept until the session ends"
    assert not engine.store.open_leases
    assert not engine.core.plan_step(StepView()).loads


def test_a_closed_core_accepts_late_reports() -> None:
    engine = SymbolicEngine(Setup())
    engine.add(Request("a", list(PROMPT), 2))
    plan = engine.schedule()
    engine.core.close()
    engine.core.absorb(
        StepReport(failed=tuple(copy.ticket for save in plan.saves for copy in save.chunks))
    )
    assert not engine.store.entries
    assert not engine.core.has_work_in_flight


@both_modes
def test_a_save_that_a_server_answered_too_late_is_tried_again_in_the_next_step(
    run_ahead: bool,
) -> None:
    """The prompt ends with this chunk, so no later chunk triggers the retry."""
    engine = SymbolicEngine(Setup(run_ahead=run_ahead))
    engine.store.drop_next, engine.store.is_save_late = 1, True
    request = engine.add(Request("a", list(PROMPT), 2))
    engine.run()
    engine.store.is_save_late = False
    engine.run(3)
    engine.drain()
    assert not engine.core.counters["save_dropped_chunks"]
    assert stored(engine, request, len(PROMPT)) == whole_blocks(len(PROMPT))
