"""Tests that a change to any field that determines KV bytes changes the namespace's digest, as
computed by the real extension.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvloft import _core
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.vllm.identity import namespace
from kvloft.vllm.identity.adapters import media_prefix
from kvloft.vllm.identity.namespace import (
    ENVIRONMENT,
    MAX_DESCRIPTION_CHARS,
    description_of,
    namespace_fields,
)

BASE: dict[str, Any] = {
    "model": "hub/name",
    "revision": None,
    "commit": "abc",
    "config": {"hidden_size": 64},
    "load_format": "auto",
    "seed": 0,
    "dtype": torch.float32,
    "quantization": None,
    "cache_dtype": "auto",
    "max_model_len": 64,
    "asked_max_model_len": None,
    "tensor_parallel_size": 1,
    "kv_heads": 1,
    "block": 32,
    "user": "",
    "backend": None,
    "layout": "LBHNC",
    "model_weights": "",
    "load_extra": {},
    "quantization_config": None,
    "model_impl": "auto",
    "model_class_overrides": {},
    "media": None,
    "additional": {},
    "override_generation_config": {},
    "disable_sliding_window": False,
}


class HfConfig:
    def __init__(self, fields: dict[str, Any], commit: str) -> None:
        self._fields = fields
        self._commit_hash = commit

    def to_dict(self) -> dict[str, Any]:
        return self._fields


def digest(**changes: Any) -> bytes:
    v = BASE | changes
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=v["model"],
            revision=v["revision"],
            hf_config=HfConfig(v["config"], v["commit"]),
            seed=v["seed"],
            dtype=v["dtype"],
            quantization=v["quantization"],
            max_model_len=v["max_model_len"],
            original_max_model_len=v["asked_max_model_len"],
            model_weights=v["model_weights"],
            quantization_config=v["quantization_config"],
            model_impl=v["model_impl"],
            model_class_overrides=v["model_class_overrides"],
            multimodal_config=v["media"],
            get_total_num_hidden_layers=lambda: 4,
            override_generation_config=v["override_generation_config"],
            disable_sliding_window=v["disable_sliding_window"],
        ),
        cache_config=SimpleNamespace(cache_dtype=v["cache_dtype"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=v["tensor_parallel_size"],
            worker_extension_cls=v.get("worker_extension", ""),
            pipeline_parallel_size=v.get("stages", 1),
        ),
        lora_config=SimpleNamespace(**v["lora"]) if v.get("lora") else None,
        kernel_config=SimpleNamespace(**v.get("kernels", {})),
        load_config=SimpleNamespace(
            load_format=v["load_format"], model_loader_extra_config=v["load_extra"]
        ),
        attention_config=SimpleNamespace(backend=v["backend"], **v.get("attention", {})),
        mamba_config=SimpleNamespace(**v.get("mamba", {})),
        weight_transfer_config=v.get("weight_transfer"),
        additional_config=v["additional"],
        speculative_config=v.get("speculative"),
    )
    spec = FullAttentionSpec(
        block_size=v["block"], num_kv_heads=v["kv_heads"], head_size=32, dtype=torch.float32
    )
    kv = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    assert hasattr(kv, "kv_cache_layout")
    kv.kv_cache_layout = v["layout"]
    shape = CacheShape(v.get("groups") or (GroupShape(v["block"]),), encoding=v.get("encoding", 0))
    return _core.namespace_digest(namespace_fields(config, v.get("ranks", [kv]), shape, v["user"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "hub/other"},
        {"revision": "v2"},
        {"commit": "def"},
        {"config": {"hidden_size": 65}},
        {"load_format": "dummy"},
        {"dtype": torch.bfloat16},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"tensor_parallel_size": 2},
        {"kv_heads": 2},
        {"block": 64},
        {"encoding": 1},
        {"user": "blue"},
        {"backend": "FLASHINFER"},
        {"layout": "LBNHC"},
        {"model_weights": "s3://other"},
        {"load_extra": {"tensorizer_uri": "other.tensors"}},
        {"quantization_config": {"ignore": ["lm_head"]}},
        {"model_impl": "transformers"},
        {"model_class_overrides": {"A": "b:B"}},
        {"max_model_len": 128},
        {"additional": {"a": 1}},
        {"override_generation_config": {"attn_temperature_tuning": True}},
        {"disable_sliding_window": True},
        {"media": SimpleNamespace(mm_processor_kwargs={"do_resize": False})},
        {"media": SimpleNamespace(video_pruning_rate=0.5)},
    ],
    ids=str,
)
def test_each_field_alone_flips_the_namespace(change: dict[str, Any]) -> None:
    assert digest() == digest()
    assert digest(**change) != digest()


def test_a_length_that_vllm_fits_to_memory_does_not_count() -> None:
    """vLLM builds the model before it fits the length, so a model with this length differs."""
    fitted = digest(asked_max_model_len=-1)
    assert fitted == digest(asked_max_model_len=-1, max_model_len=96) != digest()


def drafter(
    method: str = "eagle",
    model: str = "hub/draft",
    commit: str = "abc",
    num_tokens: int = 3,
    size: int = 1,
    load_format: str | None = None,
) -> Any:
    config = SimpleNamespace(
        model=model, revision=None, hf_config=HfConfig({"size": size}, commit), dtype=torch.float32
    )
    load = SimpleNamespace(load_format=load_format, model_loader_extra_config={})
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=num_tokens,
        draft_model_config=config,
        draft_load_config=load if load_format else None,
    )


def test_a_draft_model_with_kv_counts() -> None:
    others = [
        drafter("eagle3"),
        drafter(model="hub/other"),
        drafter(commit="def"),
        drafter(num_tokens=2),
        drafter(size=2),
        drafter(load_format="dummy"),
    ]
    digests = {digest(), *(digest(speculative=each) for each in [drafter(), *others])}
    assert len(digests) == 2 + len(others)
    assert digest(speculative=drafter("ngram")) == digest()


def test_dummy_weights_are_identified_by_their_seed() -> None:
    assert digest(seed=1) == digest()
    assert digest(load_format="dummy", seed=1) != digest(load_format="dummy")


def test_pages_packed_for_another_cpu_are_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    tiles = digest()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert digest() != tiles


def test_weights_that_a_trainer_replaces_in_memory_serve_their_own_engine_only() -> None:
    assert digest(weight_transfer=SimpleNamespace(backend="nccl")) != digest(
        weight_transfer=SimpleNamespace(backend="nccl")
    )


def test_an_engine_with_user_code_in_workers_is_not_shared() -> None:
    """Trainers use worker extensions to write into the model."""
    assert digest(worker_extension="trainer.Extension") != digest(
        worker_extension="trainer.Extension"
    )


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_environment_variables_that_change_results_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    without = digest()
    monkeypatch.setenv(name, "1")
    first = digest()
    monkeypatch.setenv(name, "2")
    assert len({without, first, digest()}) == 3


def test_the_layers_of_each_stage_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespaces differ even if the first stage is the same. The scheduler's configuration
    contains only the first stage.
    """
    found = [digest(), digest(stages=2), digest(stages=3)]
    for layers in ("1,2,1", "1,1,2"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", layers)
        found.append(digest(stages=3))
    assert found[2] == found[3], "this must equal vLLM's default partition"
    assert len(set(found)) == 4


def test_pages_of_every_rank_count() -> None:
    """vLLM passes only the layers of the first rank to the scheduler."""
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)

    def rank(name: str, head_size: int) -> KVCacheConfig:
        group = KVCacheGroupSpec([name], replace(spec, head_size=head_size))
        return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[group])

    first = rank("layer", 32)
    assert (
        len(
            {digest(ranks=[first, rank("other", size)]) for size in (32, 64)}
            | {digest(ranks=[first])}
        )
        == 3
    )
    assert digest(ranks=[first, first]) == digest(ranks=[first]), (
        "equal ranks of one stage must not change the digest"
    )


