"""Tests that unsupported configurations are rejected at startup, each with a one-sentence error.

Uses real KV specs, and `SimpleNamespace` objects as settings.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvloft.errors import UnsupportedError
from kvloft.vllm import support
from kvloft.vllm.support import check_supported, transfer_warnings

FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=64
)
MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)


def per_layer(*specs: Any) -> Any:
    """Return a group with separate specs for its layers, like vLLM's UniformTypeKVCacheSpecs."""
    return SimpleNamespace(kv_cache_specs={f"layer{i}": spec for i, spec in enumerate(specs)})


def settings(**changes: Any) -> Any:
    parallel: dict[str, Any] = {
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "rank": 0,
        "world_size": 1,
        "distributed_executor_backend": None,
        "nnodes": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    parallel.update({key: value for key, value in changes.items() if key in parallel})
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="tiny",
            get_total_num_hidden_layers=lambda: 4,
            is_encoder_decoder=changes.get("is_encoder_decoder", False),
            is_diffusion=changes.get("is_diffusion", False),
            is_prefix_caching_supported=changes.get("is_prefix_caching_supported", True),
            use_mla=changes.get("use_mla", False),
            enable_sleep_mode="sleep_mode_backend" in changes,
            sleep_mode_backend=changes.get("sleep_mode_backend", "cumem"),
        ),
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(
            calculate_kv_scales=changes.get("calculate_kv_scales", False),
            cache_dtype=changes.get("cache_dtype", "auto"),
        ),
        speculative_config=changes.get("speculative_config"),
        num_prefill_lookahead_tokens=changes.get("num_prefill_lookahead_tokens", 1),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=changes.get("enable_chunked_prefill", True),
            async_scheduling=changes.get("async_scheduling", False),
        ),
        use_v2_model_runner=changes.get("use_v2_model_runner", False),
        aux_output_config=SimpleNamespace(enabled=changes.get("returns_experts", False)),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVLoftConnector", kv_role=changes.get("kv_role", "kv_both")
        ),
    )


def groups(*specs: Any) -> KVCacheConfig:
    layers = [
        KVCacheGroupSpec(list(getattr(spec, "kv_cache_specs", [f"layer{i}"])), spec)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=layers)


def test_one_group_of_full_attention_is_served() -> None:
    check_supported(settings(speculative_config=SimpleNamespace(method="ngram")), groups(FULL))
    check_supported(settings(sleep_mode_backend="cumem"), groups(FULL))
    check_supported(settings(use_mla=True), groups(MLA))
    check_supported(
        settings(),
        groups(
            SinkFullAttentionSpec(
                block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sink_len=32
            )
        ),
    )
    check_supported(settings(), groups(per_layer(FULL, MLA)))


