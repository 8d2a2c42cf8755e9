"""Tests many waiting requests: how they share loads, take turns in host memory, and stop waiting.

The tests call each hook directly.
"""

from typing import Any

import pytest
from plan_store import Lease
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, serve, tables

from kvloft.plan.admission import LEASE_S, MAX_NEW_WAITING, MIN_WAITING
from kvloft.seam.ids import ReqId
from kvloft.seam.plan import LoadResult, StepReport
from kvloft.seam.views import StepView

BLOCK = 4
WHOLE = 16
"""Number of tokens in the full blocks of PROMPT."""


def warm(**setup: Any) -> SymbolicEngine:
    """Return an engine with PROMPT in host memory but not in vLLM's own cache."""
    engine = SymbolicEngine(Setup(**setup))
    serve(engine, Request("before", list(PROMPT), 2))
    engine.reset_prefix_cache(with_connector=False)
    return engine


def with_load_in_flight(engine: SymbolicEngine, **more: Any) -> Request:
    first = engine.add(Request("first", list(PROMPT), 2, **more))
    engine.schedule()
    assert first.load == (0, WHOLE)
    return first


def local_tokens(engine: SymbolicEngine, request: Request) -> int:
    return len(engine._local_hit(request)) * BLOCK


# -- loads in flight are shared
# -------------------------------------------------------------------------------------


def test_blocks_on_their_way_to_the_gpu_are_waited_for_and_then_shared() -> None:
    engine = warm()
    with_load_in_flight(engine)
    second = engine.add(Request("second", [*PROMPT[:WHOLE], 0, 0, 1], 2))
    for _ in range(3):
        assert engine.match(second, 0) is None
        assert engine.core.still_waits(second.req_id, 0)
    assert len(engine.store.open_leases) == 1, (
        "a request that waits for another load must pin nothing"
    )
    settle(engine)
    assert engine.num_loaded_tokens == WHOLE


def test_a_prompt_that_parts_from_the_load_waits_for_the_shared_part_only() -> None:
    engine = warm()
    other = [*PROMPT[:8], 2, 2, 2, 2, 2]
    serve(engine, Request("other", list(other), 2))
    engine.reset_prefix_cache(with_connector=False)
    before = engine.num_loaded_tokens
    with_load_in_flight(engine)
    second = engine.add(Request("second", list(other), 2))
    assert engine.match(second, 0) is None
    assert engine.match(second, 8) == 4, "the request's own part is not in that load"
    settle(engine)
    assert engine.num_loaded_tokens - before == WHOLE + 4


@pytest.mark.parametrize("end", ["failed", "bad", "aborted"])
def test_when_the_load_comes_to_nothing_a_waiter_gets_its_own_at_once(end: str) -> None:
    engine = warm(num_ranks=2)
    first = with_load_in_flight(engine)
    second = engine.add(Request("second", [*PROMPT[:WHOLE], 0], 2))
    assert engine.match(second, 0) is None
    (load_id,) = engine.core._loads.in_progress
    if end == "aborted":
        engine.finish(first, aborted=True)
    elif end == "failed":
        engine.core.absorb(StepReport(loads=(LoadResult(ReqId("first"), load_id, failed=True),)))
    else:
        last = engine.core._requests[ReqId("first")].chain.key(3)
        engine.core.absorb(
            StepReport(loads=(LoadResult(ReqId("first"), load_id, ((last, "tag"),)),))
        )  # type: ignore[arg-type]
    assert not engine.core.still_waits(second.req_id, 0)
    assert engine.match(second, 0) == (12 if end == "bad" else WHOLE)
    engine.core.close()


def test_a_load_that_hangs_is_waited_for_no_longer_than_a_disk() -> None:
    engine = warm(wait_s=5.0)
    with_load_in_flight(engine)
    second = engine.add(Request("second", [*PROMPT[:WHOLE], 0], 2))
    assert engine.match(second, 0) is None
    engine.now += 4.9
    assert engine.core.still_waits(second.req_id, 0)
    engine.now += 0.2
    assert not engine.core.still_waits(second.req_id, 0)
    assert engine.match(second, 0) == WHOLE
    settle(engine)


