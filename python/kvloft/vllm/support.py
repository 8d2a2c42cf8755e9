"""Rejects models and settings that kvloft does not support.

All checks run at startup. If a check fails, the engine does not start, and the error message gives
the reason.
"""

from collections.abc import Iterator
from itertools import chain
from math import lcm
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.platforms import current_platform
from vllm.v1.core.sched import output
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvloft.errors import UnsupportedError
from kvloft.vllm.shape import KIND_OF_SPEC, group_specs, has_draft_kv, layer_specs, lookahead

try:
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
except ImportError:  # older vLLM releases
    AuxOutputSchedulerConnector = None

HAS_GROUPS = hasattr(base, "KVConnectorTransferResults") and hasattr(
    output, "KVConnectorBlockState"
)
"""True if this vLLM release gives connectors the KV cache group data that they need."""
CAPS_HITS = hasattr(AuxOutputSchedulerConnector, "cap_external_hit")
"""True if this vLLM release limits loads to tokens with stored auxiliary output."""
IN_ONE = ' (or set kv_groups to "one", so that vLLM keeps every token in every layer)'


def check_supported(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_groups: str = "auto"
) -> None:
    """Raise UnsupportedError for an unsupported model or setting."""
    if reason := next(_of_model(vllm_config, kv_cache_config, kv_groups), None):
        raise UnsupportedError(
            f"kvloft {reason}; run {vllm_config.model_config.model!r} without kvloft"
        )
    if reason := next(
        chain(_of_settings(vllm_config), _of_stages(vllm_config, kv_cache_config)), None
    ):
        raise UnsupportedError(f"kvloft {reason}")


def _of_model(vllm_config: Any, kv_cache_config: KVCacheConfig, kv_groups: str) -> Iterator[str]:
    """Yield reasons to reject the model."""
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        yield "does not support encoder-decoder models yet"
    if getattr(model, "is_diffusion", False):
        yield "does not support diffusion models: they modify KV after it is computed"
    if not getattr(model, "is_prefix_caching_supported", True):
        yield (
            "requires a model that vLLM's prefix caching supports; this model needs every token's "
            "output (mean or CLS pooling, or bidirectional attention)"
        )
    yield from _of_layers(vllm_config, kv_cache_config, kv_groups)
    chunked_prefill = getattr(
        getattr(vllm_config, "scheduler_config", None), "enable_chunked_prefill", True
    )
    if current_platform.is_cpu() and getattr(model, "use_mla", False) and not chunked_prefill:
        yield (
            "does not support MLA models on CPUs without AMX: vLLM computes their prompts in one "
            "piece, so kvloft cannot load part of a prompt"
        )
    if vllm_config.speculative_config is not None:
        yield from _of_drafter(vllm_config)


def _of_layers(vllm_config: Any, kv_cache_config: KVCacheConfig, kv_groups: str) -> Iterator[str]:
    """Yield reasons to reject the model's layer types."""
    specs = list(layer_specs(kv_cache_config).values())
    kinds = {KIND_OF_SPEC.get(type(spec).__name__) for spec in specs}
    served: set[str | None] = {"full"}
    if (num_groups := len(kv_cache_config.kv_cache_groups)) != 1:
        served = {"full", "window", "local", "state"}
        if not num_groups:
            yield "does not support models without a KV cache"
        elif kv_groups == "one":
            yield (
                'supports only models with one KV cache group if kv_groups is "one"; this model '
                f"has {num_groups} (for example, because it combines attention and state-space "
                "layers)"
            )
        fits_in_one = "full" in kinds and kinds <= {"full", "window", "local"}
        way_out = IN_ONE if kv_groups != "one" and fits_in_one else ""
        yield from (reason + way_out for reason in _of_groups(vllm_config, kv_cache_config))
    elif kinds == {"window"}:
        served = {"window"}
        if kv_groups == "one":
            yield (
                'requires kv_groups to be "auto" or "all" for models with a sliding window in '
                "every layer"
            )
        yield from _of_groups(vllm_config, kv_cache_config)
    for spec in specs:
        if KIND_OF_SPEC.get(type(spec).__name__) not in served:
            yield f"does not support KV of type {type(spec).__name__}"
        if getattr(spec, "non_causal", False):
            yield "does not support prefix LMs: their prompt tokens attend to later tokens"


