"""Qwen3-Next with draft models that have KV and are mostly correct by construction, as in
drafts.py.

The first layer of the target has full attention and determines almost all of the output; the gated
delta nets after this layer add little. The predictor (MTP) is a copy of the first layer, including
the experts. vLLM puts both layers into one group and marks this group as a draft group. Other draft
models copy the first layer of a target in which this layer is equivalent to a Llama layer
(`plain_weights`). For these models, vLLM does not mark a group.
"""

from typing import Any

import numpy as np

from e2e.tiny import HEAD_DIM, HIDDEN, NUM_HEADS, QK_GAIN

from . import drafts
from .drafts import EMBED_STD
from .parts import Heads, Tensors, Weights, weights
from .states import QK_NORM, delta_net, qwen3_next_config, qwen_experts

LAYERS = ("full", "state", "state", "state")
MORE_LAYERS = (*LAYERS, "state", "state")
"""The layers, in an order that puts all full-attention layers into one group.

DFlash has four full-attention layers, which must be in the same group.
"""
STATES_GAIN = 0.18
"""Weight of a gated delta net relative to its weight in qwen3-next."""


def qwen3_next_mtp_config() -> dict[str, Any]:
    """Put experts only into the first layer, because the predictor's layer also has number 0 and
    vLLM expects experts in this layer.
    """
    return qwen3_next_config(LAYERS, experts_in=0)


def _first_layer(made: Weights, at: str) -> None:
    made.norms(at, "input_layernorm", "post_attention_layernorm", value=0.0)
    made.attention(at + "self_attn.", Heads(gated=True))
    made.norms(at + "self_attn.", "q_norm", "k_norm", width=HEAD_DIM, value=QK_NORM)
    qwen_experts(made, at + "mlp.")


def _delta_nets(made: Weights, experts_in: int = 0, num_layers: int = len(LAYERS)) -> None:
    for layer in range(1, num_layers):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm", value=0.0)
        delta_net(made, at + "linear_attn.")
        if layer == experts_in:
            qwen_experts(made, at + "mlp.")
        else:
            made.mlp(at + "mlp.")
        for name, tensor in made.tensors.items():
            if name.startswith(at) and name.endswith(
                ("linear_attn.out_proj.weight", "down_proj.weight")
            ):
                tensor *= STATES_GAIN


def qwen3_next_mtp_weights(seed: int = 37) -> Tensors:
    """Return the target and a predictor that ignores hidden states and whose embedding norm returns
    the embedding unchanged.
    """
    made = weights(seed)
    made.ends(embed_std=EMBED_STD, one=0.0)
    embed = made.tensors["model.embed_tokens.weight"]
    embed *= (
        EMBED_STD * np.sqrt(HIDDEN) / np.linalg.norm(embed, axis=1, keepdims=True)
    )  # rows have equal norms, so a norm layer is a constant factor
    first = "model.layers.0."
    _first_layer(made, first)
    _delta_nets(made)
    at = "mtp.layers.0."
    made.tensors |= {
        at + name.removeprefix(first): t
        for name, t in made.tensors.items()
        if name.startswith(first)
    }
    made.norms("mtp.", "norm", "pre_fc_norm_hidden", value=0.0)
    made.norms("mtp.", "pre_fc_norm_embedding", value=EMBED_STD - 1)
    made.tensors["mtp.fc.weight"] = np.eye(HIDDEN, 2 * HIDDEN, dtype=np.float32)
    return made.tensors


def plain_config(layers: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    """Return a config in which the first layer has neither a gate nor experts."""
    return qwen3_next_config(layers) | {"attn_output_gate": False}


def plain_weights(seed: int = 38, layers: tuple[str, ...] = LAYERS) -> Tensors:
    """Return the target's weights.

    The norms of queries and keys act as constant factors, because each head rotates a third of its
    input and all thirds have equal norms.
    """
    made = weights(seed)
    made.ends(embed_std=EMBED_STD, one=0.0)
    thirds = made.tensors["model.embed_tokens.weight"].reshape(-1, HIDDEN // HEAD_DIM, HEAD_DIM)
    thirds *= EMBED_STD * np.sqrt(HEAD_DIM) / np.linalg.norm(thirds, axis=2, keepdims=True)
    made.tensors["model.embed_tokens.weight"][drafts.MASK] *= 1e-3
    at = "model.layers.0."
    made.norms(at, "input_layernorm", "post_attention_layernorm", value=0.0)
    made.attention(at + "self_attn.")
    made.norms(at + "self_attn.", "q_norm", "k_norm", width=HEAD_DIM, value=QK_GAIN - 1)
    for name, num_heads in (("q", NUM_HEADS), ("k", 1)):
        made.tensors[f"{at}self_attn.{name}_proj.weight"] = _turning(made.rng, num_heads)
    made.mlp(at + "mlp.")
    _delta_nets(made, len(layers) - 1, len(layers))
    return made.tensors


def _turning(rng: np.random.Generator, num_heads: int) -> Any:
    """Return heads that each rotate and scale up a third of the input."""
    made = np.zeros((num_heads, HEAD_DIM, HIDDEN), np.float32)
    for nth, head in enumerate(made):
        turn, _ = np.linalg.qr(rng.standard_normal((HEAD_DIM, HEAD_DIM)))
        head[:, nth * HEAD_DIM : (nth + 1) * HEAD_DIM] = QK_GAIN * turn
    return made.reshape(-1, HIDDEN)


def small_weights() -> Tensors:
    """Return a Llama with one layer between the target's embedding and head."""
    target = plain_weights()
    ends = {name: target[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = (
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    )
    ones = {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    return ends | ones | drafts.first_layer(target, "model.layers.0.")


def eagle_weights() -> Tensors:
    """Return EAGLE's layer for this target."""
    return drafts.eagle_weights(plain_weights())


def eagle3_config() -> dict[str, Any]:
    """Return EAGLE-3's config with explicit layers, because vLLM's default picks three distinct
    layers only in larger models.
    """
    return drafts.eagle3_config() | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def eagle3_weights() -> Tensors:
    """Return EAGLE-3's layer for this target."""
    return drafts.eagle3_weights(plain_weights())


def long_config() -> dict[str, Any]:
    """Return the config of DFlash's target."""
    return plain_config(MORE_LAYERS)


def long_weights() -> Tensors:
    """Return the weights of DFlash's target."""
    return plain_weights(layers=MORE_LAYERS)


def dflash_weights() -> Tensors:
    """Return DFlash's weights for this target."""
    return drafts.dflash_weights(long_weights())