@pytest.mark.parametrize(
    "why",
    ["no prefix cache", "another salt", "a part that vLLM has", "may not wait", "the last block"],
)
def test_no_request_waits_for_blocks_that_vllm_would_not_share(why: str) -> None:
    engine = warm(local_cache=why != "no prefix cache")
    if why == "another salt":
        serve(engine, Request("salted", list(PROMPT), 2, salt="x"))
        engine.reset_prefix_cache(with_connector=False)
    with_load_in_flight(engine)
    second = Request(
        "second", PROMPT[:WHOLE] if why == "the last block" else [*PROMPT[:WHOLE], 0], 2
    )
    local = 12 if why == "the last block" else 0
    if why == "another salt":
        second.salt = "x"
    if why == "a part that vLLM has":
        local = WHOLE
    engine.add(second)
    answer = engine.match(second, local, may_wait=why != "may not wait")
    assert answer == WHOLE - local
    settle(engine)


def test_a_wait_ends_when_vllm_has_more_itself() -> None:
    engine = warm()
    with_load_in_flight(engine)
    second = engine.add(Request("second", [*PROMPT[:WHOLE], 0], 2))
    assert engine.match(second, 0) is None
    assert engine.core.still_waits(second.req_id, 0)
    assert not engine.core.still_waits(second.req_id, WHOLE)
    assert engine.match(second, WHOLE) == 0
    settle(engine)


def test_blocks_that_vllm_evicted_again_are_not_waited_for() -> None:
    engine = warm()
    first = with_load_in_flight(engine)
    engine.run(2)
    assert first.status in ("running", "finished")
    second = engine.add(Request("second", [*PROMPT[:WHOLE], 0], 2))
    assert engine.match(second, 0) == WHOLE
    settle(engine)


def test_running_requests_outside_a_step_occupy_slots() -> None:
    """With pipeline parallelism, a step contains only a part of the running requests."""
    engine = warm(local_cache=False, max_running=3, num_blocks=60)
    engine.running += [Request("x", [1], 1), Request("y", [2], 1), Request("z", [3], 1)]
    engine.core.plan_step(StepView())
    first, second = (Request(f"r{i}", [*PROMPT[:WHOLE], i], 2) for i in range(2))
    assert engine.match(first, 0) == WHOLE
    engine.core.admit(first, WHOLE, tables(range(20, 24)))  # type: ignore[arg-type]
    assert engine.match(second, 0) is None


def test_no_more_is_loaded_than_there_are_seats_and_one_ahead_unless_loads_hang() -> None:
    engine = warm(local_cache=False, max_running=2, num_blocks=60, wait_s=5.0)
    for i in range(5):
        engine.add(Request(f"r{i}", [*PROMPT[:WHOLE], i % 3], 2))
    engine.schedule()
    assert [request.status for request in engine.requests.values()] == ["loading"] * 3 + [
        "waiting"
    ] * 2
    assert len(engine.store.open_leases) == 3, "a request that waits for a slot must pin nothing"
    assert engine.match(Request("cold", [2] * 9, 1), 0) == 0
    assert engine.match(engine.requests["r3"], 0) is None
    assert engine.match(engine.requests["r3"], 0, may_wait=False) == WHOLE
    engine.core.finish(ReqId("cold"))
    engine.core._admission.begin_step()
    assert engine.match(engine.requests["r4"], 0) is None
    engine.core._admission.begin_step()
    engine.now += 5.1
    assert engine.match(engine.requests["r4"], 0) == WHOLE
    settle(engine)


# -- turns for host memory
# ---------------------------------------------------------------------------------------------


