"""Tests pipeline parallelism, in which each rank has different layers and its own shard of every
frame. Stages can differ in size.

vLLM's CPU build supports pipeline stages only with a warm-up, which enforce_eager skips ("assert
self.intermediate_tensors is not None"). The models are therefore compiled with the backend `eager`,
which does nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from . import tiny
from .client import Engine, Req, Zygote, engine_kwargs, kvloft, random_ids
from .conftest import Truth
from .zoo.models import ZOO
from .zoo.states import qwen3_next_config, qwen3_next_weights
from .zoo.windows import gemma3_config, gemma3_weights

STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
    "enable_prompt_embeds": False,
}
MORE_FIRST, MORE_LAST = "2,1", "1,2"
"""Number of layers in each stage. vLLM's scheduler receives only the layers of the first stage."""
MIXED = ("state", "full", "state", "full")
"""Layers of a model with Mamba states and attention in each stage."""


@pytest.fixture(scope="module", autouse=True)
def _release(vllm_release: tuple[int, int]) -> None:
    if vllm_release < (0, 32):
        pytest.skip("kvloft supports pipeline stages with vLLM 0.32 and newer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("heads"), num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def truth(zygote: Zygote, model: Path) -> Iterator[Truth]:
    """Return the reference outputs of a single-stage engine."""
    oracle = Truth(
        lambda: zygote.engine(engine_kwargs(model, num_blocks=300, enable_prompt_embeds=False))
    )
    yield oracle
    oracle.close()


def environment(layers: str, ranks: int = 2) -> dict[str, str]:
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks), "VLLM_PP_LAYER_PARTITION": layers}


def ask(engine: Engine, truth: Truth, requests: list[Req]) -> list[int]:
    """Run all requests together, check their tokens, and return the number of external tokens of
    each request.
    """
    results = engine.ask(*(r.again() for r in requests))
    assert [r.tokens for r in results] == [truth.tokens(r) for r in requests]
    return [r.num_external for r in results]


@pytest.mark.parametrize("layers", [MORE_FIRST, MORE_LAST])
def test_two_stages_save_and_load_their_layers_from_host_and_from_disk(
    layers: str, start: Callable[..., Engine], model: Path, truth: Truth, tmp_path: Path
) -> None:
    requests = [
        truth.pick(lambda s: Req(random_ids(s, 300), max_tokens=20), 7100 + i) for i in range(3)
    ]
    for life in range(2):
        engine = start(
            kv_transfer_config=kvloft(tmp_path), model=model, env=environment(layers), **STAGES
        )
        for turn in range(2):
            assert ask(engine, truth, requests) == [288 if life or turn else 0] * 3
        engine.assert_at_rest()
        engine.stop()
    others = start(
        kv_transfer_config=kvloft(tmp_path),
        model=model,
        env=environment(MORE_LAST if layers == MORE_FIRST else MORE_FIRST),
        **STAGES,
    )
    assert ask(others, truth, requests) == [0] * 3, (
        "stages with different layers must not share frames"
    )


