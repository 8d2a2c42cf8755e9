"""Tests that the generated tokens of a chat are hits in the next turn, in each scheduling mode.

The second turn consists of the first prompt, the output and new tokens. Neither the last sampled
token (I7) nor rejected draft tokens have KV.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .client import BLOCK, Engine, Req, full_blocks, kvloft, random_ids
from .conftest import Truth

WAYS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "v2": {"v2_shape": True},
    "v2-async": {"v2_shape": True, "async_scheduling": True},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 4},
    "chunked-async": {"max_num_batched_tokens": 48, "max_num_seqs": 4, "async_scheduling": True},
    "unchunked": {"enable_chunked_prefill": False},
    "ngram": {},
    "ngram-v2": {"v2_shape": True},
    "prefix-caching": {"enable_prefix_caching": True},
}


def two_turns(truth: Truth, engine: Engine, seed: int, num_prompt: int, num_output: int) -> None:
    """Run two turns and check their tokens.

    The second turn must load every full block of the first turn that has KV.
    """
    first = truth.pick(lambda s: Req(random_ids(s, num_prompt), max_tokens=num_output), seed)
    said = engine.ask(first)[0].tokens
    assert said == truth.tokens(first)
    engine.reset()  # reset vLLM's own prefix cache if it is enabled
    history = (first.ids or ()) + said
    second = truth.pick(lambda s: Req(history + random_ids(s, 21), max_tokens=30), seed + 1)
    result = engine.ask(second)[0]
    assert result.tokens == truth.tokens(second)
    assert result.num_external == full_blocks(num_prompt + num_output - 1)


@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=pytest.mark.short if w in ("sync", "async") else ()) for w in WAYS],
)
def test_turn_two_finds_prompt_and_output_of_turn_one(
    truth: Truth, start: Callable[..., Engine], request: pytest.FixtureRequest, way: str
) -> None:
    settings = dict(WAYS[way])
    if way.startswith("ngram"):
        settings |= request.getfixturevalue("ngram")
    engine = start(kv_transfer_config=kvloft(), **settings)
    two_turns(truth, engine, 1000, 70, 50)
    two_turns(truth, engine, 1010, 70, 58)  # only 127 of the 128 tokens have KV
    two_turns(truth, engine, 1020, 70, 59)
    if way not in ("chunked", "chunked-async"):
        return
    two_turns(truth, engine, 1030, 200, 20)


def test_rejected_drafts_are_never_saved(
    truth: Truth, start: Callable[..., Engine], ngram: dict[str, Any]
) -> None:
    engine = start(kv_transfer_config=kvloft(), **ngram)
    requests = truth.clear([Req(random_ids(1100 + i, 50 + i), max_tokens=90) for i in range(8)])
    said = engine.ask(*requests)
    metrics = engine.metrics()
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert (
        metrics["vllm:spec_decode_num_draft_tokens_total"]
        > metrics["vllm:spec_decode_num_accepted_tokens_total"]
    )
    seconds = [
        truth.pick(
            lambda seed, h=(r.ids or ()) + s.tokens: Req(h + random_ids(seed, 9), max_tokens=16),
            1200 + i,
        )
        for i, (r, s) in enumerate(zip(requests, said, strict=True))
    ]
    for request, second, result in zip(requests, seconds, engine.ask(*seconds), strict=True):
        assert result.tokens == truth.tokens(second)
        assert result.num_external == full_blocks(request.num_prompt_tokens + 90 - 1)


def test_three_turns_with_a_restart_between_each(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path
) -> None:
    history = truth.pick(lambda s: Req(random_ids(s, 45), max_tokens=40), 1300).ids or ()
    computed = 0
    for turn in range(3):
        engine = start(kv_transfer_config=kvloft(tmp_path), async_scheduling=turn == 1)
        request = Req(history, max_tokens=40)
        result = engine.ask(request)[0]
        assert result.tokens == truth.tokens(request)
        assert result.num_external == full_blocks(computed)
        computed = len(history) + 40 - 1
        history += result.tokens
        history = (
            truth.pick(
                lambda s, h=history: Req(h + random_ids(s, 17), max_tokens=40), 1301 + turn
            ).ids
            or ()
        )
        engine.stop()


def test_local_and_external_hits_add_up(truth: Truth, start: Callable[..., Engine]) -> None:
    engine = start(kv_transfer_config=kvloft(), enable_prefix_caching=True, num_blocks=24)
    long = Req(random_ids(1400, 10 * BLOCK + 5), max_tokens=4)
    assert engine.ask(long)[0].tokens == truth.tokens(long)
    other = Req(random_ids(1401, 18 * BLOCK), max_tokens=4)
    assert engine.ask(other)[0].tokens == truth.tokens(
        other
    )  # this prompt evicts the end of the first prompt from the GPU
    again = long.again()
    result = engine.ask(again)[0]
    assert result.tokens == truth.tokens(again)
    assert 0 < result.num_external < 10 * BLOCK
    assert result.cached == 10 * BLOCK


def test_a_prompt_of_whole_blocks_is_answered_with_full_and_partial_loads(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    for settings in (
        {},
        {"async_scheduling": True},
        {"v2_shape": True},
        {"enable_prefix_caching": True},
    ):
        engine = start(kv_transfer_config=kvloft(), **settings)
        request = Req(random_ids(1500, 4 * BLOCK), max_tokens=40)
        for _ in range(3):
            result = engine.ask(request.again())[0]
            assert result.tokens == truth.tokens(request)
            engine.reset()
        assert result.num_external in (3 * BLOCK, 4 * BLOCK)
        engine.kill()


def test_skip_reading_prefix_cache_computes_and_still_saves(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    engine = start(kv_transfer_config=kvloft())
    request = Req(random_ids(1600, 100))
    for skip, num_external in ((True, 0), (False, 96), (True, 0), (False, 96)):
        result = engine.ask(request.again(skip_reading=skip))[0]
        assert (result.tokens, result.num_external) == (truth.tokens(request), num_external)
    assert not engine.state()["busy"]
