"""Draft models that are correct most of the time by construction, without training.

The target is a Llama whose first layer determines almost all of the output; later layers add
little. At position p, a draft model has token p and its own KV of tokens 1 to p. The draft model
copies the first layer of the target, and therefore computes almost the same result. The less the
later layers of the target add (REST_GAIN), the closer the results. Draft KV matters as much as the
target's KV: if a page is missing, the draft model proposes wrong tokens.
"""

from typing import Any

import numpy as np

from e2e.tiny import HEAD_DIM, HIDDEN, NUM_HEADS, NUM_KV_HEADS, QK_GAIN, VOCAB

from .parts import Heads, Tensors, Weights, config, weights

NUM_LAYERS = 3
REST_GAIN = 0.6
WINDOW, WINDOWS_GAIN = 64, 1.0
EMBED_STD = 0.1
MASK, NUM_COPIES, SHARP, NUM_FAST = 3, HIDDEN // HEAD_DIM, 3.0, 4
"""Parameters of DFlash: the mask token, the number of copying layers, and two parameters that
determine how these layers find the previous position.
"""
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def llama_config(num_layers: int = NUM_LAYERS, **more: Any) -> dict[str, Any]:
    return config("LlamaForCausalLM", "llama", num_hidden_layers=num_layers) | more


def windows_config() -> dict[str, Any]:
    """Return a config with windows in all layers except the first layer, which the draft model
    copies.
    """
    kinds = ["full_attention", *["sliding_attention"] * (NUM_LAYERS - 1)]
    return llama_config(layer_types=kinds, sliding_window=WINDOW)


def qwen3_config() -> dict[str, Any]:
    """Return a config for Qwen3, which normalizes heads in the same way as DFlash's layers."""
    return config("Qwen3ForCausalLM", "qwen3", num_hidden_layers=NUM_LAYERS)


def _target(seed: int, rest_gain: float = REST_GAIN) -> Weights:
    made = weights(seed)
    made.ends(embed_std=EMBED_STD)
    embed = made.tensors["model.embed_tokens.weight"]
    embed *= (
        EMBED_STD * np.sqrt(HIDDEN) / np.linalg.norm(embed, axis=1, keepdims=True)
    )  # rows have equal norms, so EAGLE's norm layer is a constant factor
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm")
        made.attention(at + "self_attn.", Heads() if layer == 0 else Heads(out_gain=rest_gain))
        made.mlp(at + "mlp.")
        if layer:
            made.tensors[at + "mlp.down_proj.weight"] *= rest_gain / 2
    return made


def llama_weights(seed: int = 51) -> Tensors:
    """Return the weights of the target."""
    return _target(seed).tensors


def windows_weights() -> Tensors:
    """Return the target's weights, with sliding-window layers that add more to the output."""
    return _target(51, WINDOWS_GAIN).tensors


def first_layer(target: Tensors, at: str = "") -> Tensors:
    """Return the projections of the target's first layer, named with the prefix ``at``."""
    return {f"{at}{name}.weight": target[f"model.layers.0.{name}.weight"] for name in PROJECTIONS}


def small_config() -> dict[str, Any]:
    """Return the config of a separate draft model: the target's first layer between its embedding
    and head.
    """
    return llama_config(1)


def small_weights() -> Tensors:
    """Return the target's tensors without the later layers."""
    return {
        name: t
        for name, t in llama_weights().items()
        if ".layers." not in name or ".layers.0." in name
    }


def eagle_config() -> dict[str, Any]:
    """Return EAGLE's config: one layer over the embedding and the target's last hidden state."""
    return llama_config(1)


