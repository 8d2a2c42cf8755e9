"""Tests that a preempted and resumed request reads its own KV, with both of vLLM's formats for
resumed requests.

The block pools are too small for their requests, so preemptions are certain, and the tests assert
that they occur.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .client import BLOCK, Engine, Req, Result, kvloft, random_ids
from .conftest import Truth

SHAPES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2": {"v2_shape": True},
    "v1-async": {"async_scheduling": True},
    "v2-async": {"async_scheduling": True, "v2_shape": True},
}
SHORT = {("v1", False), ("v2", False), ("v2-async", True)}


@pytest.mark.parametrize(
    ("shape", "caching"),
    [
        pytest.param(
            s,
            c,
            id=f"{s}-{'caching' if c else 'no-caching'}",
            marks=pytest.mark.short if (s, c) in SHORT else (),
        )
        for s in SHAPES
        for c in (False, True)
    ],
)
def test_two_requests_in_seven_blocks(
    truth: Truth, start: Callable[..., Engine], shape: str, caching: bool
) -> None:
    """Request 1 is preempted, request 0 takes its blocks, and request 1 resumes with chunks that
    kvloft loads.
    """
    requests = [Req(random_ids(2000 + i, 2 * BLOCK - 2), max_tokens=3 * BLOCK) for i in range(2)]
    engine = start(
        num_blocks=8, kv_transfer_config=kvloft(), enable_prefix_caching=caching, **SHAPES[shape]
    )
    results = engine.ask(*requests)
    assert [r.tokens for r in results] == [truth.tokens(r) for r in requests]
    assert engine.metrics()["vllm:num_preemptions_total"] > 0
    if not (caching and "async" in shape):
        # With caching and async scheduling, the request's blocks are freed immediately and remain
        # in vLLM's own cache, and the block that was being computed at the preemption is lost.
        assert sum(sum(r.resumed) for r in results) >= BLOCK, "nothing was loaded on resume"


def shared_prefix_requests(seed: int, count: int = 30) -> list[Req]:
    """Return requests of different lengths. Each request starts with one of three system prompts.

    The pool can hold the largest request if no other request runs.
    """
    rng = np.random.default_rng(seed)
    systems = [random_ids(seed * 10 + i, int(n)) for i, n in enumerate(rng.integers(33, 110, 3))]
    return [
        Req(
            systems[int(rng.integers(3))] + random_ids(seed * 1000 + i, int(rng.integers(1, 60))),
            max_tokens=int(rng.integers(8, 40)),
        )
        for i in range(count)
    ]


def check_all(truth: Truth, requests: list[Req], results: list[Result]) -> None:
    wrong = [
        i
        for i, (r, x) in enumerate(zip(requests, results, strict=True))
        if x.tokens != truth.tokens(r)
    ]
    assert not wrong, f"requests {wrong} of {len(requests)} differ from the outputs without a cache"


@pytest.mark.parametrize("caching", [False, True], ids=["no-prefix-caching", "prefix-caching"])
@pytest.mark.parametrize("shape", SHAPES)
def test_thirty_requests_with_shared_prefixes_on_thirteen_blocks(
    truth: Truth, start: Callable[..., Engine], shape: str, caching: bool
) -> None:
    engine = start(
        num_blocks=14, kv_transfer_config=kvloft(), enable_prefix_caching=caching, **SHAPES[shape]
    )
    resumed, preempted = 0, 0.0
    for seed in range(3) if "async" not in shape else range(2):
        requests = truth.clear(shared_prefix_requests(2100 + seed, 32))[:30]
        assert engine.reset(connector=True)
        for temperature in ("cold", "warm"):
            batch = [r.again() for r in requests]
            results = engine.ask(*batch)
            check_all(truth, batch, results)
            resumed += sum(sum(r.resumed) for r in results)
            if temperature == "warm":
                assert sum(r.num_external for r in results) > 0
            total = engine.metrics()["vllm:num_preemptions_total"]
            assert total > preempted, f"seed {seed}, {temperature}: no preemption"
            preempted = total
    assert resumed > 0, "nothing was loaded on resume"
    state = engine.state()
    assert (
        not state["busy"]
        and not state["status"]
        and state["free_blocks"] == state["num_blocks"] - 1
    )


@pytest.mark.parametrize("caching", [False, True], ids=["no-prefix-caching", "prefix-caching"])
def test_a_crowd_is_preempted_as_rarely_as_without_a_connector(
    truth: Truth, start: Callable[..., Engine], caching: bool
) -> None:
    """Uses async scheduling and preempts like vLLM 0.26, which keeps preempting requests while the
    blocks of the first preempted request are not yet free.
    """
    requests = truth.clear([Req(random_ids(2300 + i, 60 + i), max_tokens=60) for i in range(12)])
    settings: dict[str, Any] = {
        "num_blocks": 16,
        "async_scheduling": True,
        "enable_prefix_caching": caching,
    }
    preemptions: list[float] = []
    for transfer, deferred in ((None, False), (kvloft(), False), (kvloft(), True)):
        engine = start(**settings, **({"kv_transfer_config": transfer} if transfer else {}))
        # kvloft changes `defer_block_free` at the first request, so send a request first
        engine.ask(Req(random_ids(2399, 5), max_tokens=1))
        engine.preempt_as_0_26(deferred=deferred)
        results = engine.ask(*[r.again() for r in requests])
        assert [r.tokens for r in results] == [truth.tokens(r) for r in requests]
        preemptions.append(engine.metrics()["vllm:num_preemptions_total"])
        engine.kill()
    plain, ours, deferred_ones = preemptions
    assert 0 < ours <= 1.2 * plain
    assert deferred_ones > 1.5 * ours, f"these requests prove nothing: {preemptions}"
