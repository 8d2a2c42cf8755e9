"""DeepSeek-V2 without experts. Its multi-head latent attention has one latent vector and one
rotated key per token for all heads.

The CPU kernel supports only 512 latent values and 64 rotated values, in blocks of 16 tokens.
"""

from typing import Any

from e2e.tiny import HIDDEN, NUM_HEADS, OUT_GAIN, QK_GAIN

from .parts import Tensors, config, weights

LATENT, ROTATED, PLAIN, VALUE, NUM_LAYERS = 512, 64, 32, 32, 2


def deepseek_v2_config() -> dict[str, Any]:
    """Return a config in which queries are projected directly from the hidden state.

    Each layer has a dense feed-forward network.
    """
    fields = config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        num_hidden_layers=NUM_LAYERS,
        num_key_value_heads=NUM_HEADS,
        first_k_dense_replace=NUM_LAYERS,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_nope_head_dim=PLAIN,
        qk_rope_head_dim=ROTATED,
        v_head_dim=VALUE,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=HIDDEN,
    )
    del fields["head_dim"]
    return fields


def deepseek_v2_weights(seed: int = 41) -> Tensors:
    """Return the weights. A cache block contains the output of ``kv_a_proj_with_mqa`` for its
    tokens, with normalized latent vectors.
    """
    made = weights(seed)
    made.ends()
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm")
        made.dense(at + "self_attn.q_proj", NUM_HEADS * (PLAIN + ROTATED), HIDDEN, QK_GAIN)
        made.dense(at + "self_attn.kv_a_proj_with_mqa", LATENT + ROTATED, HIDDEN, QK_GAIN)
        made.norms(at + "self_attn.", "kv_a_layernorm", width=LATENT)
        made.dense(at + "self_attn.kv_b_proj", NUM_HEADS * (PLAIN + VALUE), LATENT, QK_GAIN)
        made.dense(at + "self_attn.o_proj", HIDDEN, NUM_HEADS * VALUE, OUT_GAIN)
        made.mlp(at + "mlp.")
    return made.tensors
