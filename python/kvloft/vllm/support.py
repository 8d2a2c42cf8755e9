"""What kvloft does not support yet: such an engine does not start, and the error says why.

It must not decide anything later than start.
"""

from __future__ import annotations

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

HAS_GROUPS = hasattr(base, "KVConnectorTransferResults") and hasattr(output, "KVConnectorBlockState")
"""Whether this release tells connectors enough about several KV cache groups."""
IN_ONE = ' (with kv_groups set to "one", vLLM keeps every token in every layer instead)'


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_groups: str = "auto") -> None:
    """Raise UnsupportedError for models and settings that kvloft would serve wrongly."""
    if reason := next(_of_model(vllm_config, kv_cache_config, kv_groups), None):
        raise UnsupportedError(f"kvloft {reason}; run {vllm_config.model_config.model!r} without kvloft")
    if reason := next(chain(_of_settings(vllm_config), _of_stages(vllm_config, kv_cache_config)), None):
        raise UnsupportedError(f"kvloft {reason}")


def _of_model(vllm_config: Any, kv_cache_config: KVCacheConfig, kv_groups: str) -> Iterator[str]:
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        yield "does not serve encoder-decoder models yet"
    if getattr(model, "is_diffusion", False):
        yield "keeps KV that no later step changes, and a diffusion model rewrites its canvas"
    if not getattr(model, "is_prefix_caching_supported", True):
        yield (
            "serves models whose prefixes vLLM can cache, and this one needs every token's output "
            "(mean or CLS pooling, or attention in both directions)"
        )
    kinds = {KIND_OF_SPEC.get(type(spec).__name__) for spec in layer_specs(kv_cache_config).values()}
    served: set[str | None] = {"full"}
    if (num_groups := len(kv_cache_config.kv_cache_groups)) != 1:
        served = {"full", "window", "local", "state"}
        if kv_groups == "one" or not num_groups:
            beside = "as with state-space layers beside attention"
            yield f"serves models with one KV cache group, and this one has {num_groups} ({beside})"
        way_out = IN_ONE if kv_groups != "one" and "full" in kinds and kinds <= {"full", "window", "local"} else ""
        yield from (reason + way_out for reason in _of_groups(vllm_config, kv_cache_config))
    elif kinds == {"window"}:
        served = {"window"}
        if kv_groups == "one":
            yield 'serves sliding windows in every layer with kv_groups set to "auto" or "all"'
        yield from _of_groups(vllm_config, kv_cache_config)
    for spec in layer_specs(kv_cache_config).values():
        if KIND_OF_SPEC.get(type(spec).__name__) not in served:
            yield f"serves full attention and MLA, and this model keeps its KV as {type(spec).__name__}"
        if getattr(spec, "non_causal", False):
            yield "serves KV that only earlier tokens decide, and here a prompt's tokens attend to later ones (prefix LM)"
    chunked_prefill = getattr(getattr(vllm_config, "scheduler_config", None), "enable_chunked_prefill", True)
    if current_platform.is_cpu() and getattr(model, "use_mla", False) and not chunked_prefill:
        yield (
            "gives back the beginning of a prompt, and vLLM on this CPU computes prompts of MLA models only whole "
            "(it needs AMX for more)"
        )
    if vllm_config.speculative_config is not None:
        yield from _of_drafter(vllm_config)


def _of_drafter(vllm_config: Any) -> Iterator[str]:
    """Of what guesses tokens ahead."""
    speculative = vllm_config.speculative_config
    if not has_draft_kv(vllm_config):
        if speculative.method not in ("ngram", "ngram_gpu", "suffix"):
            yield f"has no rule for speculative decoding by {speculative.method!r}"
        return
    if not hasattr(KVConnectorModelRunnerMixin, "finalize_kv_connector"):
        yield f"serves {speculative.method!r} with vLLM 0.30 and newer, which let connectors save behind the drafter"
    if lookahead(vllm_config) > 1:
        yield (
            "does not serve several MTP layers yet, for vLLM writes the last positions of later ones again in the next step; "
            "set num_speculative_tokens to 1"
        )
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None):
        yield "needs a drafter that runs in every step; leave num_speculative_tokens_per_batch_size off"


