"""End-to-end test fixtures: the model, the zygote, a function that starts engines, and the
reference outputs (the truth).

The reference outputs come from the same vLLM without a connector and without a prefix cache.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .client import Engine, Req, Result, Zygote, engine_kwargs

CLEAR, MARGIN = 1e-4, 4e-5
"""Minimum distance between the two highest logits, for choosing prompts and for accepting outputs.

Logits differ by about 1e-5 between batch shapes, so requests with a smaller distance cannot be
compared exactly.
"""


ZYGOTE = pytest.StashKey[Zygote]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [i for i in items if Path(__file__).parent in i.path.parents]
    if importlib.util.find_spec("vllm") is None:
        for item in here:
            item.add_marker(pytest.mark.skip(reason="this environment has no vLLM"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the zygote before the first test, because importing vLLM takes half a minute. Tests in
    other directories can run in the meantime.
    """
    wanted = any(Path(__file__).parent in i.path.parents for i in session.items)
    if (
        wanted
        and not session.config.option.collectonly
        and importlib.util.find_spec("vllm") is not None
    ):
        session.config.stash[ZYGOTE] = Zygote(session.config._tmp_path_factory.mktemp("zygote"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if ZYGOTE in config.stash:
        config.stash[ZYGOTE].close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the tiny model."""
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def zygote(pytestconfig: pytest.Config) -> Zygote:
    """Return the process that forks all engines of this session."""
    return pytestconfig.stash[ZYGOTE]


class Truth:
    """The outputs of an engine without any cache, memoized by request content."""

    def __init__(self, engine: Callable[[], Engine], book: Path | None = None) -> None:
        """Start without outputs. If ``book`` is given, also append outputs to this file, which
        zoo/draft_kernels.py reads.
        """
        self._book = book
        if book is not None:
            book.touch()
        self._make, self._engine, self._known = engine, None, dict[Any, Result]()

    def _run(self, requests: Sequence[Req]) -> list[Result]:
        if self._engine is None:
            self._engine = self._make()
        missing = {
            self._key(r): r.again(logprobs=2) for r in requests if self._key(r) not in self._known
        }
        if missing:
            self._known |= dict(zip(missing, self._engine.ask(*missing.values()), strict=True))
            if self._book is not None:
                with self._book.open("a") as book:
                    book.writelines(
                        f"{[*(r.ids or ()), *self._known[key].tokens]}\n"
                        for key, r in missing.items()
                    )
        return [self._known[self._key(r)] for r in requests]

    @staticmethod
    def _key(r: Req) -> Any:
        return (
            r.ids,
            None if r.embeds is None else r.embeds.tobytes(),
            r.is_token,
            r.max_tokens,
            r.lora,
        )

    def tokens(self, request: Req) -> tuple[int, ...]:
        """Return the model's output for ``request``.

        Fails if rounding could change a token. In that case, choose another seed.
        """
        result = self._run([request])[0]
        assert result.margin is not None and result.margin > MARGIN, (
            f"near tie ({result.margin}): choose another seed"
        )
        return result.tokens

    def clear(self, requests: Sequence[Req]) -> list[Req]:
        """Return the ``requests`` whose output does not depend on rounding."""
        return [
            r
            for r, result in zip(requests, self._run(requests), strict=True)
            if (result.margin or 0) > CLEAR
        ]

    def pick(self, make: Callable[[int], Req], seed: int) -> Req:
        """Return the request for ``seed`` or, if rounding could change its output, for a later
        seed.
        """
        return next(r for r in (make(seed + 100_000 * i) for i in range(50)) if self.clear([r]))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.kill()


@pytest.fixture(scope="session")
def truth(zygote: Zygote, model: Path) -> Iterator[Truth]:
    """Return the reference outputs for requests without adapters."""
    oracle = Truth(lambda: zygote.engine(engine_kwargs(model, num_blocks=600)))
    yield oracle
    oracle.close()


@pytest.fixture
def start(zygote: Zygote, model: Path) -> Iterator[Callable[..., Engine]]:
    """Yield a function that starts engines (``start(num_blocks=..., kv_transfer_config=...)``), and
    kill any engines that are still running after the test.
    """
    engines: list[Engine] = []

    def launch(
        *,
        v2_shape: bool = False,
        env: dict[str, str] | None = None,
        prepare: str = "",
        **kwargs: Any,
    ) -> Engine:
        path = kwargs.pop("model", model)
        engine = zygote.engine(
            engine_kwargs(path, **kwargs), v2_shape=v2_shape, env=env, prepare=prepare
        )
        engines.append(engine)
        return engine

    yield launch
    for engine in engines:
        engine.kill()


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}
"""The settings for speculative decoding with ngram drafting."""


@pytest.fixture(scope="session")
def ngram(vllm_release: tuple[int, int]) -> dict[str, Any]:
    """Return the engine settings for speculative decoding."""
    if vllm_release < (0, 31):
        pytest.skip(
            "vLLM 0.30's CPU backend cannot verify a draft (TypeError in its Triton helper); 0.31 "
            "and newer can"
        )
    return {"speculative_config": NGRAM, "enable_prompt_embeds": False}
