"""Tests repeated load failures: each failed load is counted once, loads are paused for a while, and
then a single load is tried.
"""

import math
from typing import Any
from unittest.mock import Mock

import pytest
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, serve, tables

from kvloft.plan.breaker import MAX_FAILED_LOADS, RETRY_S
from kvloft.seam.ids import ChunkKey, ReqId
from kvloft.seam.plan import LAYOUT, LoadResult, StepReport

count = iter(range(1 << 30))


def warm(num_ranks: int = 1) -> SymbolicEngine:
    engine = SymbolicEngine(Setup(local_cache=False, num_ranks=num_ranks, num_blocks=200))
    serve(engine, Request("before", list(PROMPT), 2))
    return engine


def offered(engine: SymbolicEngine) -> int | None:
    request = Request(f"asked{next(count)}", list(PROMPT), 2)
    tokens = engine.match(request, 0)
    engine.core.finish(request.req_id)
    return tokens


def begin(engine: SymbolicEngine) -> tuple[ReqId, int]:
    """Start loading the prompt."""
    request: Any = Request(f"r{next(count)}", list(PROMPT), 2)
    assert engine.match(request, 0) == 16
    engine.core.admit(request, 16, tables(list(range(1, 6))))
    engine.core._loads.queued.clear()  # no worker runs the load
    return request.req_id, max(engine.core._loads.in_progress)


def load(engine: SymbolicEngine, *, broken: set[int]) -> bool:
    """Load the prompt, and make the load fail on the ranks ``broken``.

    Returns False if the load is not offered.
    """
    if not offered(engine):
        return False
    req_id, load_id = begin(engine)
    for rank in range(engine.setup.num_ranks):
        engine.core.absorb(StepReport(loads=(LoadResult(req_id, load_id, failed=rank in broken),)))
    engine.core.finish(req_id)
    return True


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_a_failed_load_counts_once_whichever_ranks_failed(num_ranks: int) -> None:
    engine = warm(num_ranks)
    for broken in ({0}, {num_ranks - 1}, set(range(num_ranks))):
        for _ in range(MAX_FAILED_LOADS - 1):
            assert load(engine, broken=broken)
        assert load(engine, broken=set()), "a successful load must reset the count"
    for _ in range(MAX_FAILED_LOADS):
        assert engine.core.counters["load_breaker_trips"] == 0
        assert load(engine, broken={0})
    assert engine.core.counters["load_breaker_trips"] == 1
    assert offered(engine) == 0


def tripped() -> SymbolicEngine:
    engine = warm()
    while load(engine, broken={0}):
        pass
    return engine


def test_while_loads_fail_nothing_is_saved_and_later_all_of_it_is() -> None:
    engine = tripped()
    request = engine.add(Request("new", [1] * 9, 30))
    engine.run(6)
    assert engine.num_saved_blocks == 4, "expected only the earlier saves"
    engine.now += RETRY_S
    engine.run(6)
    assert engine.num_saved_blocks >= 4 + request.num_computed_tokens // 4 - 1
    engine.check()


def test_one_load_probes_after_a_pause() -> None:
    engine = tripped()
    engine.now += RETRY_S - 1
    assert offered(engine) == 0
    engine.now += 1
    assert load(engine, broken={0})
    assert engine.core.counters["load_breaker_trips"] == 2
    assert offered(engine) == 0
    engine.now += RETRY_S
    assert load(engine, broken=set())
    begin(engine)
    assert offered(engine) == 16, "the number of concurrent loads must be unlimited again"
    for _ in range(MAX_FAILED_LOADS):
        assert load(engine, broken={0})
    assert not load(engine, broken={0})


def test_no_load_follows_if_a_failed_load_fails_its_request() -> None:
    engine = warm()
    engine.core.meet_engine(lambda: 0, math.inf)
    while load(engine, broken={0}):
        pass
    engine.now += 1000 * RETRY_S
    assert offered(engine) == 0


def test_loads_that_fail_late_do_not_lengthen_the_pause() -> None:
    engine = warm()
    late = [begin(engine) for _ in range(2)]
    while load(engine, broken={0}):
        pass
    engine.now += RETRY_S / 2
    for req_id, load_id in late:
        engine.core.absorb(StepReport(loads=(LoadResult(req_id, load_id, failed=True),)))
        engine.core.finish(req_id)
    assert engine.core.counters["load_breaker_trips"] == 1
    engine.now += RETRY_S / 2
    assert offered(engine) == 16


def test_loads_of_other_bytes_than_were_saved_count_as_failed() -> None:
    engine = warm()
    for _ in range(MAX_FAILED_LOADS):
        assert offered(engine) == 16
        req_id, load_id = begin(engine)
        engine.core.absorb(
            StepReport(loads=(LoadResult(req_id, load_id, ((ChunkKey(b"elsewhere"), "tag"),)),))
        )
        engine.core.finish(req_id)
    assert engine.core.counters["load_breaker_trips"] == 1
    assert offered(engine) == 0


def test_loads_with_nothing_to_copy_say_nothing_of_copies() -> None:
    engine = warm()
    for nth in range(2 * MAX_FAILED_LOADS - 1):
        if nth % 2 == 0:
            assert load(engine, broken={0})
            continue
        request: Any = Request(f"lost{nth}", list(PROMPT), 2)
        engine.core.fail_load(request, 16, tables(list(range(1, 6))))
        engine.core.absorb(
            StepReport(loads=(LoadResult(request.req_id, max(engine.core._loads.in_progress)),))
        )
    assert engine.core.counters["load_breaker_trips"] == 1
    assert offered(engine) == 0


def test_events_are_withdrawn_if_loads_are_never_tried_again() -> None:
    for retry_s, num_withdrawn in ((RETRY_S, 0), (math.inf, 1)):
        engine, calls = warm(), []
        engine.core.meet_engine(lambda: 0, retry_s)
        engine.core._notes.announcer = Mock(withdraw=lambda calls=calls: calls.append(0))
        for _ in range(MAX_FAILED_LOADS):
            load(engine, broken={0})
        assert len(calls) == num_withdrawn


def test_only_one_load_at_a_time_is_tried() -> None:
    engine = tripped()
    engine.now += RETRY_S
    first: Any = Request("first", list(PROMPT), 2)
    assert engine.match(first, 0) == 16
    engine.core.admit(first, 16, tables(list(range(1, 6))))
    assert offered(engine) == 0


def test_a_failed_save_during_retried_loads_starts_another_pause() -> None:
    engine = tripped()
    engine.now += RETRY_S
    engine.failure_rate = 1.0
    engine.add(Request("new", [1] * 9, 5))
    engine.run(2)
    assert engine.core.counters["load_breaker_trips"] == 2
    assert offered(engine) == 0


def test_chunks_of_another_layout_are_kept_and_pause_no_loads() -> None:
    """An engine with different settings saved these chunks, and they are valid for that engine."""
    engine = warm()
    keys = list(engine.store.entries)
    for _ in range(MAX_FAILED_LOADS + 2):
        req_id, load_id = begin(engine)
        bad = tuple((ChunkKey(key), LAYOUT) for key in keys)
        engine.core.absorb(StepReport(loads=(LoadResult(req_id, load_id, bad),)))
        engine.core.finish(req_id)
    assert list(engine.store.entries) == keys
    counters = engine.core.counters
    assert counters["layout_mismatches"] == (MAX_FAILED_LOADS + 2) * len(keys)
    assert counters["verify_failures"] == counters["load_breaker_trips"] == 0
