"""The namespace: everything but content that decides KV bytes, as (name, value) pairs for one digest.

On doubt a field goes in: a needless miss costs time, a wrong hit costs an answer. It must not know the store.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import vllm
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvloft.plan import Geometry
from kvloft.vllm.compat import layer_page_bytes

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", "config.json")
"""Ends of names. Configurations count too: an adapter's scale and a processor's sizes decide KV as weights do."""
_SAMPLE_BYTES = 1 << 16


def namespace_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, geometry: Geometry, user_namespace: str
) -> list[tuple[str, str]]:
    """Fields of ``_core.namespace_digest``; two engines with equal fields may serve each other's KV."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    load = vllm_config.load_config
    # A configuration from elsewhere has a commit of its own, which says nothing of the weights.
    commit = None if getattr(model, "hf_config_path", None) else getattr(model.hf_config, "_commit_hash", None)
    commit = commit or hub_commit(model.model, model.revision)
    weights = weights_fingerprint(model.model)
    is_dummy = str(load.load_format) == "dummy"
    fields: dict[str, Any] = {
        "user": user_namespace,
        "model": model.model,
        "revision": model.revision,
        "code_revision": getattr(model, "code_revision", None),
        "commit": commit,
        "config": _digest(json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)),
        "weights": weights,
        "unknown_weights": None if commit or weights or is_dummy else uuid4().hex,  # of this engine's process only
        "weights_from": getattr(model, "model_weights", None) or None,
        "load_format": load.load_format,
        "load_extra": getattr(load, "model_loader_extra_config", None) or None,
        "live_weights": uuid4().hex if getattr(vllm_config, "weight_transfer_config", None) is not None else None,
        "dummy_seed": model.seed if is_dummy else None,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_config": getattr(model, "quantization_config", None),
        "model_impl": (getattr(model, "model_impl", None), getattr(model, "model_class_overrides", None)),
        "media": _media_settings(model),
        "kv_dtype": cache.cache_dtype,
        "kv_scales": getattr(cache, "calculate_kv_scales", None),
        "max_model_len": model.max_model_len,  # Llama 4's attention and LongRoPE's factors depend on it, nested in any config
        "model_settings": _model_settings(model),
        "additional": getattr(vllm_config, "additional_config", None) or None,
        "platform": _platform(),
        "attention": _attention_backend(vllm_config),
        "layout": getattr(kv_cache_config, "kv_cache_layout", None),
        "pages": _digest(json.dumps(sorted(layer_page_bytes(kv_cache_config).items()))),
        "block_tokens": geometry.block_tokens,
        "chunk_tokens": geometry.chunk_tokens,
        "tensor_parallel": parallel.tensor_parallel_size,
        "expert_parallel": getattr(parallel, "enable_expert_parallel", None),
        "vllm": vllm.__version__,
    }
    return [(name, repr(value) if value is not None else "") for name, value in fields.items()]


def weights_fingerprint(model: str) -> str:
    """Digest over a local model's files of weights and settings: name, size, time and samples of each; "" for a hub name.

    A hub name is told apart by its commit. A local folder may be trained on in place, which its name does not show.
    """
    digest = hashlib.blake2b(digest_size=16)
    found = False
    for path in _weight_files(model):
        found = True
        stat = path.stat()
        digest.update(f"{path.name}|{stat.st_size}|{stat.st_mtime_ns}|".encode())
        with path.open("rb") as file:
            for position in (0, stat.st_size // 2, max(0, stat.st_size - _SAMPLE_BYTES)):
                file.seek(position)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if found else ""


def weights_changed_since(model: str, time_s: float) -> bool:
    """Whether a local model's files were written after ``time_s`` (Unix time): which state was loaded is not known then."""
    return any(path.stat().st_mtime > time_s for path in _weight_files(model))


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """The commit of Hugging Face's hub that this machine's cache has for ``name``; None for what is not there or not of that hub.

    After a load that is the commit that was loaded. No connection is made.
    """
    for file in ("config.json", "params.json", "adapter_config.json"):
        try:
            found = try_to_load_from_cache(name, file, revision=revision)
        except HFValidationError:  # a path, say
            return None
        if isinstance(found, str):
            return Path(found).parent.name
    return None


def _weight_files(model: str) -> list[Path]:
    folder = Path(model).expanduser()
    files = [folder] if folder.is_file() else sorted(folder.glob("*")) if folder.is_dir() else []
    return [path for path in files if path.name.endswith(_WEIGHT_SUFFIXES)]


def media_ids_are_counted(vllm_config: Any) -> bool:
    """Whether vLLM names media by a count that starts afresh with its process, not by their content."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    caches_off = getattr(media, "mm_processor_cache_gb", None) == 0 and not vllm_config.cache_config.enable_prefix_caching
    return media is not None and caches_off


def _model_settings(model: Any) -> str:
    """What a user sets besides the model that models read when they are built (Llama 4 takes its temperature tuning so)."""
    names = ("override_generation_config", "disable_sliding_window", "disable_cascade_attn")
    return repr([str(getattr(model, name, None) or None) for name in names])


def _media_settings(model: Any) -> str | None:
    """What an engine does to every image, video and audio: vLLM's identifiers tell the input and the request's wishes only."""
    media = getattr(model, "multimodal_config", None)
    names = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method", "mm_encoder_attn_dtype")
    return repr([getattr(media, name, None) for name in names]) if media is not None else None


def _platform() -> str:
    """The CPU backend packs pages by what the CPU can do, which neither shapes nor strides show."""
    name = str(current_platform.device_name)
    if not current_platform.is_cpu():
        return name
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: None)()
    return f"{name} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={amx}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _attention_backend(vllm_config: VllmConfig) -> str | None:
    attention = getattr(vllm_config, "attention_config", None)
    return str(getattr(attention, "backend", None)) if attention is not None else None
