"""Models with a state instead of KV in some layers: Qwen3-Next (gated delta nets) and LFM2
(convolutions). mamba2.py contains more models of this kind.

Each state decays slowly (over a hundred tokens or more), so the start of a prompt still
affects the end of the prompt.
"""

from typing import Any

from e2e.tiny import FFN, HEAD_DIM, HIDDEN

from .parts import Heads, Tensors, Weights, config, weights

LAYERS = ("state", "state", "state", "full")

QWEN_EXPERTS = 2
GDN_KEY_HEADS, GDN_VALUE_HEADS, GDN_DIM, CONV_WIDTH = 1, 2, 32, 4


QK_NORM = 0.6
"""Norm weights for Qwen3-Next, whose norms multiply by 1 + weight."""


def qwen3_next_config(layers: tuple[str, ...] = LAYERS, experts_in: int = -1) -> dict[str, Any]:
    """Return the config of Qwen3-Next, by default with three gated delta nets and one
    full-attention layer.

    One layer, usually the last layer, has experts.
    """
    return config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=len(layers),
        layer_types=[
            "linear_attention" if kind == "state" else "full_attention" for kind in layers
        ],
        mlp_only_layers=[i for i in range(len(layers)) if i != experts_in % len(layers)],
        num_experts=QWEN_EXPERTS,
        num_experts_per_tok=1,
        moe_intermediate_size=FFN,
        shared_expert_intermediate_size=FFN,
        linear_conv_kernel_dim=CONV_WIDTH,
        linear_key_head_dim=GDN_DIM,
        linear_value_head_dim=GDN_DIM,
        linear_num_key_heads=GDN_KEY_HEADS,
        linear_num_value_heads=GDN_VALUE_HEADS,
        partial_rotary_factor=1.0,
    )


def delta_net(made: Weights, at: str) -> None:
    """Add the tensors of a gated delta net, with names that start with ``at``."""
    keys, values = GDN_KEY_HEADS * GDN_DIM, GDN_VALUE_HEADS * GDN_DIM
    made.dense(at + "in_proj_qkvz", 2 * keys + 2 * values, HIDDEN)
    made.dense(at + "in_proj_ba", 2 * GDN_VALUE_HEADS, HIDDEN)
    made.normal(at + "conv1d.weight", 2 * keys + values, 1, CONV_WIDTH, std=0.7)
    made.fill(at + "dt_bias", GDN_VALUE_HEADS, value=-4.0)
    made.fill(at + "A_log", GDN_VALUE_HEADS, value=-1.0)
    made.norms(at, "norm", width=GDN_DIM)
    made.dense(at + "out_proj", HIDDEN, values, 2.0)


def qwen_experts(made: Weights, at: str) -> None:
    """Add the tensors of experts, with names that start with ``at``. One expert is selected per
    token, and one expert is shared.
    """
    made.dense(at + "gate", QWEN_EXPERTS, HIDDEN)
    made.dense(at + "shared_expert_gate", 1, HIDDEN)
    made.mlp(at + "shared_expert.")
    for expert in range(QWEN_EXPERTS):
        made.mlp(f"{at}experts.{expert}.")


def qwen3_next_weights(
    seed: int = 31, layers: tuple[str, ...] = LAYERS, *, all_have_experts: bool = False
) -> Tensors:
    """Return the weights. Norms multiply by 1 + weight, and query projections contain a gate."""
    made = weights(seed)
    made.ends(one=0.0)
    for layer, kind in enumerate(layers):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm", value=0.0)
        if kind == "state":
            delta_net(made, at + "linear_attn.")
        else:
            made.attention(at + "self_attn.", Heads(gated=True))
            made.norms(at + "self_attn.", "q_norm", "k_norm", width=HEAD_DIM, value=QK_NORM)
        if all_have_experts or layer == len(layers) - 1:
            qwen_experts(made, at + "mlp.")
        else:
            made.mlp(at + "mlp.")
    return made.tensors


LFM_WIDTH = 3


def lfm2_config() -> dict[str, Any]:
    """Return the config of LFM2. The state of a layer contains the convolution's inputs for the
    last two tokens.
    """
    return config(
        "Lfm2ForCausalLM",
        "lfm2",
        num_hidden_layers=len(LAYERS),
        layer_types=["conv" if kind == "state" else "full_attention" for kind in LAYERS],
        norm_eps=1e-6,
        conv_L_cache=LFM_WIDTH,
        conv_dim=HIDDEN,
        block_dim=HIDDEN,
        block_auto_adjust_ff_dim=False,
    )


def lfm2_weights(seed: int = 34) -> Tensors:
    """Return the weights. Queries and keys are normalized, feed-forward projections are named w1,
    w2 and w3, and the head is the embedding.
    """
    made = weights(seed)
    made.ends(norm="model.embedding_norm")
    for layer, kind in enumerate(LAYERS):
        at = f"model.layers.{layer}."
        made.norms(at, "operator_norm", "ffn_norm")
        if kind == "state":
            made.dense(at + "conv.in_proj", 3 * HIDDEN, HIDDEN)
            made.normal(at + "conv.conv.weight", HIDDEN, 1, LFM_WIDTH, std=0.7)
            made.dense(
                at + "conv.out_proj", HIDDEN, HIDDEN, 4.0 * (layer + 1)
            )  # each layer outweighs the earlier layers
        else:
            made.attention(at + "self_attn.", Heads(out_gain=12.0))
            made.tensors[at + "self_attn.out_proj.weight"] = made.tensors.pop(
                at + "self_attn.o_proj.weight"
            )
            made.norms(at + "self_attn.", "q_layernorm", "k_layernorm", width=HEAD_DIM, value=1.6)
        for name, rows, cols in (("w1", FFN, HIDDEN), ("w2", HIDDEN, FFN), ("w3", FFN, HIDDEN)):
            made.dense(at + "feed_forward." + name, rows, cols)
    return made.tensors
