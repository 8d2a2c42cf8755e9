"""Tests that KV of replaced LoRA weights is not saved under the keys of the earlier weights."""

from typing import Any

import pytest
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, stored, tables

from kvloft.seam.shape import CacheShape, GroupShape

NUMBER, FIRST = 7, ("a", "/v1")


@pytest.mark.parametrize("state", ["running", "preempted", "waiting"])
@pytest.mark.parametrize("number", [NUMBER, NUMBER + 1])
def test_only_requests_with_the_adapter_stop_saving_under_its_key(state: str, number: int) -> None:
    engine = SymbolicEngine(Setup(local_cache=False))
    request = Request("r", list(PROMPT), 20, adapter=FIRST, adapter_number=NUMBER)
    if state == "waiting":  # matched, but vLLM had no blocks for it
        engine.core.match(request, 0)
    else:
        engine.add(request)
        engine.run(2)
    if number == NUMBER:
        request.adapter, request.savable_tokens = ("a", "unique"), 0
    engine.core.replace_adapter(number)
    if state == "waiting":
        engine.add(request)
    elif state == "preempted":
        engine.running.remove(request)
        engine._preempt(request, engine.preempted_by_reset)
    engine.store.entries.clear()  # so that all chunks found below were saved after the replacement
    engine.run(100)
    engine.drain()
    assert request.status == "finished"
    twin = Request("twin", list(request.token_ids), 1, adapter=FIRST)
    assert (stored(engine, twin) > 0) == (number != NUMBER)
    assert stored(engine, request) == stored(engine, twin) * (number != NUMBER)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_hits_are_not_saved_after_a_replacement_if_writers_are_unknown(kind: Any) -> None:
    """Without full attention, hits in vLLM's prefix cache are not checked against their writers."""
    core = SymbolicEngine(Setup()).core
    core._shape = CacheShape((GroupShape(4, kind=kind, reach=8 * (kind == "window")),))
    blocked = list[bool]()
    for req_id, change in (
        ("before", lambda: None),
        ("after", lambda: core.replace_adapter(NUMBER)),
        ("later", core.note_pool_reset),  # running requests continue with the new weights
    ):
        change()
        request = Request(req_id, list(PROMPT), 1)
        core.match(request, 4)
        core.admit(request, 0, tables(range(5)))
        blocked.append(core._requests[request.req_id].save_blocked)
    assert blocked == [False, kind == "window", kind == "window"]
