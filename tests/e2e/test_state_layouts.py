"""Tests engines that store their Mamba states with different dtypes or layouts but share a server
and a disk. These engines must get the same hits as engines that run alone.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .cache_server import CacheServer
from .client import Engine, Req, Zygote, engine_kwargs, kvloft, random_ids
from .test_server import server, shared  # noqa: F401
from .zoo.models import ZOO

LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
PROMPTS = [Req(random_ids(3300 + i, 150 + 67 * i), max_tokens=4) for i in range(4)]
MODEL = ZOO["granite4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp(MODEL.name))


@pytest.fixture
def start(folder: Path, zygote: Zygote) -> Iterator[Callable[..., Engine]]:
    """Yield a function that starts engines: ``start(transfer, env, **arguments)``."""
    engines: list[Engine] = []

    def launch(transfer: dict[str, Any], env: dict[str, str], **more: Any) -> Engine:
        kwargs = MODEL.engine(folder) | {"kv_transfer_config": transfer} | more
        arguments = engine_kwargs(folder, **kwargs)
        engines.append(zygote.engine(arguments, prepare=MODEL.prepare, env=env))
        return engines[-1]

    yield launch
    for engine in engines:
        engine.kill()


def found(*engines: Engine) -> list[list[int]]:
    """Run every prompt on each engine in turn. For each engine, return a list with the number of
    external tokens of each prompt. vLLM's own cache is cleared before each prompt.
    """
    rounds = []
    for prompt in PROMPTS:
        assert all(engine.reset() for engine in engines)
        rounds.append([engine.ask(prompt.again())[0].num_external for engine in engines])
    return [list(column) for column in zip(*rounds, strict=True)]


def assert_no_damage(engine: Engine) -> None:
    metrics = engine.metrics()
    for name in ("verify_failures", "layout_mismatches", "load_breaker_trips", "hook_errors"):
        assert metrics[f"vllm:kvloft_{name}_total"] == 0, name


KINDS = {
    "dtype": [({"mamba_cache_dtype": "float16"}, {}), ({"mamba_cache_dtype": "bfloat16"}, {})],
    "layout": [({}, {LAYOUT: "SD"}), ({}, {LAYOUT: "DS"})],
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_engines_with_other_states_find_their_own_on_one_server_and_disk(
    kind: str,
    start: Callable[..., Engine],
    server: CacheServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    alone = []
    for arguments, env in KINDS[kind]:
        engine = start(kvloft(kv_groups="all"), env, **arguments)
        assert found(engine) == [[0] * len(PROMPTS)]
        alone += found(engine)
        engine.stop()
    assert min(alone[0]) > 0
    engines = [
        start(shared(server, kv_groups="all"), env, **arguments) for arguments, env in KINDS[kind]
    ]
    assert found(*engines) == [[0] * len(PROMPTS)] * 2, "engines must not share states"
    for _ in range(2):
        assert found(*engines) == alone
    for engine in engines:
        assert_no_damage(engine)
        engine.stop()
    for expected in ([[0] * len(PROMPTS)] * 2, alone):  # the second iteration runs after a restart
        for (arguments, env), hits in zip(KINDS[kind], expected, strict=True):
            engine = start(kvloft(tmp_path, kv_groups="all"), env, **arguments)
            assert found(engine) == [hits]
            assert_no_damage(engine)
            engine.stop()