def test_sizes_of_blocks_count_group_by_group() -> None:
    """The digests differ, even if all chunks have the same number of tokens."""
    full = GroupShape(32)
    windows = [GroupShape(32 // size, size, kind="window", reach=64) for size in (1, 2, 4)]
    assert len({digest(groups=(full, window)) for window in windows}) == 3


def test_settings_of_adapters_count() -> None:
    """The namespace also depends on whether adapters are enabled, because vLLM 0.32 on CPUs applies
    a batch's adapter to requests without an adapter.
    """
    lora = {"target_modules": None, "lora_dtype": "auto"}
    found = [
        digest(lora=value)
        for value in (
            None,
            lora,
            lora | {"target_modules": ["o_proj"]},
            lora | {"lora_dtype": "float16"},
        )
    ]
    assert len(set(found)) == 4
    assert digest(lora=lora) == digest(lora=lora | {"max_loras": 4}) == found[1]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("kernels", "moe_backend"),
        ("kernels", "linear_backend_per_quant"),
        ("attention", "backend_per_kind"),
        ("attention", "use_prefill_query_quantization"),
        ("attention", "disable_flashinfer_q_quantization"),
        ("mamba", "enable_stochastic_rounding"),
        ("mamba", "ssu_algorithm"),
    ],
)
def test_settings_that_change_rounding_count(config: str, name: str) -> None:
    assert digest(**{config: {name: "one"}}) != digest(**{config: {name: "other"}})


