"""One test for each known trap of vLLM's connector contract, on the symbolic engine: what is found again, and what must not be."""

from random import Random
from typing import Any

import pytest
from kvloft.plan.loads import LEASE_STEPS
from kvloft.types import MediaItem, NewRequest, StepReport, StepView
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup

PROMPT = [1, 0, 2, 1, 1, 0, 2, 2, 1, 0, 1, 1, 2, 0, 0, 1, 2, 1]
both_chunks = pytest.mark.parametrize("blocks_per_chunk", [1, 4])
both_modes = pytest.mark.parametrize("run_ahead", [False, True])


def stored(engine: SymbolicEngine, request: Request, num_tokens: int | None = None) -> int:
    """Tokens of the request's prefix that a new request would find."""
    chain = engine.book.new_chain(request.view())
    for item in request.items:
        chain.add_item(item.identifier, item.start, item.num_tokens)
    for content in request.contents()[:num_tokens]:
        if content[0] == "row":
            chain.append_embeds([content[1]], dtype="f16", width=1)
        else:
            chain.append_tokens([content[1]])
    return engine.store.lookup(chain)[0] * engine.setup.block_tokens


def serve(engine: SymbolicEngine, request: Request, budget: int = 1000) -> Request:
    engine.add(request)
    for _ in range(200):
        if request.status == "finished":
            break
        engine.run(1, budget)
        engine.check()
    engine.drain()
    assert request.status == "finished"
    return request


def whole_blocks(num_tokens: int, size: int = 4) -> int:
    return num_tokens - num_tokens % size


# -- what is saved -------------------------------------------------------------------------------------------------


@both_chunks
@both_modes
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("budget", [5, 1000])
@pytest.mark.parametrize("num_outputs", [1, 2, 6, 7, 8, 9, 23])
def test_prompt_and_output_are_found_again_but_never_the_last_token(
    blocks_per_chunk: int, run_ahead: bool, num_drafts: int, budget: int, num_outputs: int
) -> None:
    setup = Setup(blocks_per_chunk=blocks_per_chunk, run_ahead=run_ahead, num_drafts=num_drafts)
    engine = SymbolicEngine(setup)
    request = serve(engine, Request("a", list(PROMPT), num_outputs), budget)
    assert request.num_tokens == len(PROMPT) + num_outputs
    # Where chunks are longer, the tail left after a full one may be shorter: drafts can pass a block's end unseen.
    assert stored(engine, request) == whole_blocks(request.num_tokens - 1)
    settle(engine)


@both_modes
def test_second_turn_loads_all_of_the_first(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead, local_cache=False))
    first = serve(engine, Request("a", list(PROMPT), 8))
    second = serve(engine, Request("b", [*first.token_ids, 2, 0, 1], 4))
    assert engine.num_loaded_tokens == whole_blocks(first.num_tokens - 1)
    assert second.num_tokens == first.num_tokens + 7


@both_chunks
def test_whole_prompt_may_be_offered(blocks_per_chunk: int) -> None:
    engine = SymbolicEngine(Setup(blocks_per_chunk=blocks_per_chunk, local_cache=False))
    serve(engine, Request("a", PROMPT[:16], 3))
    again = Request("b", PROMPT[:16], 3)
    assert engine.core.match(again, 0) == 16
    serve(engine, again)
    assert engine.num_loaded_tokens == 16


@both_chunks
def test_what_vllm_has_itself_is_not_loaded(blocks_per_chunk: int) -> None:
    engine = SymbolicEngine(Setup(blocks_per_chunk=blocks_per_chunk))
    serve(engine, Request("a", PROMPT[:16], 3))
    again = Request("b", PROMPT[:16], 3)
    assert [engine.core.match(again, local) for local in (0, 4, 8, 12, 16, 8, 0)] == [16, 12, 8, 4, 0, 8, 16]
    engine.core.finish(again.req_id)
    settle(engine)


def test_short_tail_is_found_and_the_prompt_ends_tail_stays() -> None:
    engine = SymbolicEngine(Setup(blocks_per_chunk=4, local_cache=False))
    prompt = PROMPT[:10]  # two blocks, half a chunk
    first = serve(engine, Request("a", prompt, 20))
    assert stored(engine, first) == whole_blocks(first.num_tokens - 1)
    assert stored(engine, first, 10) == 8, "the tail at the prompt's end is for others"
    assert stored(engine, first, 14) == 8, "tails made while decoding were superseded"
    sizes = sorted(entry.num_blocks for entry in engine.store.entries.values())
    assert sizes == [2, 3, 4], "prompt's tail, full chunk, last tail: nothing else is kept"


