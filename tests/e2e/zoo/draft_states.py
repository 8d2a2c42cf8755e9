"""Qwen3-Next with its predictor (MTP): a drafter with KV of its own beside states, right by construction, as in drafts.py.

The target's first layer is of full attention and decides nearly everything, the gated delta nets behind it add to it. The
predictor is a copy of that first layer, experts and all. vLLM keeps both layers in one group and marks it as draft.
"""

from typing import Any

import numpy as np

from e2e.tiny import HEAD_DIM, HIDDEN

from .drafts import EMBED_STD
from .parts import Heads, Tensors, Weights, weights
from .states import QK_NORM, delta_net, qwen3_next_config, qwen_experts

LAYERS = ("full", "state", "state", "state")
STATES_GAIN = 0.18
"""How much a gated delta net adds, of what it does in qwen3-next."""


def qwen3_next_mtp_config() -> dict[str, Any]:
    """Experts in the first layer only: the predictor's is numbered 0, too, and vLLM wants experts in it."""
    return qwen3_next_config(LAYERS, experts_in=0)


def _first_layer(made: Weights, at: str) -> None:
    made.norms(at, "input_layernorm", "post_attention_layernorm", value=0.0)
    made.attention(at + "self_attn.", Heads(gated=True))
    made.norms(at + "self_attn.", "q_norm", "k_norm", width=HEAD_DIM, value=QK_NORM)
    qwen_experts(made, at + "mlp.")


def qwen3_next_mtp_weights(seed: int = 37) -> Tensors:
    """The target, and a predictor whose norm of the embedding gives the embedding back and that hears no hidden state."""
    made = weights(seed)
    made.ends(embed_std=EMBED_STD, one=0.0)
    embed = made.tensors["model.embed_tokens.weight"]
    embed *= EMBED_STD * np.sqrt(HIDDEN) / np.linalg.norm(embed, axis=1, keepdims=True)  # so that a norm is one factor
    first = "model.layers.0."
    _first_layer(made, first)
    for layer in range(1, len(LAYERS)):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm", value=0.0)
        delta_net(made, at + "linear_attn.")
        made.mlp(at + "mlp.")
        for name in ("linear_attn.out_proj", "mlp.down_proj"):
            made.tensors[f"{at}{name}.weight"] *= STATES_GAIN
    at = "mtp.layers.0."
    made.tensors |= {at + name.removeprefix(first): t for name, t in made.tensors.items() if name.startswith(first)}
    made.norms("mtp.", "norm", "pre_fc_norm_hidden", value=0.0)
    made.norms("mtp.", "pre_fc_norm_embedding", value=EMBED_STD - 1)
    made.tensors["mtp.fc.weight"] = np.eye(HIDDEN, 2 * HIDDEN, dtype=np.float32)
    return made.tensors
