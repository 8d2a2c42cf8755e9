"""Tests that all resources are released after aborts at any time, after resets with and without the
connector, and in idle engines.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .client import BLOCK, Engine, Req, full_blocks, kvloft, random_ids
from .conftest import Truth

SHAPES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_scheduling": True},
    "v2-async-caching": {"async_scheduling": True, "v2_shape": True, "enable_prefix_caching": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_abort_at_any_step_releases_everything(
    truth: Truth, start: Callable[..., Engine], shape: str
) -> None:
    """Abort requests in each state: queued (step 0), computing the prompt in chunks, saving, and
    decoding.
    """
    engine = start(
        num_blocks=40, max_num_batched_tokens=64, kv_transfer_config=kvloft(), **SHAPES[shape]
    )
    other = Req(random_ids(5001, 50), max_tokens=20)
    for step in range(14):
        victim = Req(random_ids(5010 + step, 5 * BLOCK + step), max_tokens=60)
        companion = other.again()
        engine.add(victim, companion)
        engine.step(step)
        engine.abort(victim.id)
        results = engine.run()
        assert victim.id not in results or results[victim.id].finish == "abort"
        assert results[companion.id].tokens == truth.tokens(other)
        engine.assert_at_rest()
        engine.reset()
        again = victim.again()
        result = engine.ask(again)[0]
        assert result.tokens == truth.tokens(again)
        assert result.num_external <= full_blocks(victim.num_prompt_tokens)
        engine.reset()


@pytest.mark.parametrize("shape", SHAPES)
def test_abort_during_a_load_releases_everything(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path, shape: str
) -> None:
    """Loads chunks from disk so that the lookup takes multiple steps.

    Some aborts occur during the lookup, others during the load.
    """
    request = Req(random_ids(5100, 8 * BLOCK + 3), max_tokens=8)
    seen: set[str] = set()
    for step in range(5):
        engine = start(kv_transfer_config=kvloft(tmp_path), **SHAPES[shape])
        if step == 0:
            assert engine.ask(request.again())[0].tokens == truth.tokens(request)
        else:
            victim = request.again()
            engine.add(victim)
            engine.step(step)
            seen.add(engine.status(victim) or "done")
            engine.abort(victim.id)
            engine.run()
            engine.assert_at_rest()
            result = engine.ask(request.again())[0]
            assert result.tokens == truth.tokens(request)
            assert result.num_external == 8 * BLOCK or "caching" in shape
            engine.assert_at_rest()
        engine.stop()
    assert seen & {"WAITING_FOR_REMOTE_KVS", "WAITING"}, seen


@pytest.mark.parametrize("shape", SHAPES)
def test_reset_clears_the_store_only_with_the_connector(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path, shape: str
) -> None:
    engine = start(kv_transfer_config=kvloft(tmp_path), **SHAPES[shape])
    request = Req(random_ids(5200, 150), max_tokens=20)
    for connector, num_external in (
        (False, 0),
        (False, 128),
        (True, 128),
        (False, 0),
        (False, 128),
    ):
        result = engine.ask(request.again())[0]
        assert (result.tokens, result.num_external) == (truth.tokens(request), num_external)
        assert engine.reset(connector=connector)
    engine.reset(connector=True)
    engine.stop()
    again = start(kv_transfer_config=kvloft(tmp_path), **SHAPES[shape])
    result = again.ask(request.again())[0]
    assert (result.tokens, result.num_external) == (truth.tokens(request), 0), (
        "a removed chunk was read from disk"
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_reset_in_the_middle_of_running_requests(
    truth: Truth, start: Callable[..., Engine], shape: str
) -> None:
    engine = start(
        num_blocks=40, max_num_batched_tokens=96, kv_transfer_config=kvloft(), **SHAPES[shape]
    )
    requests = truth.clear(
        [Req(random_ids(5300 + i, 70 + 11 * i), max_tokens=40) for i in range(6)]
    )
    for connector in (False, True):
        for steps in (1, 2, 5, 12, 30):
            batch = [r.again() for r in requests]
            engine.add(*batch)
            finished = engine.step(steps)
            assert not finished
            if not any(s == "WAITING_FOR_REMOTE_KVS" for s in engine.state()["status"].values()):
                assert engine.reset(running=True, connector=connector)
            results = engine.run()
            assert [results[r.id].tokens for r in batch] == [truth.tokens(r) for r in requests], (
                connector,
                steps,
            )
            engine.assert_at_rest()


def test_an_idle_engine_has_settled_its_saves(truth: Truth, start: Callable[..., Engine]) -> None:
    for settings in SHAPES.values():
        engine = start(kv_transfer_config=kvloft(), **settings)
        request = Req(random_ids(5400, 4 * BLOCK), max_tokens=1)
        assert engine.ask(request)[0].tokens == truth.tokens(request)
        engine.assert_at_rest()
        assert engine.store()["frames_visible"] == 4
        engine.kill()


def test_prefixes_shared_within_one_batch(truth: Truth, start: Callable[..., Engine]) -> None:
    """Requests that start together save and load the same chunks at the same time. Each chunk is
    stored once, and all tokens are correct.
    """
    system = random_ids(5500, 4 * BLOCK)
    requests = truth.clear(
        [Req(system + random_ids(5501 + i, 20), max_tokens=12) for i in range(8)]
    )
    for settings in SHAPES.values():
        engine = start(num_blocks=100, kv_transfer_config=kvloft(), **settings)
        for _ in range(2):
            results = engine.ask(*[r.again() for r in requests])
            assert [r.tokens for r in results] == [truth.tokens(r) for r in requests]
            engine.reset()
        loaders = (
            1 if "enable_prefix_caching" in settings else len(requests)
        )  # the other requests share the first request's blocks
        assert (
            sorted(r.num_external for r in results)
            == [0] * (len(requests) - loaders) + [4 * BLOCK] * loaders
        )
        assert engine.store()["frames_visible"] == 4 + len(requests) * (
            (4 * BLOCK + 20 + 12 - 1) // BLOCK - 4
        )
        engine.assert_at_rest()
        engine.kill()