def test_longer_chunk_is_not_loaded_for_a_shorter_prefix() -> None:
    engine = SymbolicEngine(Setup(blocks_per_chunk=4, local_cache=False))
    serve(engine, Request("a", PROMPT[:16], 1))
    assert engine.core.match(Request("b", PROMPT[:15], 1), 0) == 0


@both_chunks
def test_nothing_is_copied_twice(blocks_per_chunk: int) -> None:
    engine = SymbolicEngine(Setup(blocks_per_chunk=blocks_per_chunk, local_cache=False))
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
def test_equal_tokens_do_not_share_what_differs_in_anything_else(other: dict[str, Any]) -> None:
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


# -- steps that leave a request out --------------------------------------------------------------------------------


@both_modes
def test_rejected_drafts_are_not_saved_when_a_step_leaves_the_request_out(run_ahead: bool) -> None:
    """All results are in, drafts of two steps were rejected, and the next step does not name the request."""
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
    """A request in mid-prefill, with blocks 1, 2, 3, ... and nothing saved; plans are then made by hand."""
    engine = SymbolicEngine(Setup(block_tokens=2))
    request = Request("a", PROMPT[:num_tokens], 9)
    request.num_computed_tokens = num_computed
    engine.core.admit(request, 0, list(range(1, num_tokens)))  # type: ignore[arg-type]
    return engine, request


@pytest.mark.parametrize("as_new", [False, True])
def test_scheduled_drafts_do_not_count_even_if_more_is_known(as_new: bool) -> None:
    engine, request = running_alone(12, 4)
    req_id: Any = request.req_id
    counts: Any = {"num_scheduled_tokens": {req_id: 5}, "num_draft_tokens": {req_id: 3}}
    if as_new:
        view = StepView(new=[NewRequest(req_id, 4, [1, 2, 3, 4, 5])], **counts)  # type: ignore[list-item]
    else:
        view = StepView(running=[req_id], num_computed_tokens=[4], new_block_ids=[None], **counts)
    (plan,) = engine.core.plan_step(view).saves
    assert [copy.blocks for copy in plan.chunks] == [(1,), (2,), (3,)]


def test_a_preempted_request_is_forgotten_whatever_its_own_count_still_says() -> None:
    engine, request = running_alone(12, 4)
    req_id: Any = request.req_id
    counts: Any = {"num_scheduled_tokens": {req_id: 1}}
    engine.core.plan_step(StepView(running=[req_id], num_computed_tokens=[2], new_block_ids=[None], **counts))
    request.num_computed_tokens = 8
    engine.core._trackers[req_id].frontier = 8
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


# -- preemption ----------------------------------------------------------------------------------------------------


@both_chunks
@both_modes
def test_preempted_request_loads_what_it_had_computed(blocks_per_chunk: int, run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(blocks_per_chunk=blocks_per_chunk, run_ahead=run_ahead, local_cache=False))
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.run(4)
    assert engine.reset_prefix_cache(with_connector=False)
    engine.run(1)
    assert request.status == "loading"
    assert engine.num_loaded_tokens >= 16
    settle(engine)
    assert engine.num_preemptions == 1


def test_blocks_refilled_by_another_request_are_not_saved_as_the_first_ones() -> None:
    """Two requests on a pool for one and a half: each preemption hands blocks over; outputs and frames stay right."""
    engine = SymbolicEngine(Setup(num_blocks=12, block_tokens=2))
    engine.add(Request("a", PROMPT[:7], 9))
    engine.add(Request("b", [2, *PROMPT[:6]], 9))
    settle(engine)
    assert engine.num_preemptions >= 1
    assert engine.num_loaded_tokens > 0


def test_preemption_named_after_readmission_does_not_undo_it() -> None:
    """reset_prefix_cache preempts between steps; the step that says so may already run the request again."""
    engine = SymbolicEngine(Setup())
    engine.store.drop_next = 1 << 30  # nothing is stored, so the request runs again at once instead of loading
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.run(2)
    engine.reset_prefix_cache(with_connector=False)
    engine.store.drop_next = 0
    plan = engine.schedule()
    assert request.status == "running"
    assert [copy.blocks for save in plan.saves for copy in save.chunks] == [(b,) for b in request.blocks[:5]]
    settle(engine)


