"""What is refused at start: each with one sentence, nothing half-served. Real KV specs, settings as plain namespaces."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvloft.errors import UnsupportedError
from kvloft.vllm.support import check_supported

FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=64)


def settings(**changes: Any) -> Any:
    parallel: dict[str, Any] = {
        "pipeline_parallel_size": 1, "world_size": 1, "distributed_executor_backend": None, "nnodes": 1,
        "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
    }  # fmt: skip
    parallel.update({key: value for key, value in changes.items() if key in parallel})
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="tiny",
            is_encoder_decoder=changes.get("is_encoder_decoder", False),
            is_diffusion=changes.get("is_diffusion", False),
            is_prefix_caching_supported=changes.get("is_prefix_caching_supported", True),
            enable_sleep_mode="sleep_mode_backend" in changes,
            sleep_mode_backend=changes.get("sleep_mode_backend", "cumem"),
        ),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(calculate_kv_scales=changes.get("calculate_kv_scales", False)),
        speculative_config=changes.get("speculative_config"),
    )


def groups(*specs: Any) -> KVCacheConfig:
    layers = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=layers)


def test_one_group_of_full_attention_is_served() -> None:
    check_supported(settings(speculative_config=SimpleNamespace(method="ngram")), groups(FULL))
    check_supported(settings(sleep_mode_backend="cumem"), groups(FULL))


@pytest.mark.parametrize(
    ("changes", "specs", "named"),
    [
        ({"is_encoder_decoder": True}, (FULL,), "encoder-decoder"),
        ({"is_diffusion": True}, (FULL,), "diffusion"),
        ({"sleep_mode_backend": "cuda-checkpoint"}, (FULL,), "sleep_mode_backend='cuda-checkpoint'"),
        ({"is_prefix_caching_supported": False}, (FULL,), "pooling"),
        ({}, (FULL, WINDOW), "2"),
        ({}, (WINDOW,), "SlidingWindowSpec"),
        ({"pipeline_parallel_size": 2}, (FULL,), "pipeline_parallel_size=2"),
        ({"decode_context_parallel_size": 2}, (FULL,), "decode_context_parallel_size=2"),
        ({"prefill_context_parallel_size": 2}, (FULL,), "prefill_context_parallel_size=2"),
        ({"world_size": 2, "distributed_executor_backend": "ray"}, (FULL,), "ray"),
        ({"nnodes": 2}, (FULL,), "nnodes"),
        ({"calculate_kv_scales": True}, (FULL,), "calculate_kv_scales"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, (FULL,), "eagle3"),
    ],
)
def test_what_would_be_served_wrongly_is_refused_by_name(changes: dict[str, Any], specs: tuple[Any, ...], named: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_supported(settings(**changes), groups(*specs))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
