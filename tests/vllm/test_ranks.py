"""Tests that the scheduler side uses the configs that vLLM's executor passes to the ranks of this
engine, and not the configs of another engine in the process.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvloft.errors import UnsupportedError
from kvloft.vllm import ranks
from kvloft.vllm.ranks import Ranks, configs_of_ranks, watch

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)


class Given(Executor):
    """An executor that receives configs but starts no workers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method)

    def check_health(self) -> None:
        """Do nothing, because there are no workers."""

    def _init_executor(self) -> None:
        """Start nothing."""


@pytest.fixture(autouse=True)
def _nothing_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_RANKS", Ranks())


def config(*layers: str, num_blocks: int = 4) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(layers), SPEC)],
    )


def engine(num_stages: int, num_ranks: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=num_stages, world_size=num_stages * num_ranks
        )
    )


def test_values_that_vllm_passes_to_this_engines_ranks_are_recorded() -> None:
    watch()
    watch()
    given, executor = [config("a"), config("a"), config("b", "c"), config("b", "c")], Given()
    executor.initialize_from_config(given)
    assert executor.calls == ["initialize_from_config"]
    assert configs_of_ranks(engine(2, 2), config("a")) == given


@pytest.mark.parametrize("other", [config("a", "b"), config("a", num_blocks=5)])
def test_values_of_another_engines_ranks_are_ignored(other: KVCacheConfig) -> None:
    watch()
    Given().initialize_from_config([other, other])
    own = config("a")
    assert list(configs_of_ranks(engine(1, 2), own)) == [own]
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size=2"):
        configs_of_ranks(engine(2, 1), own)


def test_without_stages_the_scheduler_s_own_will_do() -> None:
    own = config("a")
    assert list(configs_of_ranks(engine(1, 4), own)) == [own]
    with pytest.raises(UnsupportedError, match=r"Executor\.initialize_from_config"):
        configs_of_ranks(engine(4, 1), own)
