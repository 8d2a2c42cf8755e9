"""The namespace: each field that decides KV bytes, changed alone, changes the digest (through the real extension)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvloft import _core
from kvloft.plan import Geometry
from kvloft.vllm.namespace import media_ids_are_counted, namespace_fields, weights_fingerprint

BASE: dict[str, Any] = {
    "model": "hub/name", "revision": None, "commit": "abc", "config": {"hidden_size": 64}, "load_format": "auto", "seed": 0,
    "dtype": torch.float32, "quantization": None, "cache_dtype": "auto", "max_model_len": 64, "tensor_parallel_size": 1,
    "kv_heads": 1, "block": 32, "blocks_per_chunk": 1, "user": "", "backend": None, "layout": "LBHNC",
    "model_weights": "", "load_extra": {}, "quantization_config": None, "model_impl": "auto", "model_class_overrides": {},
    "media": None, "additional": {}, "override_generation_config": {}, "disable_sliding_window": False,
}  # fmt: skip


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
            model=v["model"], revision=v["revision"], hf_config=HfConfig(v["config"], v["commit"]), seed=v["seed"],
            dtype=v["dtype"], quantization=v["quantization"], max_model_len=v["max_model_len"], model_weights=v["model_weights"],
            quantization_config=v["quantization_config"], model_impl=v["model_impl"],
            model_class_overrides=v["model_class_overrides"], multimodal_config=v["media"],
            hf_config_path=v.get("hf_config_path"),
            override_generation_config=v["override_generation_config"], disable_sliding_window=v["disable_sliding_window"],
        ),
        cache_config=SimpleNamespace(cache_dtype=v["cache_dtype"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=v["tensor_parallel_size"]),
        load_config=SimpleNamespace(load_format=v["load_format"], model_loader_extra_config=v["load_extra"]),
        attention_config=SimpleNamespace(backend=v["backend"]), weight_transfer_config=v.get("weight_transfer"),
        additional_config=v["additional"],
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=v["block"], num_kv_heads=v["kv_heads"], head_size=32, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    assert hasattr(kv, "kv_cache_layout")
    kv.kv_cache_layout = v["layout"]
    geometry = Geometry(v["block"], v["blocks_per_chunk"])
    return _core.namespace_digest(namespace_fields(config, kv, geometry, v["user"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "hub/other"}, {"revision": "v2"}, {"commit": "def"}, {"config": {"hidden_size": 65}}, {"load_format": "dummy"},
        {"dtype": torch.bfloat16}, {"quantization": "fp8"}, {"cache_dtype": "fp8"}, {"tensor_parallel_size": 2}, {"kv_heads": 2},
        {"block": 64}, {"blocks_per_chunk": 2}, {"user": "blue"}, {"backend": "FLASHINFER"}, {"layout": "LBNHC"},
        {"model_weights": "s3://other"}, {"load_extra": {"tensorizer_uri": "other.tensors"}},
        {"quantization_config": {"ignore": ["lm_head"]}}, {"model_impl": "transformers"}, {"model_class_overrides": {"A": "b:B"}},
        {"max_model_len": 128}, {"additional": {"a": 1}},
        {"override_generation_config": {"attn_temperature_tuning": True}}, {"disable_sliding_window": True},
        {"media": SimpleNamespace(mm_processor_kwargs={"do_resize": False})}, {"media": SimpleNamespace(video_pruning_rate=0.5)},
    ],
    ids=str,
)  # fmt: skip
def test_each_field_alone_flips_the_namespace(change: dict[str, Any]) -> None:
    assert digest() == digest()
    assert digest(**change) != digest()


def test_dummy_weights_are_told_apart_by_their_seed() -> None:
    assert digest(seed=1) == digest()
    assert digest(load_format="dummy", seed=1) != digest(load_format="dummy")


def test_pages_packed_for_another_cpu_are_other_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    tiles = digest()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert digest() != tiles


def test_weights_that_a_trainer_replaces_in_memory_serve_their_own_engine_only() -> None:
    assert digest(weight_transfer=SimpleNamespace(backend="nccl")) != digest(weight_transfer=SimpleNamespace(backend="nccl"))


@pytest.mark.parametrize("name", ["hub/name", "/no/such/folder", "./models/a/b", "s3://bucket/model"])
def test_weights_of_which_nothing_is_known_serve_their_own_engine_only(name: str) -> None:
    """Another hub's, say: the name alone does not show that they were trained further."""
    assert digest(model=name, commit=None) != digest(model=name, commit=None)
    assert digest(model=name, hf_config_path="hub/other") != digest(model=name, hf_config_path="hub/other")


@pytest.mark.parametrize(("file", "revision"), [("config.json", None), ("params.json", "v2")])
def test_a_configuration_without_a_commit_has_that_of_the_hubs_cache(hub_cache: Any, file: str, revision: str | None) -> None:
    """Mistral's format: its configurations are not transformers' own."""
    hub_cache("hub/name", file, "c0ffee", revision or "main")
    first = digest(commit=None, revision=revision)
    assert digest(commit=None, revision=revision) == first == digest(commit="c0ffee", revision=revision)
    hub_cache("hub/name", file, "decade", revision or "main")
    assert digest(commit=None, revision=revision) != first


@pytest.mark.parametrize(("cache_gb", "prefix_caching", "counted"), [(0, False, True), (0, True, False), (4, False, False)])
def test_media_are_named_by_a_count_only_where_both_caches_are_off(cache_gb: int, *, prefix_caching: bool, counted: bool) -> None:
    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb))
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    assert media_ids_are_counted(SimpleNamespace(model_config=model, cache_config=cache)) == counted
    model.multimodal_config = None
    assert not media_ids_are_counted(SimpleNamespace(model_config=model, cache_config=cache))


def test_settings_beside_the_weights_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter's scale and a processor's sizes are in files of their own; the path may begin with the home directory."""
    settings = tmp_path / "adapter_config.json"
    settings.write_text('{"lora_alpha": 16}')
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    first = weights_fingerprint(f"~/{tmp_path.name}")
    settings.write_text('{"lora_alpha": 32}')
    assert len({first, weights_fingerprint(f"~/{tmp_path.name}"), ""}) == 3


def test_weights_trained_in_place_are_other_weights(tmp_path: Path) -> None:
    assert weights_fingerprint("hub/name") == ""
    assert weights_fingerprint(str(tmp_path)) == ""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(300_000))
    first = weights_fingerprint(str(tmp_path))
    file.write_bytes(bytes(150_000) + b"\1" + bytes(149_999))
    assert weights_fingerprint(str(tmp_path)) != first
