"""Tests exceptions in hooks that vLLM calls. Any error in kvloft becomes a miss, and only
exceptions that end the process are propagated.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from kvloft.seam.batch import Tables
from kvloft.seam.plan import StepPlan
from kvloft.vllm.connector import KVLoftConnector
from kvloft.vllm.scheduler_half import SchedulerHalf

LOADS_ONLY = StepPlan()


class PanicLike(BaseException):
    """An exception like pyo3's PanicException, which is not derived from Exception."""


def broken(error: type[BaseException]) -> KVLoftConnector:
    """Return a connector whose scheduler side raises ``error`` in every call."""

    def fail(*_: Any) -> None:
        raise error

    half = SimpleNamespace(
        match=fail,
        admit=fail,
        take_stats=fail,
        close=fail,
        hook_errors=0,
        core=SimpleNamespace(
            plan_loads_only=lambda: LOADS_ONLY,
            plan_step=fail,
            finish=fail,
            reset=fail,
            take_notes=list,
        ),
    )
    connector = object.__new__(KVLoftConnector)
    connector._errors_logged, connector._half, connector._scheduler = set(), half, half  # type: ignore[assignment]
    return connector


@pytest.mark.parametrize("error", [RuntimeError, PanicLike])
def test_any_error_in_a_hook_is_a_counted_miss(error: type[BaseException]) -> None:
    connector = broken(error)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1],))
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    connector.update_state_after_alloc(None, blocks, 16)
    assert connector.build_connector_meta(None).plan is LOADS_ONLY
    assert connector.request_finished(None, []) == (False, None)
    assert connector.reset_cache() is False
    assert connector.get_kv_connector_stats() is None
    connector.shutdown()
    assert connector._scheduler.hook_errors == 7


@pytest.mark.parametrize("error", [RuntimeError, PanicLike])
def test_a_failure_of_kv_events_costs_no_plan_and_no_other_requests_events(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    connector, told = broken(error), list[str]()

    def fail() -> None:
        raise error

    half: Any = connector._scheduler
    half.renew, half.plan_step = lambda: None, lambda _: LOADS_ONLY
    half.core.take_notes = lambda: [fail, lambda: told.append("a"), fail, lambda: told.append("b")]
    assert connector.build_connector_meta(None).plan == LOADS_ONLY
    assert told == ["a", "b"] and half.hook_errors == 2
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "kvloft: error in _note_for_events"
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exceptions_that_end_the_process_pass_through(error: type[BaseException]) -> None:
    with pytest.raises(error):
        broken(error).get_num_new_matched_tokens(None, 0)


@pytest.mark.parametrize("error", [RuntimeError, PanicLike])
def test_a_load_that_cannot_be_planned_is_reported(error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error

    told: list[int] = []
    half = object.__new__(SchedulerHalf)
    half._adapters = None  # type: ignore[assignment]
    half._new_tables = Tables
    half.core = SimpleNamespace(
        admit=fail, fail_load=lambda _, num_tokens, __: told.append(num_tokens)
    )  # type: ignore[assignment]
    request: Any = SimpleNamespace(request_id="r")
    with pytest.raises(error):
        half.admit(request, ([1],), 16)
    with pytest.raises(error):
        half.admit(request, ([1],), 0)
    assert told == [16]
