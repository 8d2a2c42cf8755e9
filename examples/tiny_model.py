"""Generates a small Llama with random weights, so that an engine can run without a download.

A random model with the usual weight scales repeats its last token, which would hide wrong KV. With
the weight scales in this module, greedy output depends on the whole prompt through attention. This
module uses neither vLLM nor kvloft.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions.

    With the defaults, a prefill takes noticeable time on a CPU (about 0.1 GFLOP per token).
    """

    hidden: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 1408
    vocab: int = 2048
    max_positions: int = 8192


def write_model(folder: Path, shape: Shape = Shape(), seed: int = 1) -> Path:
    """Write config.json and float32 weights in Hugging Face format, and return ``folder``."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1))
    save_file(weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config(shape: Shape) -> dict[str, object]:
    """Return the contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def weights(shape: Shape, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return all tensors, keyed by their Hugging Face names."""
    rng = np.random.default_rng(seed)

    def dense(rows: int, cols: int, gain: float = 1.0) -> NDArray[np.float32]:
        return rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(
            gain / np.sqrt(cols)
        )

    ones = np.ones(shape.hidden, dtype=np.float32)
    num_q, num_kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal(
            (shape.vocab, shape.hidden), dtype=np.float32
        )
        / 2
    }
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": ones,
            at + "post_attention_layernorm.weight": ones,
            at + "self_attn.q_proj.weight": dense(num_q, shape.hidden, 1.6),
            at + "self_attn.k_proj.weight": dense(num_kv, shape.hidden, 1.6),
            at + "self_attn.v_proj.weight": dense(num_kv, shape.hidden),
            at + "self_attn.o_proj.weight": dense(shape.hidden, num_q, 4.0),
            at + "mlp.gate_proj.weight": dense(shape.ffn, shape.hidden),
            at + "mlp.up_proj.weight": dense(shape.ffn, shape.hidden),
            at + "mlp.down_proj.weight": dense(shape.hidden, shape.ffn),
        }
    return tensors | {
        "model.norm.weight": ones,
        "lm_head.weight": dense(shape.vocab, shape.hidden, 3.0),
    }
