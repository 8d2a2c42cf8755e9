"""Converts vLLM's KV cache configuration to a CacheShape at startup.

This module determines the KV cache groups, the unit, and which ranks hold the same bytes, and reads
a configuration's groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, Literal, NamedTuple

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvloft.config.table import Config
from kvloft.plan.settings import PoolSize
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.transfer.frames import E348, RAW, TILE_BYTES, compact_bytes_for, part_bytes_for


def cache_shape(vllm_config: Any, ranks: Sequence[Any], encoding: int = RAW) -> CacheShape:
    """Return the cache shape. ``ranks`` holds the KV cache config of every rank, or only this
    worker's config.

    In each group, the rank with the largest chunks sets the part size. A worker sees only the sizes
    of its own layers, so with pipeline stages, its parts can be smaller than in the ArenaSpec.
    """
    groups = in_units([group_shape(spec) for spec in group_specs(ranks[0])])
    sizes = zip(*(_payload_sizes(rank, groups, encoding) for rank in ranks), strict=True)
    groups = tuple(
        _with_sizes(group, of_ranks) for group, of_ranks in zip(groups, sizes, strict=True)
    )
    return CacheShape(
        groups,
        num_ranks=vllm_config.parallel_config.world_size,
        num_replicas=num_replicas(vllm_config, ranks[0]) if CacheShape(groups).is_divisible else 1,
        lookahead=lookahead(vllm_config),
        encoding=encoding,
    )


class _PayloadSize(NamedTuple):
    """A chunk's size on one rank: total bytes, bytes in bfloat16 pages (which are compressed), and
    number of tiles.
    """

    num_bytes: int
    encoded_bytes: int = 0
    num_tiles: int = 0


def _payload_sizes(
    rank: Any, groups: Sequence[GroupShape], encoding: int
) -> Iterator[_PayloadSize]:
    """Yield each group's chunk size on one rank. Without ``encoding``, pages are not compressed."""
    specs = layer_specs(rank)
    for group, names in zip(groups, group_layers(rank), strict=True):
        layers, num = [specs[name] for name in names], group.kept_blocks
        size = _PayloadSize(num * sum(spec.page_size_bytes for spec in layers))
        if encoding:
            bf16 = [spec for spec in layers if getattr(spec, "dtype", None) == torch.bfloat16]
            # An upper bound, because K and V may be stored separately.
            tiles = sum(-(-spec.page_size_bytes // TILE_BYTES) + 1 for spec in layers)
            encoded = sum(spec.page_size_bytes for spec in bf16)
            size = size._replace(encoded_bytes=num * encoded, num_tiles=num * tiles)
        yield size


def _with_sizes(group: GroupShape, of_ranks: Sequence[_PayloadSize]) -> GroupShape:
    """Return ``group`` with parts large enough for its chunks on every rank."""
    compact = [compact_bytes_for(*size) for size in of_ranks]
    return replace(
        group,
        part_bytes=max(part_bytes_for(size.num_bytes, size.num_tiles) for size in of_ranks),
        compact_bytes=max(compact) if all(compact) else 0,
    )


def in_units(groups: Sequence[GroupShape]) -> tuple[GroupShape, ...]:
    """Return ``groups`` with the smallest unit that consists of whole blocks in every group. vLLM's
    own prefix-cache hits also end at multiples of this unit.
    """
    tokens = lcm(*(group.block_tokens for group in groups))
    return tuple(replace(group, blocks_per_unit=tokens // group.block_tokens) for group in groups)


def encoding_of(ranks: Sequence[Any], config: Config) -> int:
    """Return the frame encoding, `RAW` or `E348`, which is part of the namespace.

    The result does not depend on the GPU, so all of an engine's processes agree on it. A worker
    whose GPU, page alignment or staging buffer does not support encoding writes raw parts.
    """
    is_on = config.compression != "off" and config.gpu_copies == "kernels"
    if not is_on or not current_platform.is_cuda():
        return RAW
    specs = [spec for rank in ranks for spec in layer_specs(rank).values()]
    dtypes = [(getattr(spec, "dtype", None), *getattr(spec, "dtypes", ())) for spec in specs]
    return E348 if any(torch.bfloat16 in each for each in dtypes) else RAW


HIDDEN_DRAFTERS = ("eagle", "eagle3", "mtp")
"""Methods for which `SpeculativeConfig.use_eagle` returns True. Their layers read hidden states and
the next token.
"""
PREFIX_DRAFTERS = ("draft_model", "dflash")
"""Methods whose KV depends only on tokens up to the same position. DFlash reads the hidden states
of these tokens.
"""


def has_draft_kv(vllm_config: Any) -> bool:
    """Return True if a draft model's KV is stored in the engine's blocks."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and speculative.method in (*HIDDEN_DRAFTERS, *PREFIX_DRAFTERS)


def max_running(vllm_config: Any) -> int:
    """Return the maximum number of requests that vLLM runs concurrently."""
    config = vllm_config.scheduler_config
    return getattr(config, "max_num_active_seqs", None) or config.max_num_seqs


def draft_limit(vllm_config: Any) -> int | None:
    """Return the maximum request length at which the engine always runs the draft model, or None
    if no draft model has KV.
    """
    if not has_draft_kv(vllm_config):
        return None
    speculative, longest = vllm_config.speculative_config, vllm_config.model_config.max_model_len
    if (draft := getattr(speculative, "draft_model_config", None)) is not None:
        longest = min(longest, draft.max_model_len)
    # DFlash needs one of the two tokens; the other is a safety margin.
    return int(longest) - int(speculative.num_speculative_tokens) - 2


def pool_size(vllm_config: Any, kv_cache_config: Any, shape: CacheShape) -> PoolSize | None:
    """Return vLLM's block pool size, or None if the only group uses full attention."""
    if shape.is_divisible:
        return None
    speculative = getattr(vllm_config, "speculative_config", None)
    num_drafts = int(speculative.num_speculative_tokens or 0) if speculative is not None else 0
    two_steps = 2 * vllm_config.scheduler_config.max_num_batched_tokens
    step_tokens = int(getattr(vllm_config, "max_in_flight_tokens", two_steps))
    return PoolSize(kv_cache_config.num_blocks - 1, step_tokens, num_drafts)


def lookahead(vllm_config: Any) -> int:
    """Return how many tokens after a position affect the draft KV at that position."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method not in HIDDEN_DRAFTERS:
        return 0
    return int(max(1, getattr(vllm_config, "num_prefill_lookahead_tokens", 1)))


KIND_OF_SPEC: dict[str, Literal["full", "window", "local", "state"]] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "local",
    "MambaSpec": "state",
}
"""Maps a KV cache spec's class to its group's kind (see `GroupShape`).

If all layers share one block table, layers with a sliding window or chunked local attention also
have a FullAttentionSpec: vLLM converts their specs (`unify_hybrid_kv_cache_specs`), keeps all
blocks, and applies the window only during computation. If every layer has the same sliding window,
the spec of the only group is a SlidingWindowSpec.
"""


def group_shape(spec: Any) -> GroupShape:
    """Return the shape, without sizes, of a group whose ``spec`` is in `KIND_OF_SPEC`."""
    kind = KIND_OF_SPEC[type(spec).__name__]
    reach = 0
    if kind == "window":
        reach = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
    elif kind == "local":
        reach = spec.attention_chunk_size
    return GroupShape(spec.block_size, kind=kind, reach=reach)


def group_specs(kv_cache_config: Any) -> list[Any]:
    """Return each group's spec, or its first layer's spec if the layers differ in size."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [
        next(iter(layers.values())) if (layers := getattr(spec, "kv_cache_specs", None)) else spec
        for spec in specs
    ]


def group_layers(kv_cache_config: Any) -> list[list[str]]:
    """Return each group's layer names."""
    return [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """Return all layers' KV cache specs by layer name, in vLLM's order."""
    specs: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        # With UniformTypeKVCacheSpecs, layers differ in size.
        per_layer = getattr(spec, "kv_cache_specs", None) or {}
        specs |= {name: per_layer[name] if per_layer else spec for name in group.layer_names}
    return specs


def stage_layers(vllm_config: Any) -> list[int]:
    """Return the number of layers in each pipeline stage."""
    size = vllm_config.parallel_config.pipeline_parallel_size
    total = vllm_config.model_config.get_total_num_hidden_layers()
    return [
        end - start for start, end in (get_pp_indices(total, stage, size) for stage in range(size))
    ]


def num_replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many consecutive tensor-parallel ranks hold the same KV in every layer.

    The result relies only on what vLLM reports for each layer. KV heads are not counted, because
    layers and draft models can differ in their number of heads. Ranks that replicate heads
    therefore store copies.
    """
    parallel = vllm_config.parallel_config
    has_draft = has_draft_kv(vllm_config)
    if has_draft and getattr(parallel, "pipeline_parallel_size", 1) > 1:
        return 1  # only the last stage has the draft model's layers
    reported: int | None = getattr(kv_cache_config, "kv_tp_replicas", None)
    if reported is not None:
        return reported
    specs = layer_specs(kv_cache_config).values()  # vLLM 0.30 may omit draft layers
    is_mla = not has_draft and all(isinstance(spec, MLAAttentionSpec) for spec in specs)
    return int(parallel.tensor_parallel_size) if is_mla else 1