def _of_groups(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Of a model with several KV cache groups, or with one of windows."""
    groups = kv_cache_config.kv_cache_groups
    specs = [group.kv_cache_spec for group in groups] if len(groups) > 1 else group_specs(kv_cache_config)
    kinds = [KIND_OF_SPEC.get(type(spec).__name__) for spec in specs]
    if not HAS_GROUPS:
        yield "serves several KV cache groups, or windows in every layer, with vLLM 0.32 and newer, which tell connectors enough"
    if "full" not in kinds and not any((getattr(spec, "sliding_window", None) or 0) > 1 for spec in specs):
        yield "serves models where some layer attends to all tokens or to a window of more than one"
    if None in kinds:
        yield f"has no rule for KV kept as {type(specs[kinds.index(None)]).__name__}"
    yield from _of_block_sizes(vllm_config, kv_cache_config, specs)
    if any(getattr(spec, "mamba_cache_mode", "align") != "align" for spec in specs):
        yield "serves states that vLLM keeps at blocks' ends; set --mamba-cache-mode align, with prefix caching"
    if "state" in kinds and vllm_config.speculative_config is not None:
        yield from _of_drafts_beside_states(vllm_config, specs)
    odd = {"enable_kv_transfer": False, "host_resident": True}
    if any(getattr(group, name, not value) == value for group in groups for name, value in odd.items()):
        yield "does not serve groups that are kept elsewhere than in blocks"


def _of_block_sizes(vllm_config: Any, kv_cache_config: Any, specs: list[Any]) -> Iterator[str]:
    """Where blocks differ in size, hits end at multiples of all sizes, and a chunk has several blocks of a group."""
    blocks = sorted({spec.block_size for spec in specs})
    unit = lcm(*blocks)
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or unit
    sizes = f"{' and '.join(map(str, blocks))} tokens"
    if alignment != unit and (len(blocks) != 1 or unit % alignment):
        yield f"serves hits that end where blocks of all groups do; here they have {sizes}, with hits at multiples of {alignment}"
    if len(blocks) == 1:
        if alignment < unit and any(hasattr(spec, "mamba_cache_mode") for spec in specs):
            yield (
                f"keeps states at the ends of blocks of {unit} tokens, and here vLLM keeps them at multiples of {alignment} only, "
                "where prompts end; leave --prefix-match-unit out"
            )
        return
    if not {KIND_OF_SPEC.get(type(spec).__name__) for spec in specs} <= {"full", "window"}:
        way_out = (
            "; leave --speculative-config out, or use a drafter with KV heads like the model's" if has_draft_kv(vllm_config) else ""
        )
        yield f"serves states and local chunks where all blocks have one size, and here they have {sizes}{way_out}"
    if has_draft_kv(vllm_config):
        yield from _of_drafts_beside_blocks(vllm_config, sizes)


def _of_drafts_beside_blocks(vllm_config: Any, sizes: str) -> Iterator[str]:
    yield (
        f"does not serve {vllm_config.speculative_config.method!r} beside groups with blocks of {sizes} yet: a drafter with KV of "
        "its own never ran with such a model"
    )


def _of_drafts_beside_states(vllm_config: Any, specs: list[Any]) -> Iterator[str]:
    """All drafters but suffix ran with gated delta nets; suffix differs from ngram in the tokens that it guesses only.

    What is refused is wrong in vLLM 0.32 alone, on hits of its own cache (tests/e2e/zoo/test_faults.py). Such KV would be saved,
    and outlive the engine.
    """
    if any("GDN" not in str(getattr(spec, "mamba_type", "")) for spec in specs if hasattr(spec, "mamba_cache_mode")):
        yield (
            "serves speculative decoding beside gated delta nets only: beside Mamba2 and convolutions vLLM keeps a state behind "
            "drafts that it rejects, where a prompt's last token and another's short rest come in one step; "
            "leave --speculative-config out"
        )
    is_async = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    if is_async and not getattr(vllm_config, "use_v2_model_runner", False):
        yield (
            "does not serve speculative decoding beside states with async scheduling in Model Runner V1, where vLLM may go on from "
            "another request's state; set --no-async-scheduling"
        )


def _of_settings(vllm_config: Any) -> Iterator[str]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, setting, 1)) != 1:
            yield f"does not serve {setting}={size} yet; set it to 1"
    sleeper = getattr(model, "sleep_mode_backend", "cumem")
    if getattr(model, "enable_sleep_mode", False) and sleeper != "cumem":
        yield (
            f"does not serve sleep_mode_backend={sleeper!r}: it could not end its copies before pages are unmapped; "
            "use 'cumem', or leave enable_sleep_mode off"
        )
    backend = getattr(parallel, "distributed_executor_backend", None)
    if parallel.world_size > 1 and backend not in (None, "mp", "uni"):
        yield f"shares memory between processes of one host, which distributed_executor_backend={backend!r} may not be; use 'mp'"
    if getattr(parallel, "nnodes", 1) != 1:
        yield "shares memory between processes of one host; nnodes must be 1"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        yield (
            "does not serve calculate_kv_scales=True: the scales differ from start to start and are not in the pages; "
            "use a checkpoint with KV scales, or leave it off"
        )


def _of_stages(vllm_config: Any, kv_cache_config: KVCacheConfig) -> Iterator[str]:
    """Of pipeline parallelism. What is refused never ran, or not with pages on a GPU."""
    if (size := getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)) == 1:
        return
    # Of groups too: this rank may have no layer of one, and the scheduler is told of the first rank's layers only.
    specs = [*group_specs(kv_cache_config), *layer_specs(kv_cache_config).values()]
    kinds = {KIND_OF_SPEC.get(type(spec).__name__) for spec in specs}
    if "state" in kinds and not current_platform.is_cpu():
        yield f"serves pipeline_parallel_size={size} of models with states on CPUs only so far; set it to 1"
    if vllm_config.speculative_config is not None:
        yield (
            f"does not serve pipeline_parallel_size={size} with speculative decoding, of which vLLM for CPUs dies "
            "(\"'CPUModelRunner' object has no attribute 'drafter'\"); set it to 1"
        )
    if not HAS_GROUPS:
        yield f"serves pipeline_parallel_size={size} with vLLM 0.32 and newer, where it ran; set it to 1"


def transfer_warnings(transfer: Any) -> list[str]:
    """What ``transfer``, vLLM's KVTransferConfig or None, asks for that may be a mistake, as sentences."""
    if transfer is None:
        return []
    found = []
    if not (transfer.is_kv_consumer and transfer.is_kv_producer):
        does = "saves and never loads" if transfer.is_kv_producer else "loads and never saves"
        found.append(f'"kv_role" is "{transfer.kv_role}": this engine {does}; "kv_both" does both')
    if transfer.is_kv_consumer and getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        found.append(
            'vLLM ends a request with an error where a load fails; with "kv_load_failure_policy": "recompute" it is computed '
            "instead (in --kv-transfer-config; around MultiConnector, if kvloft is in one)"
        )
    return found
