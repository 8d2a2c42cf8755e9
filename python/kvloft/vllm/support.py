"""What kvloft does not serve yet, refused at start with one sentence that says so: never half-served.

It must not decide anything later than start.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvloft.errors import UnsupportedError
from kvloft.vllm.shape import layer_specs, num_groups

_WHOLE_PREFIX_SPECS = {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec"}
"""Specs whose blocks hold every token's KV for the request's whole life.

A sliding window or a local chunk beside full attention comes here as FullAttentionSpec too: for a connector of one block table
vLLM promotes such layers (`unify_hybrid_kv_cache_specs`), keeps all their blocks, and leaves the window to the computation.
"""


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedError for models and settings that kvloft would serve wrongly."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if getattr(model, "is_encoder_decoder", False):
        raise UnsupportedError(f"kvloft does not serve encoder-decoder models yet, and {model.model!r} is one")
    if getattr(model, "is_diffusion", False):
        raise UnsupportedError(
            f"kvloft keeps KV that no later step changes, and {model.model!r} is a diffusion model, which rewrites its canvas; "
            "run it without kvloft"
        )
    if not getattr(model, "is_prefix_caching_supported", True):
        raise UnsupportedError(
            f"kvloft serves models whose prefixes vLLM can cache, and {model.model!r} needs every token's output "
            "(mean or CLS pooling, or attention in both directions); run it without kvloft"
        )
    if num_groups(kv_cache_config) != 1:
        raise UnsupportedError(
            f"kvloft serves models with one KV cache group, and {model.model!r} has {num_groups(kv_cache_config)} "
            "(as state-space layers beside attention make them); run it without kvloft"
        )
    for spec in layer_specs(kv_cache_config).values():
        name = type(spec).__name__
        if name not in _WHOLE_PREFIX_SPECS:
            raise UnsupportedError(
                f"kvloft serves full attention and MLA, and {model.model!r} keeps its KV as {name}; run it without kvloft"
            )
        if getattr(spec, "non_causal", False):
            raise UnsupportedError(
                f"kvloft serves KV that only earlier tokens decide, and in {model.model!r} a prompt's tokens attend to later ones "
                "(prefix LM); run it without kvloft"
            )
    chunked_prefill = getattr(getattr(vllm_config, "scheduler_config", None), "enable_chunked_prefill", True)
    if current_platform.is_cpu() and getattr(model, "use_mla", False) and not chunked_prefill:
        raise UnsupportedError(
            f"kvloft gives back the beginning of a prompt, and vLLM on this CPU computes prompts of MLA models ({model.model!r}) "
            "only whole (it needs AMX for more); run it without kvloft"
        )
    for setting in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, setting, 1) != 1:
            raise UnsupportedError(f"kvloft does not serve {setting}={getattr(parallel, setting)} yet; set it to 1")
    sleeper = getattr(model, "sleep_mode_backend", "cumem")
    if getattr(model, "enable_sleep_mode", False) and sleeper != "cumem":
        raise UnsupportedError(
            f"kvloft does not serve sleep_mode_backend={sleeper!r}: it could not end its copies before pages are unmapped; "
            "use 'cumem', or leave enable_sleep_mode off"
        )
    backend = getattr(parallel, "distributed_executor_backend", None)
    if parallel.world_size > 1 and backend not in (None, "mp", "uni"):
        raise UnsupportedError(
            f"kvloft shares memory between the processes of one host, which distributed_executor_backend={backend!r} "
            "may not be; use 'mp'"
        )
    if getattr(parallel, "nnodes", 1) != 1:
        raise UnsupportedError("kvloft shares memory between the processes of one host; nnodes must be 1")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError(
            "kvloft does not serve calculate_kv_scales=True: the scales differ from start to start and are not in the pages; "
            "use a checkpoint with KV scales, or leave it off"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and _has_draft_kv(speculative):
        raise UnsupportedError(
            f"kvloft serves speculative decoding without draft KV (ngram, suffix), and {speculative.method!r} keeps draft KV in "
            "the same blocks that depends on tokens beyond the block; run it without kvloft"
        )


def transfer_warnings(transfer: Any) -> list[str]:
    """What ``transfer``, vLLM's KVTransferConfig or None, asks for and may not be meant: a sentence each."""
    if transfer is None:
        return []
    found = []
    if not transfer.is_kv_consumer:
        found.append(f'"kv_role" is "{transfer.kv_role}": this engine saves and never loads; "kv_both" does both')
    if not transfer.is_kv_producer:
        found.append(f'"kv_role" is "{transfer.kv_role}": this engine loads and never saves; "kv_both" does both')
    if transfer.is_kv_consumer and getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        found.append(
            'vLLM ends a request with an error where a load fails; with "kv_load_failure_policy": "recompute" it is computed '
            "instead (in --kv-transfer-config; around MultiConnector, if kvloft is in one)"
        )
    return found


def _has_draft_kv(speculative: Any) -> bool:
    return speculative.method not in ("ngram", "ngram_gpu", "suffix")
