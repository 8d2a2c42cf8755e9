"""Model architectures for the engine benchmarks. Most have the dimensions of published models.

This module does not import torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Llama 3.1 8B, the base of all shapes."""
DRAFT = {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
"""An EAGLE draft model for `LLAMA`."""


def gemma3(num_layers: int) -> dict[str, Any]:
    """Gemma 3 4B: five of every six layers have a sliding window of 1,024 tokens."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "layer_types": [
            "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(num_layers)
        ],
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": None,
        "mlp_bias": None,
    }


def qwen35(num_layers: int) -> dict[str, Any]:
    """Qwen 3.5 9B: three of every four layers are gated delta nets."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "intermediate_size": 12288,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "rope_theta": None,
        "mlp_bias": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        "layer_types": [
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)
        ],
    }


def gemma4(num_layers: int) -> dict[str, Any]:
    """The Gemma 4 text model without experts.

    The model is like Gemma 3, but the heads of its full-attention layers are twice as wide, so
    block sizes differ between groups.
    """
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    return gemma3(num_layers) | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "global_head_dim": 512,
        "rope_theta": None,
        "rope_local_base_freq": None,
        "query_pre_attn_scalar": None,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
    }


def tiny_gdn(num_layers: int) -> dict[str, Any]:
    """A small Qwen 3.5 that starts in seconds and has blocks of about a hundred tokens."""
    small = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return qwen35(num_layers) | small | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


def tiny_gdn_mtp(num_layers: int) -> dict[str, Any]:
    """Like `tiny_gdn`, but with an MTP layer, whose KV is in a draft group."""
    return tiny_gdn(num_layers) | {"mtp_num_hidden_layers": 1}


def tiny_mla(num_layers: int) -> dict[str, Any]:
    """A small DeepSeek V3 with few experts and a latent of 576 values per token and layer."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "mlp_bias": None,
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """A model architecture.

    ``changes`` returns the config values that differ from `LLAMA`. ``llm`` holds vLLM's settings
    for the model, and ``drafts`` holds the speculative decoding method and the number of draft
    tokens.
    """

    num_layers: int
    changes: Callable[[int], Mapping[str, Any]]
    llm: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, Any] = field(default_factory=dict)


TRITON_GDN = {"additional_config": {"gdn_prefill_backend": "triton"}}
"""Settings for the Triton prefill backend, because flashinfer is not always installed."""
NO_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}
"""Disables CUDA graphs, which would keep using the weights that `sharpen` replaces."""
SHAPES = {
    "llama": Shape(32, lambda num_layers: {"num_hidden_layers": num_layers}),
    "eagle": Shape(
        32,
        lambda num_layers: {"num_hidden_layers": num_layers},
        {},
        {"method": "eagle", "num_speculative_tokens": 2},
    ),
    "gemma3": Shape(34, gemma3),
    "gemma4": Shape(12, gemma4, {"attention_backend": "TRITON_ATTN"}),
    "qwen35": Shape(32, qwen35, TRITON_GDN),
    "tiny-mla": Shape(
        4, tiny_mla, {"attention_backend": "TRITON_MLA", "enforce_eager": True, **NO_GRAPHS}
    ),
    "tiny-gdn": Shape(8, tiny_gdn, TRITON_GDN),
    "tiny-gdn-mtp": Shape(
        8, tiny_gdn_mtp, TRITON_GDN, {"method": "mtp", "num_speculative_tokens": 2}
    ),
}
"""Shapes by `--model` name. A head size of 512 requires Triton attention or FlashAttention 4."""


def options_of(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """Return a shape's engine options: model, vLLM settings and speculative decoding."""
    shape = SHAPES[name]
    model = dict(shape.changes(num_layers or shape.num_layers))
    return {"model": model, "llm": dict(shape.llm), "drafts": dict(shape.drafts)}


def config_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json: `LLAMA` with ``changes``. None removes a field."""
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
