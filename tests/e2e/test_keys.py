"""Tests that the key of a prefix includes everything on which its KV depends, such as embedding
rows, adapters and salts. Only equal prefixes share KV.

Each scenario asserts the exact number of external tokens and compares the output with that of vLLM
without any cache.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from . import tiny
from .client import BLOCK, PACE, Engine, Req, Zygote, engine_kwargs, full_blocks, kvloft, random_ids
from .conftest import Truth

NUM_ROWS = 4 * BLOCK + 7
FULL = full_blocks(NUM_ROWS)
by_block = partial(kvloft)


def embeds(seed: int, num_rows: int = NUM_ROWS) -> NDArray[np.float32]:
    """Return random rows that resemble the model's embeddings but are not the embedding of any
    token.
    """
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((num_rows, tiny.HIDDEN)) * tiny.EMBED_STD).astype(np.float32)


def check(truth: Truth, engine: Engine, request: Req, *, num_external: int) -> None:
    """Run ``request`` alone and check that its tokens are correct and that exactly ``num_external``
    tokens came from kvloft.
    """
    request = request.again()
    result = engine.ask(request)[0]
    assert result.tokens == truth.tokens(request)
    assert result.num_external == num_external


@pytest.mark.short
def test_embeddings_of_equal_length_never_share(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path
) -> None:
    a, b = Req(embeds=embeds(1), salt="one"), Req(embeds=embeds(2), salt="one")
    half = Req(embeds=np.concatenate([embeds(1)[: 2 * BLOCK], embeds(2)[2 * BLOCK :]]), salt="one")
    first = start(kv_transfer_config=by_block(tmp_path))
    check(truth, first, a, num_external=0)
    first.stop()

    second = start(kv_transfer_config=by_block(tmp_path))
    check(truth, second, b, num_external=0)
    check(truth, second, a, num_external=FULL)
    check(truth, second, half, num_external=2 * BLOCK)
    check(truth, second, a.again(salt="two"), num_external=0)
    check(truth, second, a.again(salt=None), num_external=0)
    check(truth, second, a.again(salt="two"), num_external=FULL)
    check(truth, second, Req((0,) * NUM_ROWS, salt="one"), num_external=0)


def test_token_ids_never_share_with_embeddings(truth: Truth, start: Callable[..., Engine]) -> None:
    ids = random_ids(3, NUM_ROWS)
    engine = start(kv_transfer_config=by_block())
    check(truth, engine, Req((0,) * NUM_ROWS), num_external=0)
    check(truth, engine, Req(embeds=embeds(1)), num_external=0)
    check(
        truth,
        engine,
        Req(embeds=np.full((NUM_ROWS, tiny.HIDDEN), 0.25, np.float32)),
        num_external=0,
    )
    check(truth, engine, Req((0,) * NUM_ROWS), num_external=FULL)
    check(truth, engine, Req(ids), num_external=0)
    check(truth, engine, Req(embeds=tiny.embedding_rows(list(ids))), num_external=0)
    check(truth, engine, Req(ids), num_external=FULL)


def test_one_bit_of_one_row_ends_the_shared_prefix(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    rows = embeds(4)
    engine = start(kv_transfer_config=by_block())
    check(truth, engine, Req(embeds=rows), num_external=0)
    for row, num_external in (
        (0, 0),
        (BLOCK - 1, 0),
        (BLOCK, BLOCK),
        (3 * BLOCK - 1, 2 * BLOCK),
        (NUM_ROWS - 1, FULL),
    ):
        changed = rows.copy()
        changed.view(np.uint32)[row, row % tiny.HIDDEN] ^= 1
        request = Req(embeds=changed, salt=None)
        assert engine.ask(request)[0].num_external == num_external, row
        check(truth, engine, Req(embeds=rows), num_external=FULL)


def test_mixed_prompts_share_only_equal_positions(
    truth: Truth, start: Callable[..., Engine], tmp_path: Path
) -> None:
    ids, rows, others = random_ids(5, NUM_ROWS), embeds(6), embeds(7)
    position = np.arange(NUM_ROWS)
    is_token = (position < 40) | (
        position >= 80
    )  # the rows at positions 40 to 79 are in blocks 1 and 2
    mask = tuple(bool(m) for m in is_token)

    def mixed(tokens: tuple[int, ...], values: NDArray[np.float32]) -> Req:
        return Req(
            tokens, embeds=np.where(is_token[:, None], 0, values).astype(np.float32), is_token=mask
        )

    first = start(kv_transfer_config=by_block(tmp_path))
    check(truth, first, mixed(ids, rows), num_external=0)
    first.stop()
    engine = start(kv_transfer_config=by_block(tmp_path))
    check(truth, engine, mixed(ids, others), num_external=BLOCK)
    check(truth, engine, mixed(ids, rows), num_external=FULL)
    check(truth, engine, Req(ids), num_external=BLOCK)
    check(truth, engine, Req(embeds=rows), num_external=0)
    check(
        truth,
        engine,
        mixed(ids[:100] + random_ids(8, NUM_ROWS - 100), rows),
        num_external=3 * BLOCK,
    )


def test_generated_tokens_after_embeddings_are_found_again(
    truth: Truth, start: Callable[..., Engine]
) -> None:
    rows = embeds(9, 60)
    engine = start(kv_transfer_config=by_block())
    said = engine.ask(Req(embeds=rows, max_tokens=50))[0].tokens
    assert said == truth.tokens(Req(embeds=rows, max_tokens=50))
    num_tokens = 60 + 50 + 20
    ids = (0,) * 60 + said + random_ids(10, 20)
    mask = (False,) * 60 + (True,) * 70
    padded = np.zeros((num_tokens, tiny.HIDDEN), np.float32)
    padded[:60] = rows
    check(
        truth, engine, Req(ids, embeds=padded, is_token=mask), num_external=full_blocks(60 + 50 - 1)
    )
    padded = padded.copy()
    padded[:60] = embeds(11, 60)
    check(truth, engine, Req(ids, embeds=padded, is_token=mask), num_external=0)


@pytest.mark.short
def test_salts_separate_equal_token_ids(truth: Truth, start: Callable[..., Engine]) -> None:
    request = Req(random_ids(12, NUM_ROWS))
    engine = start(kv_transfer_config=by_block())
    for salt in (None, "a", "b", "", "ab"):
        if salt != "":  # vLLM rejects an empty salt
            check(truth, engine, request.again(salt=salt), num_external=0)
            check(truth, engine, request.again(salt=salt), num_external=FULL)


def patient(engine: Engine) -> Engine:
    """Make ``engine`` wait until an adapter's files are checked, which can be slow on a busy
    machine. kvloft shares the KV of an adapter only after this check.
    """
    engine.call("_scheduler._adapters._looks.__setattr__", "_timeout_s", 60.0 * PACE)
    return engine


WITH_LORA = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "enable_prompt_embeds": False,
}


def test_kv_of_an_adapter_loaded_in_place_is_not_found_under_the_first_one(
    zygote: Zygote, model: Path, start: Callable[..., Engine], tmp_path: Path
) -> None:
    """The later request names the first path, but the worker uses the weights loaded in place."""
    before, after = (str(tiny.write_lora(tmp_path / f"lora{i}", seed=i)) for i in (1, 2))
    first_lora = ("a", 1, before)
    oracle = Truth(lambda: zygote.engine(engine_kwargs(model, num_blocks=200, **WITH_LORA)))
    try:
        later = oracle.pick(lambda i: Req(random_ids(i, NUM_ROWS), lora=first_lora), 23)
        decoding = Req(random_ids(21, NUM_ROWS), max_tokens=3 * BLOCK, lora=first_lora)
        engine = patient(start(kv_transfer_config=by_block(tmp_path / "disk"), **WITH_LORA))
        engine.add(decoding)
        engine.step(2)
        engine.add(Req(random_ids(22, NUM_ROWS), lora=("a", 1, after, True)))
        results = engine.run()
        assert engine.ask(later.again())[0].tokens != oracle.tokens(later), "not loaded in place"
        engine.stop()
        second = patient(start(kv_transfer_config=by_block(tmp_path / "disk"), **WITH_LORA))
        check(oracle, second, later, num_external=0)
        ids = (*(decoding.ids or ()), *results[decoding.id].tokens)
        assert second.ask(Req(ids, lora=first_lora))[0].num_external == FULL
    finally:
        oracle.close()


def test_adapters_separate_equal_token_ids(
    zygote: Zygote, model: Path, start: Callable[..., Engine], tmp_path: Path
) -> None:
    adapters = [
        (f"adapter{i}", i, str(tiny.write_lora(tmp_path / f"lora{i}", seed=i))) for i in (1, 2)
    ]
    oracle = Truth(lambda: zygote.engine(engine_kwargs(model, num_blocks=200, **WITH_LORA)))
    try:
        request = Req(random_ids(13, NUM_ROWS))
        variants = [request.again(lora=adapter) for adapter in (None, *adapters)]
        assert len({oracle.tokens(v) for v in variants}) == 3, "the adapters have no effect"
        first = patient(start(kv_transfer_config=by_block(tmp_path / "disk"), **WITH_LORA))
        for variant in variants:
            check(oracle, first, variant, num_external=0)
            check(oracle, first, variant, num_external=FULL)
        first.stop()
        second = patient(start(kv_transfer_config=by_block(tmp_path / "disk"), **WITH_LORA))
        renamed = request.again(lora=("third", 3, adapters[0][2]))
        check(oracle, second, variants[1], num_external=FULL)
        assert second.ask(renamed)[0].num_external == 0
        check(oracle, second, variants[0], num_external=FULL)
    finally:
        oracle.close()
