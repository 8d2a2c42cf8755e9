"""Tests a draft model whose KV at a position depends on the next token. A block is valid only
together with the token after the block.
"""

from typing import Any

import pytest
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import PROMPT, both_modes, serve, stored, tables, whole_blocks

from kvloft.seam.views import NewRequest, StepView

BLOCK = 4


@both_modes
@pytest.mark.parametrize("num_outputs", [1, 2, 6, 7, 8, 9])
def test_all_blocks_with_a_known_next_token_are_found(run_ahead: bool, num_outputs: int) -> None:
    engine = SymbolicEngine(Setup(run_ahead=run_ahead, lookahead=1))
    request = serve(engine, Request("a", list(PROMPT), num_outputs))
    assert stored(engine, request) == whole_blocks(request.num_tokens - 2)
    settle(engine)


def test_a_block_is_not_found_under_another_next_token() -> None:
    engine = SymbolicEngine(Setup(local_cache=False, lookahead=1))
    serve(engine, Request("a", list(PROMPT), 2))
    same, other = PROMPT[: 3 * BLOCK + 1], [*PROMPT[: 3 * BLOCK], PROMPT[3 * BLOCK] + 1]
    assert engine.match(Request("same", [*same, 0, 0], 2), 0) == 3 * BLOCK
    assert engine.match(Request("other", [*other, 0, 0], 2), 0) == 2 * BLOCK


def test_a_prompts_end_is_saved_after_its_next_token_is_known() -> None:
    engine = SymbolicEngine(Setup(local_cache=False, lookahead=1))
    request = engine.add(Request("a", PROMPT[: 2 * BLOCK], 3))
    engine.run(1)
    assert stored(engine, request) == BLOCK
    engine.run(2)
    assert stored(engine, request) == 2 * BLOCK
    settle(engine)


def test_a_pending_load_waits_only_for_blocks_that_vllm_keeps() -> None:
    """vLLM drops the last block of a hit in its own cache. Waiting for this block is pointless."""
    engine = SymbolicEngine(Setup(lookahead=1))
    serve(engine, Request("before", list(PROMPT), 3))
    engine.reset_prefix_cache(with_connector=False)
    engine.add(Request("first", list(PROMPT), 2))
    engine.schedule()
    second = engine.add(Request("second", [*PROMPT, 0, 0, 0, 0, 0], 2))
    assert engine.match(second, 0) is None
    assert engine.match(second, 3 * BLOCK) == BLOCK
    settle(engine)


def test_steps_without_the_draft_model_are_not_saved() -> None:
    """vLLM skips the draft model for a whole step if one request is close to the maximum length.

    The blocks that such a step writes are never saved.
    """
    engine = SymbolicEngine(Setup(lookahead=1, draft_limit=len(PROMPT) + 1))
    long = serve(engine, Request("long", list(PROMPT), 6))
    assert stored(engine, long) == 4 * BLOCK
    engine.add(Request("longer", [*PROMPT[::-1], 0, 0], 2))
    short = serve(engine, Request("short", [2, *PROMPT[1:9]], 2))
    assert stored(engine, short) == 0
    after = serve(engine, Request("after", [*short.token_ids, 0, 0, 0], 3))
    assert stored(engine, after) == 0, "the first block came from vLLM's own cache"
    settle(engine)


def test_a_long_prompts_keys_are_made_as_its_blocks_need_them() -> None:
    engine = SymbolicEngine(Setup(lookahead=1, block_tokens=16, num_blocks=60, num_frames=60))
    request = serve(engine, Request("a", [n % 3 for n in range(700)], 2), budget=160)
    assert stored(engine, request) == whole_blocks(700, 16)
    settle(engine)


def test_a_session_that_replaces_its_last_token_saves_no_more() -> None:
    """The draft model's KV at the position before the replaced token depends on that token."""
    engine = SymbolicEngine(Setup(block_tokens=2, lookahead=1, local_cache=False))
    request = serve(engine, Request("a", PROMPT[:5], 2, updates=[[2, 2, 0, 1, 1], None]))  # type: ignore[list-item]
    assert stored(engine, request) == 4
    settle(engine)