def _of_drafter(vllm_config: Any) -> Iterator[str]:
    """Yield reasons to reject the speculative decoding method."""
    speculative = vllm_config.speculative_config
    if not has_draft_kv(vllm_config):
        if speculative.method not in ("ngram", "ngram_gpu", "suffix"):
            yield f"does not support the speculative decoding method {speculative.method!r}"
        return
    if not hasattr(KVConnectorModelRunnerMixin, "finalize_kv_connector"):
        yield (
            f"requires vLLM 0.30 or newer for {speculative.method!r}; in older releases, "
            "connectors cannot save after the draft model runs"
        )
    if lookahead(vllm_config) > 1:
        yield (
            "does not support more than one MTP layer yet: vLLM overwrites the last positions of "
            "later layers in its next step; set num_speculative_tokens to 1"
        )
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        yield (
            "requires the draft model to run in every step; unset "
            "num_speculative_tokens_per_batch_size"
        )


def _of_groups(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Yield reasons to reject multiple KV cache groups or a single sliding-window group."""
    groups, specs = kv_cache_config.kv_cache_groups, group_specs(kv_cache_config)
    if len(groups) > 1:
        specs = [group.kv_cache_spec for group in groups]
    kinds = [KIND_OF_SPEC.get(type(spec).__name__) for spec in specs]
    if not HAS_GROUPS:
        yield (
            "requires vLLM 0.32 or newer for models with multiple KV cache groups or a sliding "
            "window in every layer"
        )
    has_window = any((getattr(spec, "sliding_window", None) or 0) > 1 for spec in specs)
    if "full" not in kinds and not has_window:
        yield ("requires a layer with full attention or a sliding window of more than one token")
    if None in kinds:
        yield f"does not support KV of type {type(specs[kinds.index(None)]).__name__}"
    yield from _of_block_sizes(vllm_config, kv_cache_config, specs)
    if any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in specs):
        yield (
            "requires Mamba states at block boundaries; set --mamba-cache-mode align and enable "
            "prefix caching"
        )
    if "state" in kinds and vllm_config.speculative_config is not None:
        yield from _of_drafts_with_states(vllm_config, specs)
    if any(
        not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False)
        for group in groups
    ):
        yield "does not support KV cache groups that vLLM keeps outside GPU blocks"


def _of_block_sizes(vllm_config: Any, kv_cache_config: Any, specs: list[Any]) -> Iterator[str]:
    """Yield reasons to reject the block sizes or the hit granularity."""
    blocks = sorted({spec.block_size for spec in specs})
    unit = lcm(*blocks)
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or unit
    sizes = f"{' and '.join(map(str, blocks))} tokens"
    if alignment != unit and (len(blocks) != 1 or unit % alignment):
        yield (
            "requires prefix-cache hits to end at block boundaries in all groups; here, blocks "
            f"have {sizes}, and hits end at multiples of {alignment}"
        )
    if len(blocks) == 1:
        if alignment < unit and any(hasattr(spec, "mamba_cache_mode") for spec in specs):
            yield (
                f"saves Mamba states every {unit} tokens, at block boundaries, but vLLM also keeps "
                f"states at multiples of {alignment}, where prompts end; remove --prefix-match-unit"
            )
        return
    if not {KIND_OF_SPEC.get(type(spec).__name__) for spec in specs} <= {"full", "window"}:
        way_out = (
            "; remove --speculative-config, or use a draft model whose KV heads match the target "
            "model's"
        )
        yield (
            "requires the same block size in all groups for models with Mamba states or chunked "
            f"local attention; here, blocks have {sizes}"
            f"{way_out if has_draft_kv(vllm_config) else ''}"
        )
    if has_draft_kv(vllm_config):
        yield from _of_drafts_with_block_sizes(vllm_config, sizes)


def _of_drafts_with_block_sizes(vllm_config: Any, sizes: str) -> Iterator[str]:
    yield (
        f"does not support {vllm_config.speculative_config.method!r} for models whose KV cache "
        f"groups have different block sizes ({sizes}) yet: this combination is untested"
    )


def _of_drafts_with_states(vllm_config: Any, specs: list[Any]) -> Iterator[str]:
    """Yield reasons to reject speculative decoding with Mamba or gated delta net states.

    In the rejected cases, vLLM 0.32 produces wrong outputs after hits in its own prefix cache
    (tests/e2e/zoo/test_faults.py), and kvloft would save incorrect KV. All methods except suffix
    were tested with gated delta nets; suffix differs from ngram only in its draft tokens.
    """
    states = [spec for spec in specs if hasattr(spec, "mamba_cache_mode")]
    if any("GDN" not in str(getattr(spec, "mamba_type", "")) for spec in states):
        yield (
            "does not support speculative decoding with states other than gated delta nets: vLLM "
            "can keep a Mamba2 or convolution state that includes rejected draft tokens; remove "
            "--speculative-config"
        )
    is_async = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    if is_async and not getattr(vllm_config, "use_v2_model_runner", False):
        yield (
            "does not support speculative decoding with gated delta nets and asynchronous "
            "scheduling in Model Runner V1, because vLLM can continue from another "
            "request's state; set --no-async-scheduling"
        )


def _of_settings(vllm_config: Any) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, setting, 1)) != 1:
            yield f"does not support {setting}={size} yet; set it to 1"
    sleeper = getattr(model, "sleep_mode_backend", "cumem")
    if getattr(model, "enable_sleep_mode", False) and sleeper != "cumem":
        yield (
            f"does not support sleep_mode_backend={sleeper!r}, because kvloft cannot finish its "
            "copies before pages are unmapped; use 'cumem', or disable enable_sleep_mode"
        )
    backend = getattr(parallel, "distributed_executor_backend", None)
    if parallel.world_size > 1 and backend not in (None, "mp", "uni"):
        yield (
            f"requires all workers on one host, which distributed_executor_backend={backend!r} "
            "does not guarantee; use 'mp'"
        )
    if getattr(parallel, "nnodes", 1) != 1:
        yield f"requires all workers on one host (nnodes={parallel.nnodes}); set nnodes to 1"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield (
            "does not support calculate_kv_scales=True, because the scales change at every startup "
            "and are not stored with the KV; use a checkpoint with KV scales, or disable "
            "calculate_kv_scales"
        )
    dtype = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    if dtype.endswith("_per_token_head"):  # `_ensure_scale_caches` in vLLM's triton_attn.py
        yield (
            f"does not support kv_cache_dtype={dtype!r}, because vLLM can overwrite the scales of "
            "loaded KV in its first forward pass; use 'fp8' or 'auto'"
        )
    returns_experts = getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False)
    if returns_experts and vllm_config.kv_transfer_config.is_kv_consumer and not CAPS_HITS:
        yield (
            "requires vLLM 0.33 or newer for --enable-return-routed-experts, because older "
            "releases fail after a load; remove the flag"
        )


def _of_stages(vllm_config: Any, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Yield reasons to reject pipeline parallelism that is untested or fails in vLLM."""
    if (size := getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)) == 1:
        return
    # Check both group and layer specs: this rank may have no layers in a group, and the scheduler
    # has only the first rank's layers.
    specs = [*group_specs(kv_cache_config), *layer_specs(kv_cache_config).values()]
    kinds = {KIND_OF_SPEC.get(type(spec).__name__) for spec in specs}
    if "state" in kinds and not current_platform.is_cpu():
        yield (
            f"supports pipeline_parallel_size={size} for models with Mamba or gated delta net "
            "states only on CPUs; set it to 1"
        )
    if vllm_config.speculative_config is not None:
        yield (
            f"does not support pipeline_parallel_size={size} with speculative decoding: vLLM "
            "fails on CPUs (\"'CPUModelRunner' object has no attribute 'drafter'\"); set it to 1"
        )
    if not HAS_GROUPS:
        yield f"requires vLLM 0.32 or newer for pipeline_parallel_size={size}; set it to 1"


def transfer_warnings(transfer: Any) -> list[str]:
    """Return warnings about likely mistakes in vLLM's KVTransferConfig."""
    if transfer is None:
        return []
    found = []
    if not (transfer.is_kv_consumer and transfer.is_kv_producer):
        does = "saves but never loads" if transfer.is_kv_producer else "loads but never saves"
        found.append(
            f'with "kv_role": "{transfer.kv_role}", this engine {does}; use "kv_both" to do both'
        )
    return found
