"""Provides kernels that DFlash requires but the CPU build lacks: a Triton kernel that arranges the
draft tokens of a step, and a kernel that computes the norms of multiple layers in one call.

The replacements take the same arguments and write the same results as the original kernels. vLLM's
surrounding code is unchanged.
"""

from typing import Any

import torch


def masks_to_guess() -> None:
    """Make vLLM's DFlash proposer work on CPUs."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.spec_decode import dflash

    dflash._copy_and_expand_dflash_inputs = _Expand()
    DFlashQwen3Model._normalize_context_k = _normed


class _Expand:
    """Replaces copy_and_expand_dflash_inputs_kernel."""

    def register_warmup(self, **_constants: Any) -> None:
        """Do nothing, because there is nothing to compile."""

    def __call__(self, **named: Any) -> None:
        bounds, num_queries, num_drafts = (
            named["query_start_loc_ptr"],
            named["num_query_per_req"],
            named["num_speculative_tokens"],
        )
        positions, table, block = (
            named["target_positions_ptr"],
            named["block_table_ptr"],
            named["block_size"],
        )
        rejected = (
            named["num_rejected_tokens_ptr"]
            if named["has_num_rejected"]
            else torch.zeros(len(bounds), dtype=torch.int32)
        )

        def slots(of: int, at: torch.Tensor) -> torch.Tensor:
            column = (at // block).clamp(max=named["block_table_stride"] - 1)
            return table[of, column].long() * block + at % block

        for i in range(len(bounds) - 1):
            first, last = int(bounds[i]), int(bounds[i + 1])
            known = positions[first:last]
            named["out_context_positions_ptr"][first:last] = known
            named["out_context_slot_mapping_ptr"][first:last] = slots(i, known)
            guessed = positions[last - 1 - int(rejected[i])] + 1 + torch.arange(num_queries)
            own = slice(i * num_queries, (i + 1) * num_queries)
            named["out_query_positions_ptr"][own] = guessed
            named["out_query_slot_mapping_ptr"][own] = slots(i, guessed)
            named["out_input_ids_ptr"][own] = named["parallel_drafting_token_id"]
            named["out_input_ids_ptr"][own.start] = named["next_token_ids_ptr"][i]
            asked = torch.arange(own.start + 1, own.stop, dtype=torch.int32)
            named["out_token_indices_ptr"][i * num_drafts : (i + 1) * num_drafts] = asked


def _normed(self: Any, keys: torch.Tensor) -> torch.Tensor:
    """Normalize ``keys`` (layers, tokens, heads, width) with each layer's weights."""
    size = keys.square().mean(-1, keepdim=True) + self._rms_norm_eps
    return keys * torch.rsqrt(size) * self._k_norm_weights[:, None, None]
