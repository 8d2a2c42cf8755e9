"""Tests failed loads, in which chunks that were offered to vLLM are damaged.

With the policy "recompute", the output is correct. With "fail", the request finishes with an error.
The engine continues in both cases.
"""

from collections.abc import Callable
from typing import Any

import pytest

from .client import BLOCK, Engine, Req, full_blocks, kvloft, random_ids
from .conftest import Truth

SHAPES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "v2-async": {"async_scheduling": True, "v2_shape": True},
    "prefix-caching": {"enable_prefix_caching": True},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 4},
}
REQUESTS = [Req(random_ids(4000 + i, 5 * BLOCK + 3 * i + 1), max_tokens=40) for i in range(4)]
FULL = sum(full_blocks(r.num_prompt_tokens) for r in REQUESTS)


def all_true(truth: Truth, engine: Engine) -> int:
    results = engine.ask(*[r.again() for r in REQUESTS])
    assert [r.tokens for r in results] == [truth.tokens(r) for r in REQUESTS]
    return sum(r.num_external for r in results)


@pytest.mark.parametrize("keep", [0, 3, 11])
@pytest.mark.parametrize("shape", SHAPES)
def test_recompute_gives_right_tokens(
    truth: Truth, start: Callable[..., Engine], shape: str, keep: int
) -> None:
    settings = kvloft(policy="recompute")
    engine = start(num_blocks=80, kv_transfer_config=settings, **SHAPES[shape])
    assert all_true(truth, engine) == 0
    engine.reset()
    assert engine.flip_frames(keep=keep) > 0
    assert all_true(truth, engine) > 0
    metrics = engine.metrics()
    assert metrics["vllm:kvloft_verify_failures_total"] > 0
    engine.assert_at_rest()
    engine.reset()
    assert all_true(truth, engine) == FULL, "damaged chunks were not replaced"
    assert (
        engine.metrics()["vllm:kvloft_verify_failures_total"]
        == metrics["vllm:kvloft_verify_failures_total"]
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_fail_ends_the_request_cleanly(
    truth: Truth, start: Callable[..., Engine], shape: str
) -> None:
    engine = start(num_blocks=80, kv_transfer_config=kvloft(policy="fail"), **SHAPES[shape])
    assert all_true(truth, engine) == 0
    engine.reset()
    assert engine.flip_frames() > 0
    bystander = Req(random_ids(4100, 3 * BLOCK + 5), max_tokens=20)
    *results, untouched = engine.ask(*[r.again() for r in REQUESTS], bystander)
    assert {(r.finish, r.tokens) for r in results} == {("error", ())}
    assert untouched.tokens == truth.tokens(bystander)
    engine.assert_at_rest()
    assert all_true(truth, engine) == 0, "damaged chunks were offered again"
    engine.reset()
    assert all_true(truth, engine) == FULL


def test_answers_are_right_with_damage_and_preemption(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    requests = truth.clear([Req(random_ids(4200 + i, 60 + i), max_tokens=50) for i in range(10)])
    for settings in (
        {},
        {"v2_shape": True},
        {"async_scheduling": True, "enable_prefix_caching": True},
    ):
        engine = start(num_blocks=14, kv_transfer_config=kvloft(policy="recompute"), **settings)
        batch = [r.again() for r in requests]
        engine.add(*batch)
        done: list[str] = []
        for round_ in range(40):
            done += engine.step(5)
            if round_ % 3 == 0:
                engine.flip_frames(keep=round_ % 5)
        results = engine.run()
        assert [results[r.id].tokens for r in batch] == [truth.tokens(r) for r in requests]
        assert engine.metrics()["vllm:num_preemptions_total"] > 0
        assert engine.metrics()["vllm:kvloft_verify_failures_total"] > 0
        engine.assert_at_rest()
        engine.kill()
