"""Tests embedded prompts on models with multiple KV cache groups: embedding rows have KV in every
group and are identified by their bytes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from .client import Engine, Req, Zygote, engine_kwargs, kvloft
from .conftest import Truth
from .test_groups import Place, assert_sound
from .zoo.models import IS_WHOLE, ZOO

NAMES = ("gemma3", "gemma4", "gpt-oss", "mistral", "qwen3-next") if IS_WHOLE else ("gemma3",)


@pytest.fixture(scope="module", params=NAMES)
def place(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """Yield each model, configured to accept embeddings."""
    model = ZOO[request.param]
    folder = model.write(tmp_path_factory.mktemp(model.name))
    truth = Truth(
        lambda: zygote.engine(
            engine_kwargs(folder, **model.plain() | {"enable_prompt_embeds": True}),
            prepare=model.prepare,
        )
    )
    yield Place(model, folder, truth)
    truth.close()


def embedded(
    place: Place, seed: int, num_rows: int, *, mixed: bool, before: Req | None = None
) -> Req:
    """Return a prompt of random rows, or of alternating rows and tokens.

    The prompt starts with the rows of ``before``.
    """
    width = place.model.config()["hidden_size"]

    def make(seed: int) -> Req:
        pick = np.random.default_rng(seed)
        rows = pick.standard_normal((num_rows, width)).astype(np.float32)
        if before is not None and before.embeds is not None:
            rows[: len(before.embeds)] = before.embeds[:num_rows]
        if not mixed:
            return Req(embeds=rows, max_tokens=6)
        ids = tuple(int(i) for i in pick.integers(3, 512, num_rows))
        return Req(
            ids, embeds=rows, is_token=tuple(at % 50 < 20 for at in range(num_rows)), max_tokens=6
        )

    return place.truth.pick(make, seed)


@pytest.mark.parametrize("mixed", [False, True])
def test_embedded_prompts_are_found_by_their_rows(
    place: Place, zygote: Zygote, tmp_path: Path, mixed: bool
) -> None:
    config = kvloft(tmp_path, kv_groups=place.model.kv_groups)
    arguments = place.model.engine(place.folder) | {
        "enable_prompt_embeds": True,
        "kv_transfer_config": config,
    }
    start: Callable[[], Engine] = lambda: zygote.engine(  # noqa: E731
        engine_kwargs(place.folder, **arguments), prepare=place.model.prepare
    )
    first = embedded(place, 1, 300, mixed=mixed)
    requests = [
        first,
        embedded(place, 2, 350, mixed=mixed),
        embedded(place, 3, 330, mixed=mixed, before=None if mixed else first),
    ]
    engine = start()
    for turn in range(3):
        results = engine.ask_each(*(request.again() for request in requests))
        assert [result.tokens for result in results] == [
            place.truth.tokens(request) for request in requests
        ]
        assert (min(result.num_external for result in results) > 0) == (turn > 0), turn
        assert_sound(engine)
        if turn == 1:
            engine.stop()
            engine = start()
        else:
            engine.reset()
    engine.kill()
