"""Inspects an engine from inside its process: the groups, the blocks of a hit, and the effect of
damaging a page.

Each public function is called as ``function(llm_engine, **arguments)`` and returns JSON.
"""

from typing import Any

Kind = str


def groups(llm: Any) -> dict[str, Any]:
    """Return vLLM's KV cache config: one entry per group in vLLM's order, and the common fields."""
    scheduler = llm.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    manager = scheduler.kv_cache_manager
    return {
        "groups": [_group(g) for g in config.kv_cache_groups],
        "num_blocks": config.num_blocks,
        "hash_tokens": config.hash_block_size or scheduler.block_size,
        "hit_tokens": config.cache_hit_alignment_tokens or scheduler.block_size,
        "scheduler_block_tokens": scheduler.block_size,
        "coordinator": type(manager.coordinator).__name__,
        "layout": config.kv_cache_layout,
        "tensors": len(config.kv_cache_tensors),
        "eagle_groups": sorted(getattr(manager.coordinator, "eagle_group_ids", ())),
    }


def _group(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    one = next(iter(specs.values())) if specs else spec
    return {
        "kind": _kind(one),
        "block_tokens": spec.block_size,
        "layers": list(group.layer_names),
        "page_bytes": one.page_size_bytes,
        "used_bytes": one.real_page_size_bytes,
        "is_draft": group.is_eagle_group,
    }


def _kind(spec: Any) -> Kind:
    if hasattr(spec, "mamba_type"):
        return f"state ({spec.mamba_cache_mode})"
    if getattr(spec, "attention_chunk_size", None):
        return f"chunk {spec.attention_chunk_size}"
    if getattr(spec, "sliding_window", None):
        return f"window {spec.sliding_window}"
    return "latent" if "MLA" in type(spec).__name__ else "full"


def hit(llm: Any, ids: list[int]) -> dict[str, Any]:
    """Return the hit of a prompt in vLLM's own prefix cache: the number of tokens, and the block
    ids of each group (0 for blocks that are not needed).
    """
    scheduler = llm.engine_core.engine_core.scheduler
    blocks, num_tokens, _ = scheduler.kv_cache_manager.get_computed_blocks(_request(llm, ids))
    null = scheduler.kv_cache_manager.block_pool.null_block.block_id
    return {
        "tokens": num_tokens,
        "blocks": [[0 if b == null else b for b in group] for group in blocks.get_block_ids()],
    }


def tables(llm: Any) -> list[list[int]]:
    """Return the block ids of the only running request by group (0 for unneeded blocks)."""
    manager = llm.engine_core.engine_core.scheduler.kv_cache_manager
    (request,) = llm.engine_core.engine_core.scheduler.running
    return [list(blocks) for blocks in manager.get_block_ids(request.request_id)]


def _request(llm: Any, ids: list[int]) -> Any:
    from vllm.v1.request import Request

    from vllm import SamplingParams

    core = llm.engine_core.engine_core
    params = SamplingParams(temperature=0.0, max_tokens=1)
    return Request(
        request_id="probe",
        prompt_token_ids=ids,
        sampling_params=params,
        pooling_params=None,
        block_hasher=core.request_block_hasher,
    )


def damage(llm: Any, group: int, block: int, layers: list[str] | None = None, seed: int = 0) -> int:
    """Overwrite a page of a group in all its layers, or in ``layers``, with values of similar
    magnitude. Return the number of values overwritten.
    """
    return sum(llm.collective_rpc(_damage, args=(group, block, layers, seed)))


def _damage(worker: Any, group: int, block: int, layers: list[str] | None, seed: int) -> int:
    import torch

    runner = worker.model_runner
    chance = torch.Generator().manual_seed(seed)
    changed = 0
    for name in layers or runner.kv_cache_config.kv_cache_groups[group].layer_names:
        cache = runner.compilation_config.static_forward_context[name].kv_cache
        for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
            assert tensor.shape[0] == runner.kv_cache_config.num_blocks, (
                f"{name}: {tuple(tensor.shape)}"
            )
            page = tensor[block]
            size = float(page.float().square().mean().sqrt())
            page.copy_(torch.randn(page.shape, generator=chance) * size)
            changed += page.numel() if size else 0
    return changed
