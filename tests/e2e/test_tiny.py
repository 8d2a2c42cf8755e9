"""Tests the test harness: the output of the tiny model depends on every block of its prompt, and
engines can be killed and restarted.
"""

from collections.abc import Callable

import numpy as np

from . import tiny
from .client import BLOCK, Engine, Req, random_ids
from .conftest import Truth


def test_output_depends_on_every_block_of_the_prompt_and_varies(truth: Truth) -> None:
    prompt = random_ids(1, 5 * BLOCK)
    original = truth.tokens(Req(prompt, max_tokens=24))
    assert len(set(original)) > 12
    for block in range(5):
        changed = list(prompt)
        changed[block * BLOCK : (block + 1) * BLOCK] = random_ids(100 + block, BLOCK)
        assert truth.tokens(Req(tuple(changed), max_tokens=24))[:4] != original[:4], (
            f"the output does not depend on block {block}"
        )


def test_an_engine_answers_equally_alone_and_in_a_batch(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    requests = truth.clear([Req(random_ids(200 + i, 40 + 9 * i), max_tokens=24) for i in range(12)])
    engine = start()
    for request, result in zip(requests, engine.ask(*requests), strict=True):
        assert result.tokens == truth.tokens(request)
    for request in requests[:4]:
        assert engine.ask(request.again())[0].tokens == truth.tokens(request)


def test_prompt_embeds_of_the_vocabulary_answer_like_ids(truth: Truth) -> None:
    ids = random_ids(300, 70)
    rows = tiny.embedding_rows(list(ids))
    assert truth.tokens(Req(embeds=rows)) == truth.tokens(Req(ids))
    mixed = Req(
        ids,
        embeds=np.where(np.arange(70)[:, None] < 40, rows, 0),
        is_token=tuple(i >= 40 for i in range(70)),
    )
    assert truth.tokens(mixed) == truth.tokens(Req(ids))


def test_a_killed_engine_is_gone_and_another_can_start(start: Callable[..., Engine]) -> None:
    engine = start()
    request = Req(random_ids(400, 50))
    engine.add(request)
    engine.step(2)
    assert engine.status(request) == "RUNNING"
    engine.kill()
    again = start(async_scheduling=True)
    assert again.state()["scheduler"] == "AsyncScheduler"
    assert len(again.ask(request)[0].tokens) == request.max_tokens


def test_preemption_in_both_scheduler_shapes_keeps_the_output(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    requests = truth.clear([Req(random_ids(500 + i, 60 + i), max_tokens=50) for i in range(8)])
    for shape in (
        {},
        {"v2_shape": True},
        {"async_scheduling": True},
        {"async_scheduling": True, "v2_shape": True},
    ):
        engine = start(num_blocks=13, **shape)
        for request, result in zip(
            requests, engine.ask(*[r.again() for r in requests]), strict=True
        ):
            assert result.tokens == truth.tokens(request), shape
        assert engine.metrics()["vllm:num_preemptions_total"] > 0, shape
        assert engine.state()["v2_shape"] == shape.get("v2_shape", False)
        engine.kill()
