"""Models with Mamba2 layers: Granite 4 hybrid, Nemotron-H, and Falcon-H1, which has a state and KV
in every layer.

Each state decays slowly (over a hundred tokens or more), so the start of a prompt still
affects the end of the prompt.
"""

from typing import Any

import numpy as np

from e2e.tiny import FFN, HEAD_DIM, HIDDEN, NUM_HEADS

from .parts import Heads, Tensors, Weights, config, weights
from .states import CONV_WIDTH, LAYERS

MAMBA_HEADS, MAMBA_DIM, MAMBA_STATE = 6, 32, 16
"""The number of heads times the dimension is twice the hidden size."""
STATE: dict[str, Any] = {
    "mamba_n_heads": MAMBA_HEADS,
    "mamba_d_head": MAMBA_DIM,
    "mamba_d_state": MAMBA_STATE,
    "mamba_d_conv": CONV_WIDTH,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
}
"""Settings of the state, named as in Granite and Falcon."""


def _mamba2(made: Weights, at: str, *, norm: bool = True) -> None:
    inner = MAMBA_HEADS * MAMBA_DIM
    made.dense(at + "in_proj", 2 * inner + 2 * MAMBA_STATE + MAMBA_HEADS, HIDDEN)
    made.normal(at + "conv1d.weight", inner + 2 * MAMBA_STATE, 1, CONV_WIDTH, std=0.7)
    made.fill(at + "conv1d.bias", inner + 2 * MAMBA_STATE, value=0.0)
    made.fill(at + "dt_bias", MAMBA_HEADS, value=-3.0)
    made.tensors[at + "A_log"] = np.linspace(-2.0, 0.0, MAMBA_HEADS, dtype=np.float32)
    made.fill(at + "D", MAMBA_HEADS, value=0.1)
    if norm:
        made.norms(at, "norm", width=inner)
    made.dense(at + "out_proj", HIDDEN, inner, 2.0)


def granite4_config() -> dict[str, Any]:
    """Return the config of Granite 4 hybrid without experts."""
    return config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        num_hidden_layers=len(LAYERS),
        layer_types=[
            "linear_attention" if kind == "state" else "full_attention" for kind in LAYERS
        ],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=FFN,
        attention_multiplier=float(HEAD_DIM**-0.5),
        position_embedding_type="rope",
        **STATE,
    )


def granite4_weights(seed: int = 32) -> Tensors:
    """Return the weights. Gate and up projections of a feed-forward layer share one tensor."""
    made = weights(seed)
    made.ends()
    for layer, kind in enumerate(LAYERS):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm")
        if kind == "state":
            _mamba2(made, at + "mamba.")
        else:
            made.attention(at + "self_attn.")
        made.dense(at + "shared_mlp.input_linear", 2 * FFN, HIDDEN)
        made.dense(at + "shared_mlp.output_linear", HIDDEN, FFN)
    return made.tensors


NEMOTRON_LAYERS = "M-M-M*-"


def nemotron_h_config() -> dict[str, Any]:
    """Return Nemotron-H's config. Each layer is Mamba2 (M), attention (*) or feed-forward (-)."""
    return config(
        "NemotronHForCausalLM",
        "nemotron_h",
        hybrid_override_pattern=NEMOTRON_LAYERS,
        num_hidden_layers=len(NEMOTRON_LAYERS),
        layer_norm_epsilon=1e-6,
        ssm_state_size=MAMBA_STATE,
        mamba_num_heads=MAMBA_HEADS,
        mamba_head_dim=MAMBA_DIM,
        n_groups=1,
        conv_kernel=CONV_WIDTH,
        chunk_size=64,
    )


def nemotron_h_weights(seed: int = 33) -> Tensors:
    """Return the weights with Nemotron-H's names: backbone, mixer and norm_f."""
    made = weights(seed)
    made.ends(norm="backbone.norm_f")
    made.tensors["backbone.embeddings.weight"] = made.tensors.pop("model.embed_tokens.weight")
    for layer, kind in enumerate(NEMOTRON_LAYERS):
        at = f"backbone.layers.{layer}."
        made.norms(at, "norm")
        if kind == "M":
            _mamba2(made, at + "mixer.")
        elif kind == "*":
            made.attention(at + "mixer.")
        else:
            made.dense(at + "mixer.up_proj", FFN, HIDDEN)
            made.dense(at + "mixer.down_proj", HIDDEN, FFN)
    return made.tensors


FALCON_LAYERS = 2


def falcon_h1_config() -> dict[str, Any]:
    """Return the config of Falcon-H1. Each layer adds the outputs of attention and Mamba2 for the
    same input. Mamba2 has no inner norm.
    """
    return config(
        "FalconH1ForCausalLM",
        "falcon_h1",
        num_hidden_layers=FALCON_LAYERS,
        mamba_d_ssm=MAMBA_HEADS * MAMBA_DIM,
        **STATE,
    )


def falcon_h1_weights(seed: int = 35) -> Tensors:
    """Return the weights. Attention weights are in self_attn, and state weights are in mamba."""
    made = weights(seed)
    made.ends(norm="model.final_layernorm")
    for layer in range(FALCON_LAYERS):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "pre_ff_layernorm")
        made.attention(
            at + "self_attn.", Heads(out_gain=8.0)
        )  # with this gain, attention outweighs the state to which it is added
        _mamba2(made, at + "mamba.", norm=False)
        made.mlp(at + "feed_forward.")
    return made.tensors


assert NUM_HEADS * HEAD_DIM == HIDDEN, "Granite has no head_dim setting"
