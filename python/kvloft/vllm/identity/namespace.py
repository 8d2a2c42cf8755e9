"""Defines the namespace: (name, value) pairs for everything that determines KV bytes, except
request content.

It includes every field that might affect KV: an unnecessary miss costs only time, but a wrong hit
produces wrong output.
"""

import ast
import hashlib
import json
import platform
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import torch
import transformers
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

import vllm
from kvloft.config.environment import engine_environment
from kvloft.seam.shape import CacheShape
from kvloft.vllm.identity.weights import look, model_fields
from kvloft.vllm.shape import has_draft_kv, layer_specs, stage_layers

try:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
except ImportError:  # older vLLM releases have only one layout
    get_conv_state_layout = None

MAX_DESCRIPTION_CHARS = 1000
"""Maximum description length, from rust/core/src/tier/disk/superblock.rs."""
MAX_VALUE_CHARS = 200
ENVIRONMENT = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_KV_CACHE_LAYOUT",
    # A client-given identifier of a video does not depend on how frames are chosen.
    "VLLM_VIDEO_LOADER_BACKEND",
    "VLLM_MEDIA_CONNECTOR",
)
"""Environment variables that affect KV and have no equivalent vLLM setting."""

LORA_CAPACITY = frozenset({"max_loras", "max_cpu_loras", "specialize_active_lora"})
"""LoRA configuration fields that do not affect KV."""


def namespace_fields(
    vllm_config: VllmConfig, ranks: Sequence[KVCacheConfig], shape: CacheShape, user_namespace: str
) -> list[tuple[str, str]]:
    """Return the namespace's fields. Engines with equal fields can share KV."""
    model, load = vllm_config.model_config, vllm_config.load_config
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    specs = {(name, repr(spec)) for rank in ranks for name, spec in layer_specs(rank).items()}
    fields: dict[str, Any] = {
        "user": user_namespace,
        "model": model.model,
        "revision": model.revision,
        "code_revision": getattr(model, "code_revision", None),
        "config": _config_digest(model),
        **model_fields(model, load),
        "weights_from": getattr(model, "model_weights", None) or None,
        "load_format": load.load_format,
        "load_extra": getattr(load, "model_loader_extra_config", None) or None,
        "live_weights": uuid4().hex if are_replaced(vllm_config) else None,
        "dummy_seed": model.seed if str(load.load_format) == "dummy" else None,
        "lora": _lora_settings(getattr(vllm_config, "lora_config", None)),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_config": getattr(model, "quantization_config", None),
        "model_impl": (
            getattr(model, "model_impl", None),
            getattr(model, "model_class_overrides", None),
        ),
        # Include image, video and audio settings, because vLLM's media identifiers depend only on
        # the request's input and parameters.
        "media": _settings(
            (media := getattr(model, "multimodal_config", None)),
            "mm_processor_kwargs",
            "media_io_kwargs",
            "video_pruning_rate",
            "video_pruning_method",
            "mm_encoder_attn_dtype",
        ),
        "media_scales": _file_state(getattr(media, "mm_encoder_fp8_scale_path", None)),
        "kv_dtype": cache.cache_dtype,
        "kv_scales": getattr(cache, "calculate_kv_scales", None),
        # Llama 4's attention and LongRoPE's factors depend on this setting. With -1, vLLM builds
        # the model before fitting the length to free memory.
        "max_model_len": -1
        if getattr(model, "original_max_model_len", None) == -1
        else model.max_model_len,
        # Some model constructors read these settings. For example, Llama 4 uses them to tune
        # attention temperature.
        "model_settings": _settings(
            model, "override_generation_config", "disable_sliding_window", "disable_cascade_attn"
        ),
        "additional": getattr(vllm_config, "additional_config", None) or None,
        "platform": _platform(),
        "attention": _settings(
            getattr(vllm_config, "attention_config", None),
            "backend",
            "backend_per_kind",
            "use_prefill_query_quantization",
            "disable_flashinfer_q_quantization",
        ),
        "mamba": _settings(
            getattr(vllm_config, "mamba_config", None),
            "backend",
            "enable_stochastic_rounding",
            "stochastic_rounding_philox_rounds",
            "ssu_algorithm",
        ),
        "layout": getattr(ranks[0], "kv_cache_layout", None),
        # Hash complete specs, not just sizes: specs include state shapes and dtypes, which various
        # flags can change.
        "pages": _digest(json.dumps(sorted(specs))),
        "conv_states": get_conv_state_layout() if get_conv_state_layout is not None else None,
        "block_tokens": shape.unit_tokens,
        "tensor_parallel": parallel.tensor_parallel_size,
        "shards": shape.num_shards,
        "expert_parallel": getattr(parallel, "enable_expert_parallel", None),
        "environment": engine_environment(ENVIRONMENT) or None,
        # Backends may quantize differently.
        "kernels": _settings(
            getattr(vllm_config, "kernel_config", None),
            "moe_backend",
            "linear_backend",
            "linear_backend_per_quant",
        ),
        "transformers": transformers.__version__,  # the release affects image sizes and model code
        "vllm": vllm.__version__,
    }
    if has_draft_kv(vllm_config):
        fields |= _drafter_fields(vllm_config)
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        fields["stages"] = stage_layers(vllm_config)
    if shape.encoding:  # engines without this encoding cannot read encoded parts
        fields["encoding"] = shape.encoding
    if not shape.is_divisible:
        fields["groups"] = [(group.kind, group.reach) for group in shape.groups]
        if any(group.block_tokens != shape.unit_tokens for group in shape.groups):
            fields["group_blocks"] = [group.block_tokens for group in shape.groups]
    return [(name, repr(value) if value is not None else "") for name, value in fields.items()]