def test_the_content_of_the_scales_file_counts(tmp_path: Path) -> None:
    def digest_now() -> str:
        return digest(media=SimpleNamespace(mm_encoder_fp8_scale_path=str(scales)))

    scales = tmp_path / "scales.json"
    assert digest_now() == digest_now() != digest(media=SimpleNamespace())
    found = {digest_now()}
    for content in ("1.0", "2.0"):
        scales.write_text(content)
        found.add(digest_now())
    assert len(found) == 3


def test_a_configuration_with_keys_that_are_no_text_has_a_digest() -> None:
    config = {"layer_map": {0: 1, "default": 2}}
    assert (
        digest(config=config)
        == digest(config=config)
        != digest(config={"layer_map": {"0": 1, "default": 2}})
    )


def test_unidentified_weights_are_valid_for_this_run_only() -> None:
    assert digest(commit=None) != digest(commit=None)


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "counted"),
    [(0, False, True), (0, True, False), (4, False, False)],
)
def test_media_are_numbered_only_if_both_caches_are_off(
    caplog: pytest.LogCaptureFixture, cache_gb: int, *, prefix_caching: bool, counted: bool
) -> None:
    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb))
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    config = SimpleNamespace(model_config=model, cache_config=cache)
    prefixes = {media_prefix(config) for _ in range(2)}
    assert len(prefixes - {""}) == (2 if counted else 0), "no two engines share a prefix"
    assert ("saved only up to the first item" in caplog.text) == counted
    model.multimodal_config = None
    assert media_prefix(config) == ""


def test_the_description_is_json_that_a_superblock_has_room_for() -> None:
    fields = [
        ("model", "'some/model'"),
        ("user", "''"),
        ("commit", ""),
        ("media", '"[None, 1]"'),
        ("tokens", "16"),
        ("torn", "'a"),
        ("odd", "'\u00e9'"),
    ]
    said = {
        "model": "some/model",
        "media": "[None, 1]",
        "tokens": "16",
        "torn": "'a",
        "odd": "\u00e9",
    }
    assert json.loads(description_of(fields)) == said
    long = json.loads(description_of([(f"field{i}", repr("x" * 10_000)) for i in range(50)]))
    assert list(long) == [f"field{i}" for i in range(len(long))] and len(long) >= 3
    assert (
        len(description_of([(f"field{i}", repr("\u00e9" * 10_000)) for i in range(50)]))
        <= MAX_DESCRIPTION_CHARS
    )


def digest_of_states(**changes: Any) -> bytes:
    spec = MambaSpec(
        **(
            {
                "block_size": 32,
                "shapes": ((3, 8), (4, 8)),
                "dtypes": (torch.bfloat16, torch.bfloat16),
            }
            | changes
        )
    )
    assert " at 0x" not in repr(spec), "the address would make every run miss"
    kv = KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return digest(ranks=[kv])


@pytest.mark.parametrize(
    "change",
    [
        {
            "dtypes": (torch.float16, torch.float16)
        },  # --mamba-cache-dtype, with the same size as bfloat16
        {"dtypes": (torch.bfloat16, torch.float16)},  # --mamba-ssm-cache-dtype
        {"shapes": ((8, 3), (4, 8))},  # VLLM_SSM_CONV_STATE_LAYOUT
    ],
)
def test_states_of_another_type_or_layout_with_equal_size_are_different(
    change: dict[str, Any],
) -> None:
    assert digest_of_states(**change) != digest_of_states()


def test_the_layout_of_convolutions_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest()
    monkeypatch.setattr(namespace, "get_conv_state_layout", lambda: "DS")
    assert digest() != before