def eagle_weights(target: Tensors | None = None) -> Tensors:
    """Return EAGLE's layer.

    The layer has no first norm, because its embedding is already normalized and its branches are
    scaled accordingly.
    """
    made = first_layer(target or llama_weights(), "layers.0.")
    scale = np.float32(1 / EMBED_STD)
    made["fc.weight"] = np.concatenate(
        [scale * np.eye(HIDDEN, dtype=np.float32), np.zeros((HIDDEN, HIDDEN), np.float32)], axis=1
    )
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        made[f"layers.0.{name}.weight"] = scale * made[f"layers.0.{name}.weight"]
    return made | {"layers.0.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32)}


def eagle3_config() -> dict[str, Any]:
    """Return EAGLE-3's config: attention over the embedding and a mixture of three hidden states of
    the target. EAGLE-3 has a separate head.
    """
    return llama_config(1, draft_vocab_size=VOCAB)


def eagle3_weights(target: Tensors | None = None) -> Tensors:
    """Return EAGLE-3's weights.

    The mixture is almost zero, so the residual stream lacks the embedding. EAGLE-3 is therefore
    slightly less accurate than EAGLE.
    """
    target = target or llama_weights()
    made = first_layer(target, "midlayer.")
    for name in "qkv":
        rows = made[f"midlayer.self_attn.{name}_proj.weight"]
        made[f"midlayer.self_attn.{name}_proj.weight"] = np.concatenate(
            [rows, np.zeros_like(rows)], axis=1
        )
    ones = np.ones(HIDDEN, np.float32)
    made |= {
        f"midlayer.{name}.weight": ones
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    made["fc.weight"] = np.tile(1e-3 * np.eye(HIDDEN, dtype=np.float32), (1, 3))
    return made | {"norm.weight": ones, "lm_head.weight": target["lm_head.weight"]}


def mimo_config() -> dict[str, Any]:
    """Return the config of MiMo, a Qwen2 with a layer that predicts the token after the next token.
    The model type is Qwen2's, because transformers does not contain MiMo and vLLM checks only the
    architecture.
    """
    return config(
        "MiMoForCausalLM",
        "qwen2",
        num_hidden_layers=NUM_LAYERS,
        num_nextn_predict_layers=1,
        use_sliding_window=False,
    )


def mimo_weights(seed: int = 52) -> Tensors:
    """Return the target and a predictor whose embedding norm returns the embedding unchanged."""
    made = _target(seed)
    at = "model.mtp_layers.0."
    made.tensors |= first_layer(made.tensors, at)
    made.norms(
        at, "input_layernorm", "post_attention_layernorm", "final_layernorm", "hidden_layernorm"
    )
    made.norms(at, "token_layernorm", value=EMBED_STD)
    zeros = np.zeros((HIDDEN, HIDDEN), np.float32)
    made.tensors[at + "input_proj.weight"] = np.concatenate(
        [zeros, np.eye(HIDDEN, dtype=np.float32)], axis=1
    )
    for layer in [f"model.layers.{i}." for i in range(NUM_LAYERS)] + [at]:
        for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            made.fill(f"{layer}self_attn.{name}_proj.bias", heads * HEAD_DIM, value=0.0)
    return made.tensors


def _head_norms(at: str, gain: float) -> Tensors:
    return {
        f"{at}self_attn.{name}.weight": np.full(HEAD_DIM, gain, np.float32)
        for name in ("q_norm", "k_norm")
    }


def qwen3_weights() -> Tensors:
    """Return the target's weights. The mask token's embedding is almost zero."""
    made = _target(53, REST_GAIN / 2)
    for layer in range(NUM_LAYERS):
        made.tensors |= _head_norms(f"model.layers.{layer}.", QK_GAIN)
    made.tensors["model.embed_tokens.weight"][MASK] *= 1e-3
    return made.tensors


def dflash_config() -> dict[str, Any]:
    """Return the config of DFlash, in which draft tokens replace masks.

    DFlash computes its prompt KV from the hidden states of the target, which are the embeddings in
    this model.
    """
    return config(
        "DFlashDraftModel", "qwen3", num_hidden_layers=NUM_COPIES + 1, attention_bias=True
    ) | {"dflash_config": {"target_layer_ids": [-1], "mask_token_id": MASK}}


def dflash_weights(target: Tensors | None = None) -> Tensors:
    """Return layers that each copy a part of the preceding embedding to a mask position. The last
    layer is the target's first layer, shifted by one position.
    """
    target, ones = target or qwen3_weights(), np.ones(HIDDEN, np.float32)
    made: Tensors = {
        "fc.weight": np.eye(HIDDEN, dtype=np.float32),
        "hidden_norm.weight": ones,
        "norm.weight": ones,
    }
    for layer in range(NUM_COPIES + 1):
        at = f"layers.{layer}."
        is_copy = layer < NUM_COPIES
        made |= {name: 0 * t if is_copy else t for name, t in first_layer(target, at).items()}
        made |= {
            f"{at}{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")
        }
        made |= _head_norms(at, SHARP if is_copy else QK_GAIN)
        for name, size in (
            ("q", NUM_HEADS),
            ("k", NUM_KV_HEADS),
            ("v", NUM_KV_HEADS),
            ("o", HIDDEN // HEAD_DIM),
        ):
            made[f"{at}self_attn.{name}_proj.bias"] = np.zeros(size * HEAD_DIM, np.float32)
        if is_copy:
            part = np.arange(layer * HEAD_DIM, (layer + 1) * HEAD_DIM)
            made[f"{at}self_attn.v_proj.weight"][np.arange(HEAD_DIM), part] = 1
            made[f"{at}self_attn.o_proj.weight"][part, np.arange(HEAD_DIM)] = EMBED_STD
            near = np.zeros((1, HEAD_DIM), np.float32)
            near[0, :NUM_FAST] = 1
            made[f"{at}self_attn.k_proj.bias"] = near[0]
            made[f"{at}self_attn.q_proj.bias"] = np.tile(_turned(near), NUM_HEADS)[0]
        else:
            heads = made[f"{at}self_attn.q_proj.weight"].reshape(NUM_HEADS, HEAD_DIM, HIDDEN)
            turned = [_turned(head.T).T for head in heads]
            made[f"{at}self_attn.q_proj.weight"] = np.concatenate(turned)
    return made


def _turned(queries: Any) -> Any:
    """Return queries (rows) that match the same keys as ``queries``, but one position later."""
    half = HEAD_DIM // 2
    angles = -(10000.0 ** -(np.arange(half) / half))
    first, second = queries[:, :half], queries[:, half:]
    turned = [
        first * np.cos(angles) - second * np.sin(angles),
        second * np.cos(angles) + first * np.sin(angles),
    ]
    return np.concatenate(turned, axis=1).astype(np.float32)
