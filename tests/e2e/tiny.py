"""Generates a small Llama with random weights, LoRA adapters and a tokenizer with one token per
word.

The weights are scaled so that greedy output depends on the whole prompt through attention. A random
model with the usual scales repeats its last token, which would hide a wrong KV page. test_tiny.py
checks the dependence on the prompt. This module must not import vLLM or kvloft.
"""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HIDDEN = 96
HEAD_DIM = 32
NUM_HEADS = 3
NUM_KV_HEADS = 1
NUM_LAYERS = 3
FFN = 128
VOCAB = 512
SEED = 20

EMBED_STD = 0.5
QK_GAIN = 1.6
OUT_GAIN = 4.0
HEAD_GAIN = 3.0


def config(
    max_positions: int = 4096, num_heads: int = NUM_HEADS, num_kv_heads: int = NUM_KV_HEADS
) -> dict[str, object]:
    """Return the model's config.json, in the format of transformers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def weights(
    seed: int = SEED, num_heads: int = NUM_HEADS, num_kv_heads: int = NUM_KV_HEADS
) -> dict[str, NDArray[np.float32]]:
    """Return all tensors in float32, keyed by their Hugging Face names."""
    rng = np.random.default_rng(seed)

    def dense(rows: int, cols: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) * (gain / np.sqrt(cols))).astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": (rng.standard_normal((VOCAB, HIDDEN)) * EMBED_STD).astype(
            np.float32
        )
    }
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": ones,
            at + "post_attention_layernorm.weight": ones,
            at + "self_attn.q_proj.weight": dense(num_heads * HEAD_DIM, HIDDEN, QK_GAIN),
            at + "self_attn.k_proj.weight": dense(num_kv_heads * HEAD_DIM, HIDDEN, QK_GAIN),
            at + "self_attn.v_proj.weight": dense(num_kv_heads * HEAD_DIM, HIDDEN),
            at + "self_attn.o_proj.weight": dense(HIDDEN, num_heads * HEAD_DIM, OUT_GAIN),
            at + "mlp.gate_proj.weight": dense(FFN, HIDDEN),
            at + "mlp.up_proj.weight": dense(FFN, HIDDEN),
            at + "mlp.down_proj.weight": dense(HIDDEN, FFN),
        }
    return tensors | {"model.norm.weight": ones, "lm_head.weight": dense(VOCAB, HIDDEN, HEAD_GAIN)}


def embedding_rows(token_ids: list[int], seed: int = SEED) -> NDArray[np.float32]:
    """Return the embedding rows that the model would look up.

    As a prompt, these rows give the same result as the token ids.
    """
    return weights(seed)["model.embed_tokens.weight"][token_ids]


def write_model(
    folder: Path,
    *,
    seed: int = SEED,
    tokenizer: bool = True,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
) -> Path:
    """Write config, weights and, for HTTP tests, a tokenizer to ``folder``; return ``folder``."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(config(num_heads=num_heads, num_kv_heads=num_kv_heads), indent=1)
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2})
    )
    save_file(
        weights(seed, num_heads, num_kv_heads),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    if tokenizer:
        _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer in which the word ``w17`` is token 17.

    Reading the tokenizer requires a library, but writing it does not.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    special = [
        {
            "id": i,
            "content": t,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for t, i in list(vocab.items())[:3]
    ]
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "model_max_length": 4096,
                "clean_up_tokenization_spaces": False,
            }
        )
    )


def write_lora(folder: Path, *, seed: int, rank: int = 8) -> Path:
    """Write a random adapter for q, k, v and o of every layer. The adapter is strong enough to
    change the output.
    """
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    sizes = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": HIDDEN}
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer in range(NUM_LAYERS):
        for name, rows in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            cols = heads if name == "o_proj" else HIDDEN
            tensors[at + "lora_A.weight"] = (
                rng.standard_normal((rank, cols)) / np.sqrt(cols)
            ).astype(np.float32)
            tensors[at + "lora_B.weight"] = (
                rng.standard_normal((rows, rank)) / np.sqrt(rank)
            ).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": rank,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": list(sizes),
                "base_model_name_or_path": "tiny",
                "fan_in_fan_out": False,
                "inference_mode": True,
                "modules_to_save": None,
                "layers_to_transform": None,
                "use_rslora": False,
                "use_dora": False,
            }
        )
    )
    return folder