def on_disk(num_prompts: int, **setup: Any) -> tuple[SymbolicEngine, list[Request]]:
    """Return an engine and requests with prompts of four blocks that are stored only on disk."""
    engine = SymbolicEngine(Setup(with_disk=True, num_blocks=60, **setup))
    prompts = [[i % 3, i // 3 % 3, i // 9, *PROMPT[:14]] for i in range(num_prompts)]
    for i, prompt in enumerate(prompts):
        serve(engine, Request(f"before{i}", list(prompt), 1))
    assert not any(request.status != "finished" for request in engine.requests.values())
    engine.reset_prefix_cache(with_connector=False)
    for entry in sorted(
        engine.store.entries.values(), key=lambda e: -len(engine.book.prefix_of[e.key])
    ):
        if entry.frame is not None:
            engine.store.evict(entry)
    return engine, [Request(f"r{i}", list(prompt), 1) for i, prompt in enumerate(prompts)]


def pinned_frames(engine: SymbolicEngine) -> int:
    leases: set[Lease] = {
        lease.store_lease for lease in engine.core._admission.turns.waiting.leases
    }  # type: ignore[misc]
    return len({entry.frame for lease in leases for entry in lease._entries})


def ask(engine: SymbolicEngine, requests: list[Request]) -> list[int | None]:
    """Run one step in which vLLM matches all requests and admits none of them."""
    engine.now += 0.01
    answers: list[int | None] = []
    for request in requests:
        may_be_short = engine.core.still_waits(request.req_id, 0)
        answers.append(engine.match(request, 0))
        assert not may_be_short or answers[-1] is None
        assert engine.match(request, 0) == answers[-1], "I9: a repeated call changed the result"
    engine.core.plan_step(StepView())
    return answers


def test_waiting_requests_pin_at_most_half_of_host_memory() -> None:
    engine, requests = on_disk(12, num_frames=24, local_cache=False)
    for _ in range(4):
        assert ask(engine, requests) == [None] * 12
        assert pinned_frames(engine) == 12
    assert [r.req_id for r in requests if engine.core._requests[r.req_id].lease] == [
        "r0",
        "r1",
        "r2",
    ]
    engine.store.tick(100)
    assert ask(engine, requests) == [16] * 3 + [None] * 9
    for request in requests[:2]:
        engine.core.finish(request.req_id)
    assert ask(engine, requests[2:]) == [16] + [None] * 9
    assert [r.req_id for r in requests[2:] if engine.core._requests[r.req_id].lease] == [
        "r2",
        "r3",
        "r4",
    ]
    engine.core.close()


def test_waiting_requests_pin_at_most_half_of_a_stores_share() -> None:
    engine, requests = on_disk(12, num_frames=24, local_cache=False)
    engine.core.count_on(100 * 4096)
    ask(engine, requests)
    assert pinned_frames(engine) == 12, "all 12 frames are pinned"
    engine.core._admission.release_all()
    engine.core.count_on(16 * 4096)
    for _ in range(4):
        assert ask(engine, requests) == [None] * 12
        assert pinned_frames(engine) == 8
    engine.core.count_on(0)
    for _ in range(4):
        assert ask(engine, requests) == [None] * 12
        assert pinned_frames(engine) >= 4, "the first request may always wait"
    engine.core.close()


def test_the_first_in_the_queue_may_pin_more_than_half() -> None:
    engine, requests = on_disk(2, num_frames=6, local_cache=False)
    assert ask(engine, requests) == [None] * 2
    assert pinned_frames(engine) == 4
    engine.store.tick(100)
    assert ask(engine, requests) == [16, None]
    engine.core.finish(requests[0].req_id)
    assert ask(engine, requests[1:]) == [None]
    engine.store.tick(100)
    assert ask(engine, requests[1:]) == [16]
    engine.core.close()


def test_a_small_one_that_would_fit_does_not_pass_those_before_it() -> None:
    engine, requests = on_disk(3, num_frames=12, local_cache=False)
    small = Request("small", requests[2].token_ids[:9], 1)
    for _ in range(3):
        assert ask(engine, [*requests[:2], small]) == [None] * 3
        assert pinned_frames(engine) == 4
    engine.store.tick(100)
    assert ask(engine, [*requests[:2], small]) == [16, None, None]
    engine.core.finish(requests[0].req_id)
    assert ask(engine, [requests[1], small]) == [None, None]
    engine.store.tick(100)
    assert ask(engine, [requests[1], small]) == [16, 8]
    engine.core.close()


def test_chunks_read_from_disk_wait_for_a_running_slot() -> None:
    engine, requests = on_disk(5, num_frames=200, local_cache=False, max_running=2)
    assert ask(engine, requests) == [None] * 5
    engine.store.tick(100)
    for request in requests:
        engine.add(request)
    engine.schedule()
    assert [request.status for request in requests] == ["loading"] * 3 + ["waiting"] * 2
    settle(engine)


def test_a_request_that_vllm_stops_matching_yields_to_the_next() -> None:
    engine, requests = on_disk(3, num_frames=8, local_cache=False)
    assert ask(engine, requests[:2]) == [None] * 2
    for _ in range(3):
        assert ask(engine, requests[2:]) == [None]
    assert [
        r.req_id
        for r in requests
        if r.req_id in engine.core._requests and engine.core._requests[r.req_id].lease
    ] == ["r2"]
    engine.core.close()


def test_chunks_in_host_memory_are_offered_ahead_of_requests_waiting_for_disk() -> None:
    engine, requests = on_disk(4, num_frames=40, local_cache=False)
    serve(engine, Request("warm", [2] * 17, 1))
    for lease in requests[:3]:
        assert engine.match(lease, 0) is None
    assert engine.match(Request("hot", [2] * 17, 1), 0) == 16
    assert engine.match(Request("cold", [1, 1, 1, 1, 1, 1], 1), 0) == 0
    engine.core.close()


def test_a_disk_that_does_not_answer_holds_the_last_in_the_queue_no_longer_than_the_first() -> None:
    engine, requests = on_disk(12, num_frames=24, local_cache=False, wait_s=5.0)
    assert ask(engine, requests) == [None] * 12
    engine.now += 5.0
    assert ask(engine, requests) == [0] * 12
    engine.core.close()


def test_while_vllm_has_no_seat_a_request_does_not_use_up_its_wait() -> None:
    engine, requests = on_disk(1, num_frames=24, local_cache=False, wait_s=5.0)
    assert ask(engine, requests) == [None]
    engine.now += 2
    assert ask(engine, requests) == [None]
    for _ in range(3):
        engine.now += 4
        engine.core.plan_step(StepView())
    assert ask(engine, requests) == [None]
    engine.now += 2.5
    assert ask(engine, requests) == [None]
    engine.now += 0.5
    assert ask(engine, requests) == [0]
    engine.core.close()


def test_no_request_waits_if_waiting_is_disabled() -> None:
    engine, requests = on_disk(12, num_frames=24, local_cache=False)
    assert [engine.match(request, 0, may_wait=False) for request in requests] == [0] * 12
    assert pinned_frames(engine) == 12
    engine.core.close()


def test_a_prefix_that_many_wait_for_counts_once() -> None:
    engine, requests = on_disk(1, num_frames=12, local_cache=False)
    crowd = [Request(f"c{i}", [*requests[0].token_ids, i, i], 1) for i in range(12)]
    assert ask(engine, crowd) == [None] * 12
    assert pinned_frames(engine) == 4
    assert all(engine.core._requests[r.req_id].lease for r in crowd)
    engine.store.tick(100)
    assert ask(engine, crowd) == [16] * 12
    engine.core.close()
    assert engine.core._admission.turns.waiting.num_units == 0


def test_leases_expire_and_read_chunks_stay() -> None:
    engine, requests = on_disk(1, num_frames=24, local_cache=False)
    assert ask(engine, requests) == [None]
    engine.store.tick(100)
    engine.now += LEASE_S + 1
    for _ in range(100):
        engine.core.plan_step(StepView())
    assert not engine.store.open_leases
    assert ask(engine, requests) == [16]
    engine.core.close()


def test_a_load_that_cannot_be_planned_is_not_counted_until_the_engine_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = warm()
    request = Request("a", list(PROMPT), 2)
    assert engine.match(request, 0) == WHOLE

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr("kvloft.plan.load_planner.plan_load", fail)
    with pytest.raises(RuntimeError):
        engine.core.admit(request, WHOLE, tables([1, 2, 3, 4]))
    engine.core.fail_load(request, WHOLE, tables([1, 2, 3, 4]))
    engine.core.finish(request.req_id)
    assert not engine.store.open_leases
    assert (
        engine.core._admission.turns.waiting.num_units,
        engine.core._admission.turns.loading.num_units,
    ) == (0, 0)


def test_no_more_wait_for_the_disk_than_there_are_seats_and_those_behind_them_compute() -> None:
    """vLLM visits each waiting request in every step. If all requests waited for a hung disk, steps
    would become slower as the queue grows.
    """
    engine, requests = on_disk(18, num_frames=200, local_cache=False, max_running=2)
    crowd = [
        Request(f"{request.req_id}-{nth}", list(request.token_ids), 1)
        for nth in range(5)
        for request in requests
    ]
    for _ in range(3):
        assert ask(engine, crowd) == [None] * MIN_WAITING + [0] * (len(crowd) - MIN_WAITING)
    assert engine.match(crowd[-1], 0) is None, (
        "in the next step, the first request that is matched can wait"
    )


def test_few_begin_to_wait_in_one_step_because_each_is_looked_up() -> None:
    engine, requests = on_disk(18, num_frames=2000, local_cache=False, max_running=150)
    crowd = [
        Request(f"{request.req_id}-{nth}", list(request.token_ids), 1)
        for nth in range(10)
        for request in requests
    ]
    for num_waiting in (MAX_NEW_WAITING, 2 * MAX_NEW_WAITING, 150, 150):
        assert ask(engine, crowd) == [None] * num_waiting + [0] * (len(crowd) - num_waiting)