# -- asking --------------------------------------------------------------------------------------------------------


def test_a_match_never_taken_is_unpinned_after_a_while() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    asked = Request("b", list(PROMPT), 2)
    assert engine.core.match(asked, 0) == 16
    for _ in range(LEASE_STEPS):
        engine.schedule()
        engine.drain()
        assert len(engine.store.open_leases) == 1
    engine.schedule()
    engine.drain()
    assert not engine.store.open_leases
    assert engine.core.match(asked, 0) == 16, "asked again, it is pinned again"
    engine.core.finish(asked.req_id)
    assert not engine.store.open_leases


def test_asking_without_taking_pins_once() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    asked = Request("b", list(PROMPT), 2)
    assert {engine.core.match(asked, 0) for _ in range(50)} == {16}
    assert len(engine.store.open_leases) == 1
    assert not engine.core.has_work_in_flight
    engine.core.admit(asked, 0, [1, 2, 3, 4, 5])  # type: ignore[list-item]
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
    assert engine.core.match(session, 0) == 16
    session.token_ids = [2, *PROMPT[1:]]
    session.num_prompt_tokens = 5
    assert engine.core.match(session, 0) == 0
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


@both_chunks
def test_disk_chunks_are_waited_for_and_then_loaded(blocks_per_chunk: int) -> None:
    engine = SymbolicEngine(Setup(local_cache=False, with_disk=True, blocks_per_chunk=blocks_per_chunk))
    serve(engine, Request("a", PROMPT[:16], 2))
    evict_all(engine)
    again = Request("b", list(PROMPT), 2)
    assert [engine.core.match(again, 0) for _ in range(3)] == [None] * 3
    engine.store.tick(100)
    assert engine.core.match(again, 0) == 16
    serve(engine, again)
    assert engine.core.counters["load_tokens_disk"] == 16


def test_slow_disk_is_waited_for_no_longer_than_said() -> None:
    engine = SymbolicEngine(Setup(local_cache=False, with_disk=True))
    serve(engine, Request("a", PROMPT[:16], 2))
    evict_all(engine)
    again = Request("b", list(PROMPT), 2)
    assert engine.core.match(again, 0) is None
    engine.store.tick(2)
    engine.now += engine.setup.wait_s - 0.1
    assert engine.core.match(again, 0) is None
    engine.now += 0.2
    assert engine.core.match(again, 0) == 8, "what has come by then"
    engine.core.finish(again.req_id)
    settle(engine)


# -- copies that fail, come late, or never -------------------------------------------------------------------------


def test_a_chunk_is_visible_only_when_every_rank_saved_it() -> None:
    engine = SymbolicEngine(Setup(num_ranks=2))
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.schedule()
    engine.execute(None, [100, 0])
    engine.update()
    assert stored(engine, request) == 0
    assert engine.core.has_work_in_flight, "an idle engine must go on polling"
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
    assert stored(engine, request) == 4, "its children have no parent"
    settle(engine)
    assert stored(engine, request) > 16, "tried again with the next chunks"


def test_a_save_that_finds_no_frame_is_dropped_counted_and_tried_again() -> None:
    engine = SymbolicEngine(Setup())
    request = engine.add(Request("a", list(PROMPT), 12))
    engine.store.drop_next = 1
    plan = engine.schedule()
    assert not plan.saves
    assert engine.core.counters["save_dropped_chunks"] == 4
    settle(engine)
    assert stored(engine, request) == whole_blocks(request.num_tokens - 1)


@pytest.mark.parametrize("fail_policy", [False, True])
def test_a_bad_frame_is_forgotten_and_its_request_lives_or_fails_alone(fail_policy: bool) -> None:
    engine = SymbolicEngine(Setup(local_cache=False, fail_policy=fail_policy))
    serve(engine, Request("a", list(PROMPT), 2))
    key = sorted(engine.store.entries.values(), key=lambda e: e.first_block)[2].key
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
        assert stored(engine, request) == whole_blocks(request.num_tokens - 1), "saved again, from what was computed"