@pytest.mark.parametrize(
    ("changes", "specs", "named"),
    [
        ({"is_encoder_decoder": True}, (FULL,), "encoder-decoder"),
        ({"is_diffusion": True}, (FULL,), "diffusion"),
        (
            {"sleep_mode_backend": "cuda-checkpoint"},
            (FULL,),
            "sleep_mode_backend='cuda-checkpoint'",
        ),
        ({"is_prefix_caching_supported": False}, (FULL,), "pooling"),
        ({}, (per_layer(FULL, WINDOW),), "SlidingWindowSpec"),
        ({}, (per_layer(FULL, replace(FULL, non_causal=True)),), "prefix LM"),
        ({"use_mla": True, "enable_chunked_prefill": False}, (MLA,), "MLA"),
        ({}, (replace(FULL, non_causal=True),), "prefix LM"),
        (
            {"pipeline_parallel_size": 2, "speculative_config": SimpleNamespace(method="ngram")},
            (per_layer(FULL, FULL),),
            "pipeline_parallel_size=2 with speculative decoding",
        ),
        ({"decode_context_parallel_size": 2}, (FULL,), "decode_context_parallel_size=2"),
        ({"prefill_context_parallel_size": 2}, (FULL,), "prefill_context_parallel_size=2"),
        ({"world_size": 2, "distributed_executor_backend": "ray"}, (FULL,), "ray"),
        ({"nnodes": 2}, (FULL,), "nnodes"),
        ({"calculate_kv_scales": True}, (FULL,), "calculate_kv_scales"),
        *(
            ({"cache_dtype": f"{kind}_per_token_head"}, (FULL,), "overwrite the scales")
            for kind in ("int4", "int8", "fp8")
        ),
        ({"speculative_config": SimpleNamespace(method="medusa")}, (FULL,), "medusa"),
        (
            {
                "speculative_config": SimpleNamespace(method="mtp"),
                "num_prefill_lookahead_tokens": 2,
            },
            (FULL,),
            "more than one MTP layer",
        ),
        (
            {
                "speculative_config": SimpleNamespace(
                    method="eagle", num_speculative_tokens_per_batch_size=[(1, 8, 3)]
                )
            },
            (FULL,),
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_unsupported_configurations_are_rejected_by_name(
    changes: dict[str, Any], specs: tuple[Any, ...], named: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_supported(settings(**changes), groups(*specs))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kv_role", ["kv_both", "kv_consumer"])
def test_routed_experts_are_rejected_with_loads_if_vllm_stores_none_for_loaded_tokens(
    kv_role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "CAPS_HITS", False)
    with pytest.raises(UnsupportedError, match=r"0\.33 or newer for --enable-return-routed-expert"):
        check_supported(settings(returns_experts=True, kv_role=kv_role), groups(FULL))
    check_supported(settings(returns_experts=True, kv_role="kv_producer"), groups(FULL))
    check_supported(settings(kv_role=kv_role), groups(FULL))
    monkeypatch.setattr(support, "CAPS_HITS", True)
    check_supported(settings(returns_experts=True, kv_role=kv_role), groups(FULL))


def test_releases_that_shorten_loads_for_routed_experts(vllm_release: tuple[int, int]) -> None:
    assert (vllm_release >= (0, 33)) == support.CAPS_HITS


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model", "dflash"])
def test_drafters_with_kv_are_served_by_releases_that_let_save_behind_them(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(speculative_config=SimpleNamespace(method=method))
    monkeypatch.setattr(
        support, "KVConnectorModelRunnerMixin", SimpleNamespace(finalize_kv_connector=None)
    )
    check_supported(config, groups(FULL))
    monkeypatch.setattr(support, "KVConnectorModelRunnerMixin", SimpleNamespace())
    with pytest.raises(UnsupportedError, match=method):
        check_supported(config, groups(FULL))


# -- layers of a model for a connector with one block table ----------------------------------------


SIZES: Any = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
CHUNKED = ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64)
MAMBA = MambaSpec(block_size=32, shapes=((2, 512), (3, 32)), dtypes=(torch.float32, torch.float32))
WIDE = FullAttentionSpec(**SIZES | {"head_size": 64})


def merged(*layers: Any) -> KVCacheConfig:
    """Return the groups that vLLM creates for these layers without its hybrid KV cache manager."""
    engine: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True)
    )
    groups = get_kv_cache_groups(engine, {f"layer{i}": spec for i, spec in enumerate(layers)})
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    "layers", [(WINDOW, WINDOW, FULL), (FULL, WINDOW), (CHUNKED, FULL, CHUNKED), (WINDOW, WIDE)]
)
def test_windows_and_local_chunks_are_treated_as_full_attention(
    layers: tuple[Any, ...],
) -> None:
    config = merged(*layers)
    check_supported(settings(), config)
    (group,) = config.kv_cache_groups
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
    managers = {KVCacheSpecRegistry.get_manager_class(spec) for spec in specs}
    assert managers == {FullAttentionManager}, (
        "expected the manager that frees no block before its request finishes"
    )
    assert (
        FullAttentionManager.get_num_skipped_tokens
        is SingleTypeKVCacheManager.get_num_skipped_tokens
    )
    assert (
        FullAttentionManager.remove_skipped_blocks is SingleTypeKVCacheManager.remove_skipped_blocks
    )


def test_local_chunks_in_every_layer_are_refused() -> None:
    """A hit that ends at the boundary of a local chunk would not need any blocks."""
    with pytest.raises(UnsupportedError, match="ChunkedLocalAttentionSpec"):
        check_supported(settings(), merged(CHUNKED))


@pytest.mark.parametrize("layers", [(WINDOW, WINDOW), (WINDOW, replace(WINDOW, head_size=64))])
def test_windows_in_every_layer_are_supported_if_failed_loads_can_be_reported(
    layers: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does not convert this model to full attention.

    vLLM frees blocks outside the window, so it cannot resume at the first bad block.
    """
    config = merged(*layers)
    assert len(config.kv_cache_groups) == 1
    monkeypatch.setattr(support, "HAS_GROUPS", True)
    for kv_groups in ("auto", "all"):
        check_supported(settings(), config, kv_groups)
    with pytest.raises(UnsupportedError, match="kv_groups"):
        check_supported(settings(), config, "one")
    monkeypatch.setattr(support, "HAS_GROUPS", False)
    with pytest.raises(UnsupportedError, match=r"0\.32 or newer"):
        check_supported(settings(), config)


@pytest.mark.parametrize(
    "specs",
    [
        (WINDOW, replace(WINDOW, sliding_window=96)),
        (CHUNKED, WINDOW),
        (replace(WINDOW, sliding_window=2),),
    ],
)
def test_several_groups_need_none_of_full_attention(
    specs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "HAS_GROUPS", True)
    check_supported(settings(), groups(*specs))


@pytest.mark.parametrize("specs", [(FULL, WINDOW), (WINDOW, FULL), (FULL, FULL, WINDOW)])
def test_several_groups_are_supported_unless_kv_groups_is_one(
    specs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "HAS_GROUPS", True)
    for kv_groups in ("auto", "all"):
        check_supported(settings(), groups(*specs), kv_groups)
    with pytest.raises(UnsupportedError, match="one KV cache group"):
        check_supported(settings(), groups(*specs), "one")
    monkeypatch.setattr(support, "HAS_GROUPS", False)
    with pytest.raises(UnsupportedError, match=r"0\.32 or newer"):
        check_supported(settings(), groups(*specs))


@pytest.mark.parametrize(
    ("other", "helps"),
    [(replace(CHUNKED, block_size=64), True), (replace(MAMBA, block_size=64), False)],
)
def test_kv_groups_one_is_suggested_if_it_would_work(
    other: Any, helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "HAS_GROUPS", True)
    with pytest.raises(UnsupportedError, match="the same block size") as caught:
        check_supported(settings(), groups(FULL, other))
    assert ('set kv_groups to "one"' in str(caught.value)) is helps


@pytest.mark.parametrize("alignment", [None, 64, 96])
def test_windows_and_full_attention_may_have_blocks_of_different_sizes(
    alignment: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every hit ends at a position that is a block boundary in all groups."""
    monkeypatch.setattr(support, "HAS_GROUPS", True)
    several = groups(replace(FULL, block_size=alignment or 64), WINDOW)
    several.cache_hit_alignment_tokens = alignment
    check_supported(settings(speculative_config=SimpleNamespace(method="ngram")), several)
    several.cache_hit_alignment_tokens = 32
    with pytest.raises(UnsupportedError, match="hits end at multiples of 32"):
        check_supported(settings(), several)


def test_a_draft_model_with_kv_is_rejected_with_blocks_of_different_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support, "HAS_GROUPS", True)
    with pytest.raises(
        UnsupportedError,
        match=r"different block sizes .32 and 64 tokens. yet",
    ):
        check_supported(
            settings(speculative_config=SimpleNamespace(method="mtp")),
            groups(replace(FULL, block_size=64), WINDOW),
        )


@pytest.mark.parametrize(
    ("changes", "specs", "named"),
    [
        ({}, (CHUNKED, CHUNKED), "requires a layer with full attention"),
        ({}, (replace(WINDOW, sliding_window=1),), "requires a layer with full attention"),
        ({}, (FULL, replace(CHUNKED, block_size=64)), "the same block size"),
        ({}, (FULL, per_layer(FULL, WINDOW)), "SimpleNamespace"),
    ],
)
def test_several_groups_without_a_rule_are_refused(
    changes: dict[str, Any], specs: tuple[Any, ...], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=named):
        check_supported(settings(**changes), groups(*specs), "all")


ALIGNED = replace(MAMBA, block_size=FULL.block_size, mamba_cache_mode="align")
GDN = replace(ALIGNED, mamba_type="GDN_ATTN")


def test_states_within_blocks_are_refused() -> None:
    """vLLM does not offer states at the ends of blocks for this model, so hits would be rare."""
    for unit in (8, 16):
        with pytest.raises(
            UnsupportedError, match=f"at multiples of {unit}, where.*--prefix-match-unit"
        ):
            check_supported(settings(), with_hits_at(unit, FULL, ALIGNED), "all")
    check_supported(settings(), with_hits_at(32, FULL, ALIGNED), "all")
    check_supported(settings(), with_hits_at(16, FULL, WINDOW), "all")


def with_hits_at(unit: int, *specs: Any) -> Any:
    found = groups(*specs)
    found.cache_hit_alignment_tokens = unit
    return found


@pytest.mark.parametrize(
    "method", ["ngram", "suffix", "mtp", "eagle", "eagle3", "dflash", "draft_model"]
)
def test_draft_tokens_are_supported_with_gated_delta_nets(method: str) -> None:
    config = settings(speculative_config=SimpleNamespace(method=method))
    check_supported(config, groups(FULL, GDN), "all")
    with pytest.raises(
        UnsupportedError, match=r"other than gated delta nets: .*remove --speculative-config"
    ):
        check_supported(config, groups(FULL, ALIGNED), "all")


@pytest.mark.parametrize("method", [None, "draft_model", "eagle3"])
def test_states_with_other_block_sizes_are_rejected_and_name_the_draft_model(
    method: str | None,
) -> None:
    """The draft model's KV heads differ from those of the target model."""
    config = settings(speculative_config=method and SimpleNamespace(method=method))
    with pytest.raises(UnsupportedError, match="the same block size") as caught:
        check_supported(config, groups(replace(FULL, block_size=96), GDN, FULL), "all")
    assert ("remove --speculative-config, or use a draft model" in str(caught.value)) == (
        method is not None
    )


@pytest.mark.parametrize("method", ["ngram_gpu", "mtp", "eagle3", "draft_model"])
def test_draft_tokens_with_states_are_rejected_if_vllm_mixes_up_states(
    method: str,
) -> None:
    config = settings(speculative_config=SimpleNamespace(method=method), async_scheduling=True)
    with pytest.raises(UnsupportedError, match="--no-async-scheduling"):
        check_supported(config, groups(FULL, GDN), "all")
    config.use_v2_model_runner = True
    check_supported(config, groups(FULL, GDN), "all")


@pytest.mark.parametrize("is_cpu", [True, False])
def test_states_are_supported_if_vllm_keeps_them_at_block_ends(
    is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    check_supported(settings(), groups(FULL, ALIGNED), "all")
    with pytest.raises(UnsupportedError, match="mamba-cache-mode align"):
        check_supported(settings(), groups(FULL, replace(ALIGNED, mamba_cache_mode="none")), "all")


@pytest.mark.parametrize("is_cpu", [True, False])
def test_pipeline_stages_are_served_but_of_models_with_states_on_gpus(
    is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    monkeypatch.setattr(support, "HAS_GROUPS", True)
    stages = settings(pipeline_parallel_size=2)
    check_supported(stages, groups(FULL))
    check_supported(stages, groups(per_layer(FULL, replace(FULL, head_size=64))))
    check_supported(stages, groups(FULL, WINDOW, CHUNKED), "all")
    check_supported(settings(), groups(FULL, GDN), "all")
    refused = pytest.raises(
        UnsupportedError,
        match=r"pipeline_parallel_size=2 for models with Mamba .* states only on CPUs; set it to 1",
    )
    with nullcontext() if is_cpu else refused:
        check_supported(stages, groups(FULL, GDN), "all")
    elsewhere = groups(FULL, GDN)
    elsewhere.kv_cache_groups[1].layer_names.clear()
    with nullcontext() if is_cpu else refused:  # a different stage has these layers
        check_supported(stages, elsewhere, "all")
    monkeypatch.setattr(support, "HAS_GROUPS", False)
    with pytest.raises(UnsupportedError, match=r"0\.32 or newer for pipeline_parallel_size=2"):
        check_supported(stages, groups(FULL))


def test_state_space_layers_are_refused_by_vllm_or_by_us() -> None:
    with pytest.raises(ValueError, match="promote"):
        merged(MAMBA, FULL)
    with pytest.raises(UnsupportedError, match=r"one KV cache group.*has 2 .*state-space"):
        check_supported(settings(), groups(FULL, MAMBA), "one")
    with pytest.raises(UnsupportedError, match="MambaSpec"):
        check_supported(settings(), merged(MAMBA))


@pytest.mark.parametrize(
    ("role", "said"),
    [("kv_both", []), ("kv_producer", ["never loads"]), ("kv_consumer", ["never saves"])],
)
def test_half_a_cache_is_reported(role: Any, said: list[str]) -> None:
    found = transfer_warnings(KVTransferConfig(kv_connector="KVLoftConnector", kv_role=role))
    assert len(found) == len(said) and all(
        words in text for words, text in zip(said, found, strict=True)
    )
    assert transfer_warnings(None) == []
