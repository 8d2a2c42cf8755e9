"""Building blocks of the zoo's models: random tensors by name, and common config fields.

By default, scales are the same as in ../tiny.py: attention is sharp and outweighs the residual, so
greedy output depends on every page. This module must not import vLLM or kvloft.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from e2e.tiny import (
    EMBED_STD,
    FFN,
    HEAD_DIM,
    HEAD_GAIN,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    OUT_GAIN,
    QK_GAIN,
    VOCAB,
)

MAX_POSITIONS = 4096
Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Heads:
    """An attention layer's sizes and gains.

    If ``gated``, the query projection also contains a gate.
    """

    width: int = HIDDEN
    num: int = NUM_HEADS
    num_kv: int = NUM_KV_HEADS
    dim: int = HEAD_DIM
    qk_gain: float = QK_GAIN
    v_gain: float = 1.0
    out_gain: float = OUT_GAIN
    gated: bool = False


@dataclass(slots=True)
class Weights:
    """Tensors by their Hugging Face names, drawn in the order in which they are requested."""

    rng: np.random.Generator
    tensors: Tensors = field(default_factory=dict)

    def normal(self, name: str, *shape: int, std: float) -> None:
        """Add a tensor of independent normally distributed values."""
        self.tensors[name] = (self.rng.standard_normal(shape) * std).astype(np.float32)

    def dense(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        """Add a projection that multiplies the norm of its input by about ``gain``."""
        self.normal(name + ".weight", rows, cols, std=gain / float(np.sqrt(cols)))

    def fill(self, name: str, *shape: int, value: float = 1.0) -> None:
        self.tensors[name] = np.full(shape, value, dtype=np.float32)

    def norms(self, at: str, *names: str, width: int = HIDDEN, value: float = 1.0) -> None:
        """Add norm weights named ``at`` + name."""
        for name in names:
            self.fill(f"{at}{name}.weight", width, value=value)

    def attention(self, at: str, heads: Heads | None = None) -> None:
        """Add the q, k, v and o projections, with names that start with ``at``."""
        h = heads or Heads()
        self.dense(at + "q_proj", h.num * h.dim * (2 if h.gated else 1), h.width, h.qk_gain)
        self.dense(at + "k_proj", h.num_kv * h.dim, h.width, h.qk_gain)
        self.dense(at + "v_proj", h.num_kv * h.dim, h.width, h.v_gain)
        self.dense(at + "o_proj", h.width, h.num * h.dim, h.out_gain)

    def mlp(self, at: str, ffn: int = FFN, width: int = HIDDEN) -> None:
        """Add the gate, up and down projections, with names that start with ``at``."""
        self.dense(at + "gate_proj", ffn, width)
        self.dense(at + "up_proj", ffn, width)
        self.dense(at + "down_proj", width, ffn)

    def ends(
        self,
        *,
        embed_std: float = EMBED_STD,
        head_gain: float = HEAD_GAIN,
        norm: str = "model.norm",
        one: float = 1.0,
    ) -> None:
        """Add the embedding, the final norm and the head.

        ``one`` is the norm weight that multiplies by one.
        """
        self.normal("model.embed_tokens.weight", VOCAB, HIDDEN, std=embed_std)
        self.fill(norm + ".weight", HIDDEN, value=one)
        self.dense("lm_head", VOCAB, HIDDEN, head_gain)


def weights(seed: int) -> Weights:
    """Return an empty set of tensors with a separate random generator."""
    return Weights(np.random.default_rng(seed))


def config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    """Return the fields of config.json that most families share, plus ``more``."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
    } | more


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write a model's directory and return it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2})
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
