"""Replaces the CPU build's kernels for Mamba states and gated delta nets. The functions are called
in the engine process before the model is built.

vLLM's CPU kernel for gated delta nets supports only bfloat16 and is not exact: the output after a
hit differs from the output after a miss. vLLM's CPU scan for Mamba2 returns only the last state,
but prefix caching needs a state inside the prompt, which a Triton kernel stores on GPUs. The
replacements do the same arithmetic in float32, and a step can start at any token. vLLM still
handles everything else, such as scheduling, slots and layout.
"""

from typing import Any

import torch

from .dflash_kernels import masks_to_guess as masks_to_guess
from .draft_kernels import (
    Row,
    drafted_convolutions,
    drafted_scans,
    moved_states,
    rows,
    well_read_ngram,
)
from .held import held_forwards as held_forwards


def exact_delta_net() -> None:
    """Compute gated delta nets in float32, token by token."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    def core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        _delta_net(mixed_qkv, b, a, core_attn_out, layer_name)

    gdn_attention.cpu_gdn_attention_core = core
    _drafts()


def delta_net_and_masks() -> None:
    """Apply the replacements for gated delta nets and for DFlash."""
    exact_delta_net()
    masks_to_guess()


def _drafts() -> None:
    moved_states()
    well_read_ngram()


def _delta_net(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    step: Any = context.attn_metadata[layer.prefix]
    if not step.num_actual_tokens:
        return
    for tokens, row in rows(step):
        convolved = _convolve(layer, row, mixed_qkv[tokens])
        core_attn_out[tokens] = _recur(layer, row, convolved, a[tokens], b[tokens])


def _convolve(layer: Any, row: Row, x: Any) -> Any:
    """Compute the convolution over time.

    The state contains the inputs of the last tokens. With draft tokens, it also contains the inputs
    of all tokens that can be rejected.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    state = layer.kv_cache[0][row.slots[0]]
    state = (
        state.transpose(0, 1) if is_conv_state_dim_first() else state
    )  # (width - 1 + drafts, channels)
    weight = layer.conv1d.weight.view(x.shape[1], -1)
    before = state[row.rejected_from : row.rejected_from + weight.shape[1] - 1]
    inputs = torch.cat([torch.zeros_like(before) if row.is_new else before, x])
    out = (inputs.unfold(0, weight.shape[1], 1) * weight).sum(-1)
    kept = inputs[1:] if row.is_drafted else inputs[len(x) :]
    state[: len(kept)] = kept
    return torch.nn.functional.silu(out)


def _recur(layer: Any, row: Row, x: Any, a: Any, b: Any) -> Any:
    """Compute the recurrence.

    The state is one matrix (keys by values) per head. With draft tokens, the state after each token
    has a separate slot.
    """
    states = layer.kv_cache[1]
    states = states.view(states.shape[0], states.shape[1], states.shape[3], states.shape[2])
    state = states[row.slots[row.rejected_from]].clone()
    if row.is_new:
        state.zero_()
    query, key, value = torch.split(x, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    repeat = layer.num_v_heads // layer.num_k_heads
    query, key = (
        _normed(t.view(len(t), layer.num_k_heads, layer.head_k_dim)).repeat_interleave(
            repeat, dim=1
        )
        for t in (query, key)
    )
    query, value = (
        query * layer.head_k_dim**-0.5,
        value.reshape(len(value), layer.num_v_heads, layer.head_v_dim),
    )
    decay = torch.exp(-torch.exp(layer.A_log) * torch.nn.functional.softplus(a + layer.dt_bias))
    beta, out = torch.sigmoid(b), torch.empty_like(value)
    for t in range(len(value)):
        state *= decay[t, :, None, None]
        missing = (value[t] - torch.einsum("hk,hkv->hv", key[t], state)) * beta[t, :, None]
        state += key[t, :, :, None] * missing[:, None, :]
        out[t] = torch.einsum("hk,hkv->hv", query[t], state)
        if row.is_drafted:
            states[row.slots[t]] = state
    if not row.is_drafted:
        states[row.slots[0]] = state
    return out


def _normed(x: Any) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def mamba2_checkpoints() -> None:
    """Make Mamba2 layers keep the state after the last full block of a prompt, as on GPUs."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    scan = ssd_combined._mamba_chunk_scan_combined_fwd

    def scan_by_chunks(
        x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, out: Any, **more: Any
    ) -> Any:
        if not more.pop("return_intermediate_states", False):
            return scan(x, dt, A, B, C, chunk_size, out, **more)
        bounds, owners, initial = (
            more["cu_chunk_seqlens"].tolist(),
            more["seq_idx"].tolist(),
            more["initial_states"],
        )
        states: list[Any] = []
        for i, owner in enumerate(owners):
            s = slice(bounds[i], bounds[i + 1])
            known = (
                states[-1]
                if i and owners[i - 1] == owner
                else None
                if initial is None
                else initial[owner : owner + 1]
            )
            own = more | {
                "initial_states": known,
                "cu_seqlens": torch.tensor([0, s.stop - s.start], dtype=torch.int32),
            }
            states.append(scan(x[s], dt[s], A, B[s], C[s], chunk_size, out[s], **own))
        return torch.cat(states)

    ssd_combined._mamba_chunk_scan_combined_fwd = scan_by_chunks
    mamba_mixer2.store_prefill_checkpoint = _store_checkpoint
    drafted_convolutions()
    drafted_scans()
    _drafts()


def _store_checkpoint(
    checkpoint: Any,
    chunk: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    starts: Any,
    *,
    state_len: int,
) -> None:
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if not offset:
            continue
        slot, end = int(checkpoint.state_indices[row]), int(starts[row]) + offset
        assert offset >= state_len, "the checkpoint is too close to the start of the step"
        conv_state[slot, :, :state_len] = x[:, end - state_len : end]
        ssm_state[slot] = chunk_states[int(chunk[row])]