@both_modes
def test_the_next_turn_of_a_chat_is_saved_after_an_unsaved_answer(
    run_ahead: bool,
) -> None:
    """The answer's blocks are hits in vLLM's own cache and are saved with the next prompt."""
    engine = SymbolicEngine(Setup(lookahead=1, run_ahead=run_ahead))
    first = serve(engine, Request("a", list(PROMPT), 9, saves="prompt"))
    assert stored(engine, first) == whole_blocks(len(PROMPT) - 1)
    second = serve(engine, Request("b", [*first.token_ids, 1, 0, 2, 1, 1, 1], 2, saves="prompt"))
    assert stored(engine, second) == whole_blocks(first.num_tokens + 6 - 1)
    settle(engine)


def start(
    engine: SymbolicEngine, given: dict[str, tuple[list[int], list[int]]], local: int, **num: int
) -> Any:
    """Plan the first step of requests with the given tokens and block tables.

    ``local`` tokens are in vLLM's cache. ``num`` is the number of scheduled tokens by request.
    """
    for name, (prompt, table) in given.items():
        request: Any = Request(name, prompt, 9)
        engine.match(request, local)
        engine.core.admit(request, 0, tables(table))
    new: Any = [NewRequest(name, local, table) for name, (_, table) in given.items()]  # type: ignore[arg-type]
    return engine.core.plan_step(StepView(new=new, num_scheduled_tokens=num))  # type: ignore[arg-type]


def test_a_block_that_a_request_wrote_which_saves_nothing_is_not_known_as_what_it_was_before() -> (
    None
):
    """Request "b" gets the blocks of request "a" while a long request runs, and the draft model
    writes to these blocks for a different next token.
    """
    engine = SymbolicEngine(Setup(block_tokens=2, lookahead=1, draft_limit=20))
    same, other = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9]
    assert start(engine, {"a": (same, [1, 2, 3, 4])}, 0, a=8).saves
    engine.core.finish("a")  # type: ignore[arg-type]
    given = {"b": (other, [1, 2, 3, 4]), "long": (list(range(50, 80)), list(range(10, 26)))}
    assert not start(engine, given, 0, b=2, long=30).saves
    engine.core.finish("long")  # type: ignore[arg-type]
    alone: Any = StepView(running=["b"], num_computed_tokens=[2], num_scheduled_tokens={"b": 6})  # type: ignore[list-item,dict-item]
    assert not engine.core.plan_step(alone).saves
    engine.core.finish("b")  # type: ignore[arg-type]
    engine.core.reset()
    assert not start(engine, {"c": (same, [1, 2, 30, 31])}, 4, c=4).saves
    engine.core.close()


def saves_of_a_hit(prompt: list[int], local: int) -> Any:
    """Plan the first step of a request. All of the request's chunks except the last chunk are
    stored.

    vLLM's cache has ``local`` of the tokens [1, 2, 3, 4] from a request that was aborted before its
    fifth token was known.
    """
    engine = SymbolicEngine(Setup(block_tokens=2, lookahead=1))
    start(engine, {"stores": (prompt[:-2], [1, 2, 3])}, 0, stores=6)
    engine.core.finish("stores")  # type: ignore[arg-type]
    start(engine, {"aborted": ([1, 2, 3, 4], [5, 6])}, 0, aborted=4)
    engine.core.finish("aborted")  # type: ignore[arg-type]
    table = [*[5, 6][: local // 2], 7, 8, 9, 10]
    return start(engine, {"hits": (prompt, table)}, local, hits=len(prompt) - local).saves


def test_what_follows_a_block_whose_next_token_was_never_known_is_saved() -> None:
    assert saves_of_a_hit([1, 2, 3, 4, 5, 6, 7, 8], 4)


def test_what_follows_a_wrong_hit_is_not_saved_though_the_right_blocks_are_stored() -> None:
    assert not saves_of_a_hit([9, 9, 9, 9, 5, 6, 7, 8], 2)