def _drafter_fields(vllm_config: Any) -> dict[str, Any]:
    """Return the fields for a draft model whose KV is stored in the engine's blocks."""
    speculative = vllm_config.speculative_config
    model = getattr(speculative, "draft_model_config", None) or vllm_config.model_config
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    weights = model_fields(model, load)
    settings = ("method", "num_speculative_tokens", "parallel_drafting")
    own = _settings(speculative, *settings, "draft_tensor_parallel_size") or []
    of_model = _settings(model, "dtype", "quantization", "max_model_len") or []
    return {f"draft_{name}": value for name, value in weights.items()} | {
        "draft_model": model.model,
        "draft_revision": model.revision,
        "draft_config": _config_digest(model),
        "draft_settings": own + of_model,
        "draft_load": _settings(load, "load_format", "model_loader_extra_config"),
    }


def description_of(fields: Sequence[tuple[str, str]]) -> str:
    """Return the non-empty fields as JSON, truncated to fit into a superblock."""
    said: dict[str, str] = {}
    for name, value in fields:
        text = _unquoted(value)
        if text not in ("", "None"):
            said[name] = text[:MAX_VALUE_CHARS]
    while len(description := json.dumps(said, ensure_ascii=False)) > MAX_DESCRIPTION_CHARS:
        said.popitem()
    return description


def _unquoted(value: str) -> str:
    """Return the string whose repr is ``value``, or ``value`` itself if there is no such string."""
    try:
        text = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return text if isinstance(text, str) else value


def are_replaced(vllm_config: Any) -> bool:
    """Return True if a trainer can replace the running engine's weights."""
    extension = getattr(vllm_config.parallel_config, "worker_extension_cls", None)
    return getattr(vllm_config, "weight_transfer_config", None) is not None or bool(extension)


def _lora_settings(lora: Any) -> list[tuple[str, str]] | None:
    """Return the LoRA configuration fields that determine which modules an adapter changes, and in
    which precision.
    """
    if lora is None:
        return None
    fields = vars(lora).items()
    return sorted((name, str(value)) for name, value in fields if name not in LORA_CAPACITY)


def _file_state(path: str | None) -> str | None:
    """Return a fingerprint of a file that vLLM reads at startup, or None if no path is given."""
    found = look(path) if path else None
    return found.fingerprint() if found is not None else path


def _config_digest(model: Any) -> str:
    """Return a digest of the ModelConfig's Hugging Face configuration."""
    return _digest(json.dumps(_plain(model.hf_config.to_dict()), sort_keys=True, default=str))


def _plain(value: Any) -> Any:
    """Return a copy of ``value`` with all keys as strings, so that JSON can sort them."""
    if isinstance(value, dict):
        return {f"{type(key).__name__} {key}": _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _settings(config: Any, *names: str) -> list[str] | None:
    """Return the values of ``names`` in ``config``, or None if ``config`` is None."""
    return [str(getattr(config, name, None)) for name in names] if config is not None else None


def _platform() -> str:
    """Return the device name and, for CPUs, the features that determine the page layout, which
    shapes and strides do not reveal.
    """
    name = str(current_platform.device_name)
    if not current_platform.is_cpu():
        return name
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)()
    return f"{name} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={amx}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