@pytest.mark.parametrize("kv_groups", ["one", "auto"])
def test_a_failed_load_of_one_stage_is_computed_by_all_stages(
    kv_groups: str, start: Callable[..., Engine], model: Path, truth: Truth
) -> None:
    """kvloft reports the invalid blocks to vLLM or, with multiple groups, the id of the request."""
    requests = [
        truth.pick(lambda s: Req(random_ids(s, 130), max_tokens=12), 7200 + i) for i in range(2)
    ]
    settings = kvloft(policy="recompute", kv_groups=kv_groups)
    engine = start(kv_transfer_config=settings, model=model, env=environment(MORE_LAST), **STAGES)
    for part in range(2):
        ask(engine, truth, requests)
        engine.flip_frames(offset=part * engine.call("_scheduler._store.frame_sizes")[0] // 2 + 5)
        assert min(ask(engine, truth, requests)) > 0, "the chunks must be offered"
        assert engine.metrics()["vllm:kvloft_verify_failures_total"] > 0
    engine.assert_at_rest()


def test_few_blocks_and_many_requests_say_the_truth(
    start: Callable[..., Engine], model: Path, truth: Truth
) -> None:
    """Covers preemptions while the number of steps in flight equals the number of stages."""
    requests = [
        truth.pick(lambda s: Req(random_ids(s, 60 + 17 * (s % 7)), max_tokens=40), 7300 + i)
        for i in range(8)
    ]
    engine = start(
        kv_transfer_config=kvloft(policy="recompute"),
        model=model,
        env=environment(MORE_LAST),
        num_blocks=16,
        enable_prefix_caching=True,
        **STAGES,
    )
    for _ in range(3):
        ask(engine, truth, requests)
        engine.reset()
    assert engine.metrics()["vllm:num_preemptions_total"] > 0
    assert (
        engine.metrics()["vllm:kvloft_hook_errors_total"]
        + engine.metrics()["vllm:kvloft_verify_failures_total"]
        == 0
    )
    engine.assert_at_rest()


def test_two_stages_of_two_ranks_each_have_four_parts(
    start: Callable[..., Engine], model: Path, truth: Truth, tmp_path: Path
) -> None:
    requests = [
        truth.pick(lambda s: Req(random_ids(s, 100), max_tokens=8), 7400 + i) for i in range(2)
    ]
    for life in range(2):
        engine = start(
            kv_transfer_config=kvloft(tmp_path),
            model=model,
            env=environment(MORE_LAST, 4),
            tensor_parallel_size=2,
            **STAGES,
        )
        assert ask(engine, truth, requests) == [96 * life] * 2
        assert engine.call("_scheduler._store.frame_sizes")[0] % 4 == 0
        engine.stop()


# -- multiple KV cache groups --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "ranks"),
    [
        ("gemma3", "4,4", 2),
        ("gemma3", "3,5", 2),
        ("gemma3", "7,1", 2),
        ("gemma3", "5,3", 4),
        ("mistral", "1,3", 2),
        ("qwen3-next", "2,2", 2),
    ],
)
def test_stages_save_and_load_their_part_of_each_group(
    name: str, layers: str, ranks: int, start: Callable[..., Engine], zygote: Zygote, tmp_path: Path
) -> None:
    """With gemma3 split as 3,5, the first stage has no full-attention layer. With 7,1, the last
    stage has only a full-attention layer.
    """
    zoo = ZOO[name]
    if name == "qwen3-next":  # vLLM requires experts in each stage and a state in the last stage
        zoo = replace(
            zoo,
            config=lambda: qwen3_next_config(MIXED) | {"mlp_only_layers": []},
            weights=lambda: qwen3_next_weights(layers=MIXED, all_have_experts=True),
        )
    elif ranks > 2:  # two ranks share a stage, and each needs query heads
        heads = 2 * zoo.config()["num_attention_heads"]
        config = lambda: gemma3_config() | {"num_attention_heads": heads}  # noqa: E731
        zoo = replace(zoo, config=config, weights=lambda: gemma3_weights(num_heads=heads))
    folder = zoo.write(tmp_path / "model")
    truth = Truth(lambda: zygote.engine(engine_kwargs(folder, **zoo.plain()), prepare=zoo.prepare))
    requests = [
        truth.pick(lambda s: Req(random_ids(s, 230), max_tokens=12), 7500 + i) for i in range(3)
    ]
    arguments = zoo.engine(folder) | STAGES | {"tensor_parallel_size": ranks // 2}
    for life in range(2):
        engine = start(
            kv_transfer_config=kvloft(tmp_path / "disk", kv_groups="all"),
            model=folder,
            env=environment(layers, ranks),
            prepare=zoo.prepare,
            **arguments,
        )
        for turn in range(2):
            assert ask(engine, truth, requests) == [zoo.own_hit(230) if life or turn else 0] * 3
            assert engine.reset()
        metrics = engine.metrics()
        assert (
            metrics["vllm:kvloft_hook_errors_total"] + metrics["vllm:kvloft_verify_failures_total"]
            == 0
        )
        engine.assert_at_rest()
        engine.stop()
    truth.close()


def test_a_group_that_one_stage_cannot_load_is_computed_by_all(
    start: Callable[..., Engine], zygote: Zygote, tmp_path: Path
) -> None:
    zoo = ZOO["gemma3"]
    folder = zoo.write(tmp_path / "model")
    truth = Truth(lambda: zygote.engine(engine_kwargs(folder, **zoo.plain())))
    requests = [
        truth.pick(lambda s: Req(random_ids(s, 130), max_tokens=12), 7600 + i) for i in range(2)
    ]
    settings = kvloft(policy="recompute", kv_groups="all")
    engine = start(
        kv_transfer_config=settings,
        model=folder,
        env=environment("3,5"),
        **zoo.engine(folder) | STAGES,
    )
    for part in range(2):
        ask(engine, truth, requests)
        assert engine.reset()
        engine.flip_frames(offset=part * engine.call("_scheduler._store.frame_sizes")[0] // 2 + 5)
        assert min(ask(engine, truth, requests)) > 0, "the chunks must be offered"
        assert engine.metrics()["vllm:kvloft_verify_failures_total"] > 0
        assert engine.reset()
    engine.assert_at_rest()
    truth.close()
