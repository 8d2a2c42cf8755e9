"""A gated delta net in float32, token by token, in place of the CPU build's kernel; runs in an engine's process.

vLLM's own takes bfloat16 only, and cuts a prompt where the scheduler does, so that a hit's output differs from a cold one's. This
one does the same arithmetic for a token wherever a step begins. Scheduler, slots, layout and the rest of the model stay vLLM's.
"""

from typing import Any


def exact_delta_net() -> None:
    """Replace the kernel in this process, before the model is built."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    gdn_attention.cpu_gdn_attention_core = _core


def _core(mixed_qkv: "torch.Tensor", b: "torch.Tensor", a: "torch.Tensor", core_attn_out: "torch.Tensor", layer_name: Any) -> None:
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    step: Any = context.attn_metadata[layer.prefix]
    if not step.num_actual_tokens:
        return
    assert step.spec_sequence_masks is None, "no drafts"
    bounds, slots = step.non_spec_query_start_loc.tolist(), step.non_spec_state_indices_tensor.tolist()
    for i in range(step.num_decodes + step.num_prefills):
        begin, end = bounds[i], bounds[i + 1]
        is_new = i >= step.num_decodes and not bool(step.has_initial_state[i])
        convolved = _convolve(layer, slots[i], mixed_qkv[begin:end], is_new)
        core_attn_out[begin:end] = _recur(layer, slots[i], convolved, a[begin:end], b[begin:end], is_new)


def _convolve(layer: Any, slot: int, x: "torch.Tensor", is_new: bool) -> "torch.Tensor":
    """Convolution over time; the state is the input of the last tokens."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    state = layer.kv_cache[0][slot]
    state = state.transpose(0, 1) if is_conv_state_dim_first() else state  # (width - 1, channels)
    weight = layer.conv1d.weight.view(x.shape[1], -1)
    known = torch.zeros_like(state) if is_new else state
    inputs = torch.cat([known, x])
    out = (inputs.unfold(0, weight.shape[1], 1) * weight).sum(-1)
    state.copy_(inputs[-state.shape[0] :])
    return torch.nn.functional.silu(out)


def _recur(layer: Any, slot: int, x: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", is_new: bool) -> "torch.Tensor":
    """The recurrence; the state is one matrix a head, keys by values."""
    state = layer.kv_cache[1][slot]
    state = state.view(state.shape[0], state.shape[2], state.shape[1])
    if is_new:
        state.zero_()
    query, key, value = torch.split(x, [layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    repeat = layer.num_v_heads // layer.num_k_heads
    query, key = (
        _normed(t.view(len(t), layer.num_k_heads, layer.head_k_dim)).repeat_interleave(repeat, dim=1) for t in (query, key)
    )
    query, value = query * layer.head_k_dim**-0.5, value.reshape(len(value), layer.num_v_heads, layer.head_v_dim)
    decay = torch.exp(-torch.exp(layer.A_log) * torch.nn.functional.softplus(a + layer.dt_bias))
    beta, out = torch.sigmoid(b), torch.empty_like(value)
    for t in range(len(value)):
        state *= decay[t, :, None, None]
        missing = (value[t] - torch.einsum("hk,hkv->hv", key[t], state)) * beta[t, :, None]
        state += key[t, :, :, None] * missing[:, None, :]
        out[t] = torch.einsum("hk,hkv->hv", query[t], state)
    return out


def _normed(x: "torch.Tensor") -> "torch.Tensor":
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


try:
    import torch
except ImportError:  # the test's process needs no torch
    pass
