"""Tests requests that save only their prompts, or only the tokens that can be found again."""

import pytest
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, both_modes, serve, stored, whole_blocks


@both_modes
@pytest.mark.parametrize("budget", [3, 1000])
def test_a_prompt_is_saved_and_nothing_behind_it(run_ahead: bool, budget: int) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead))
    request = serve(engine, Request("a", list(PROMPT), 20, saves="prompt"), budget)
    assert stored(engine, request) == whole_blocks(len(PROMPT))
    assert len(engine.store.entries) <= whole_blocks(len(PROMPT)) // 4
    other = serve(engine, Request("b", [1, *PROMPT], 20, saves="all"))
    assert stored(engine, other) >= whole_blocks(len(PROMPT) + 1 + 18)


@both_modes
def test_a_prompt_on_whole_blocks_and_one_shorter_than_a_block(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead))
    assert stored(engine, serve(engine, Request("a", PROMPT[:16], 9, saves="prompt"))) == 16
    assert stored(engine, serve(engine, Request("b", [2, 2, 2], 9, saves="prompt"))) == 0


def test_a_requests_parameter_overrides_the_setting() -> None:
    engine = SymbolicEngine(Setup(save_prompts_only=True))
    assert stored(engine, serve(engine, Request("a", list(PROMPT), 9))) == 16
    assert stored(engine, serve(engine, Request("b", [1, *PROMPT], 9, saves="all"))) == 24


def test_once_the_prompt_is_saved_steps_look_at_the_request_once_a_block() -> None:
    """Steps must record the filled blocks, because a later request can have the same prompt."""
    engine = SymbolicEngine(Setup())
    request = engine.add(Request("a", list(PROMPT), 20, saves="prompt"))
    engine.run(3)
    assert request.status == "running"
    tracker = engine.core._requests[request.req_id]
    assert tracker.next_save >= (tracker.num_complete + 1) * engine.setup.block_tokens


@both_modes
def test_the_next_input_of_a_session_is_saved_with_its_history(run_ahead: bool) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead))
    request = engine.add(
        Request("a", PROMPT[:9], 4, saves="prompt", updates=[[2, 1, 0, 2, 1, 0, 0]])
    )
    for _ in range(30):
        engine.run()
        engine.check()
    assert request.num_prompt_tokens == 9 + 3 + 7
    assert stored(engine, request) == 16


@both_modes
@pytest.mark.parametrize(("savable_tokens", "num_saved"), [(0, 0), (7, 4), (8, 8)])
def test_nothing_is_saved_behind_the_tokens_that_can_be_found_again(
    run_ahead: bool, savable_tokens: int, num_saved: int
) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead))
    request = serve(engine, Request("a", list(PROMPT), 20, savable_tokens=savable_tokens))
    assert stored(engine, request) == num_saved