def test_loads_that_always_fail_are_not_offered_for_ever() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    engine.workers.broken = True
    request = serve(engine, Request("b", list(PROMPT), 2))
    assert request.num_failed_loads == 1
    assert stored(engine, request) == 16, "no frame is to blame"


def test_a_load_that_cannot_be_planned_is_heard_of_at_once_and_only_once() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    request = Request("b", list(PROMPT), 2)
    assert engine.core.match(request, 4) == 12
    engine.core.fail_load(request, 12, [9, 10, 11, 12])  # type: ignore[list-item]
    plan = engine.core.plan_step(StepView())
    assert [(load.req_id, load.chunks, load.lost) for load in plan.loads] == [("b", (), (10, 11, 12))]
    assert engine.core.match(request, 4) == 0
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
    assert len(engine.store.open_leases) == 1, "the other rank still reads"
    settle(engine)


def test_null_block_is_never_saved() -> None:
    engine = SymbolicEngine(Setup())
    request = Request("a", list(PROMPT), 2)
    table = [5, 0, 6, 7, 8]
    engine.core.admit(request, 0, table)  # type: ignore[arg-type]
    view = StepView(new=[NewRequest(request.req_id, 0, table)], num_scheduled_tokens={request.req_id: 18})  # type: ignore[arg-type]
    plan = engine.core.plan_step(view)
    assert [copy.blocks for copy in plan.saves[0].chunks] == [(5,), (6,), (7,)]
    engine.core.absorb(StepReport(saved=tuple(copy.ticket for copy in plan.saves[0].chunks[1:])))
    assert not engine.store.entries.keys() - {plan.saves[0].chunks[0].key}, "without their parent they are never visible"


# -- resets, unreadable steps, ends --------------------------------------------------------------------------------


@both_modes
def test_chunks_in_flight_over_a_reset_stay_invisible(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead, local_cache=False))
    request = engine.add(Request("a", list(PROMPT), 9))
    engine.schedule()
    engine.execute(None, [0])
    engine.swap_weights_hot()
    engine.update()
    settle(engine)
    assert stored(engine, request) == 0, "its KV is of two makes"


def test_chunks_in_flight_over_a_reset_are_aborted_not_left_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SymbolicEngine(Setup())
    engine.add(Request("a", list(PROMPT), 9))
    engine.schedule()
    engine.execute()
    engine.core.reset()
    monkeypatch.setattr(engine.store, "commit", None)
    engine.update()
    assert not engine.store.tickets


def test_a_session_that_goes_on_after_a_reset_does_not_save_what_it_computed_before() -> None:
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


def test_a_step_that_fails_half_way_gives_back_what_it_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SymbolicEngine(Setup())
    engine.add(Request("a", list(PROMPT), 4))
    engine.add(Request("b", [2, *PROMPT], 4))
    reserve = engine.store.reserve

    def failing(chain: Any, *args: Any) -> Any:
        if chain.positions[0][1] == 2:
            raise RuntimeError("store")
        return reserve(chain, *args)

    monkeypatch.setattr(engine.store, "reserve", failing)
    with pytest.raises(RuntimeError, match="store"):
        engine.schedule()
    assert engine.store.tickets
    plan = engine.core.plan_loads_only()
    assert not plan.saves
    assert not engine.store.tickets
    assert not engine.core.has_work_in_flight


def test_close_releases_everything() -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    serve(engine, Request("a", list(PROMPT), 2))
    engine.add(Request("b", list(PROMPT), 2))
    engine.add(Request("c", [2, *PROMPT], 2))
    engine.schedule()
    engine.core.match(Request("d", list(PROMPT), 2), 0)
    late = Request("e", list(PROMPT), 2)
    engine.core.match(late, 0)
    engine.core.admit(late, 16, [11, 12, 13, 14, 15])  # type: ignore[list-item]
    assert engine.store.tickets
    assert len(engine.store.open_leases) == 3
    engine.core.close()
    assert not engine.store.tickets
    assert not engine.store.open_leases
    assert not engine.core.has_work_in_flight
    assert not engine.core.plan_step(StepView()).loads


def test_a_closed_core_hears_late_reports_without_harm() -> None:
    engine = SymbolicEngine(Setup())
    engine.add(Request("a", list(PROMPT), 2))
    plan = engine.schedule()
    engine.core.close()
    engine.core.absorb(StepReport(saved=tuple(copy.ticket for save in plan.saves for copy in save.chunks)))
    assert not engine.store.entries
