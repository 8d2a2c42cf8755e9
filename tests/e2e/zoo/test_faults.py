"""Reproduces wrong outputs that vLLM 0.32 generates even without kvloft.

kvloft rejects the affected settings (vllm/support.py). If a test in this module fails, vLLM has
fixed the bug, and kvloft may be able to support the setting.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.client import Engine, Req, Zygote, engine_kwargs, random_ids
from e2e.conftest import Truth

from .draft_kernels import BOOK
from .models import IS_WHOLE, ZOO, ZooModel

Start = Callable[..., tuple[Engine, Truth]]
pytestmark = pytest.mark.skipif(not IS_WHOLE, reason="KV_ZOO=all runs every model")


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts an engine with a model, its draft model and vLLM's prefix cache,
    and returns the engine and the reference outputs.
    """
    running: list[tuple[Engine, Truth]] = []

    def launch(model: ZooModel, **more: Any) -> tuple[Engine, Truth]:
        folder, book = model.write(tmp_path), tmp_path / "book"
        truth = Truth(
            lambda: zygote.engine(engine_kwargs(folder, **model.plain()), prepare=model.prepare),
            book,
        )
        arguments = engine_kwargs(folder, **model.engine(folder) | more)
        running.append(
            (zygote.engine(arguments, prepare=model.prepare, env={BOOK: str(book)}), truth)
        )
        return running[-1]

    yield launch
    for engine, truth in running:
        engine.kill()
        truth.close()


def prompt(truth: Truth, seed: int, num_tokens: int, max_tokens: int) -> Req:
    return truth.pick(lambda s: Req(random_ids(s, num_tokens), max_tokens=max_tokens), seed)


ORDERS = ((2, 1, 4, 0, 3), (3, 0, 2, 1, 4), (4, 1, 3, 2, 0))
"""Orders in which the other prompts start. The requests with a hit reuse the batch rows of these
prompts.
"""


def num_wrong_hits(engine: Engine, truth: Truth, size: int) -> int:
    """Return the number of hits with wrong outputs.

    The prompts have 1, 2 and 20 tokens after the hit and start together when three of five other
    requests finish.
    """
    hits = [
        prompt(truth, 9300 + i, rest, 12)
        for i, rest in enumerate((2 * size + 1, 2 * size + 2, 3 * size + 20))
    ]
    others = [prompt(truth, 9000 + i, 150 + 7 * i, 30) for i in range(2)] + [
        prompt(truth, 8000 + i, 140 + i, 4) for i in range(3)
    ]
    wrong = 0
    for order in ORDERS:
        assert engine.reset()
        engine.ask_each(*(hit.again() for hit in hits))
        engine.add(*(others[i].again() for i in order))
        engine.step(1)
        asked = [hit.again() for hit in hits]
        engine.add(*asked)
        results = engine.run()
        wrong += sum(
            results[a.id].tokens != truth.tokens(hit) for a, hit in zip(asked, hits, strict=True)
        )
    return wrong


@pytest.mark.parametrize(
    ("name", "is_wrong"),
    [
        ("ngram-mamba2", True),
        *(
            (f"{drafter}-states", False)
            for drafter in ("ngram", "mtp", "eagle", "eagle3", "dflash", "draft-model")
        ),
    ],
)
def test_a_last_token_with_a_short_rest_is_wrong_with_mamba2_only(
    name: str, is_wrong: bool, start: Start
) -> None:
    """vLLM pads a prompt's last token with draft tokens that will be rejected. If the padded row
    follows a row with the rest of another prompt, vLLM treats both rows as prompts.

    vLLM then keeps only one of the padded row's states: the state after the padding. Gated delta
    nets are not affected, because they check whether a row has draft tokens and ignore its
    position.
    """
    engine, truth = start(ZOO[name], max_num_seqs=5)
    assert bool(num_wrong_hits(engine, truth, ZOO[name].hit_tokens)) is is_wrong


@pytest.mark.parametrize("is_async", [True, False])
def test_counts_of_accepted_drafts_follow_moved_rows_with_async_scheduling_only_by_chance(
    is_async: bool, start: Start
) -> None:
    """vLLM copies the counts of accepted draft tokens to the host at the end of a step and reorders
    them like the rows of the next step. If the counts arrive early, vLLM reorders them twice.

    On CPUs, the counts always arrive early. On GPUs, this is a race.
    """
    engine, truth = start(ZOO["mtp-states"], async_scheduling=is_async, max_num_batched_tokens=512)
    prompts = [prompt(truth, 9100 + i, 60 + 37 * i % 260, 6 + 5 * i % 30) for i in range(24)]
    asked = []
    for one in prompts:
        asked.append(one.again())
        engine.add(asked[-1])
        engine.step(2)
    results = engine.run()
    assert (
        any(
            results[a.id].tokens != truth.tokens(one) for a, one in zip(asked, prompts, strict=True)
        )
        is is_async
    )
