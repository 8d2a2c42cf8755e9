"""Tests sliding-window layers in a full-attention group, with a small random Gemma 3. kvloft
supports this configuration because vLLM keeps the KV of every token.

With a connector that supports only one block table per request, vLLM puts all layers into one
full-attention group, and only the computation uses windows. If vLLM freed blocks outside the
window, kvloft would save and load the content of reused blocks.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from . import tiny
from .client import Engine, Req, Zygote, engine_kwargs, full_blocks, kvloft, random_ids
from .conftest import Truth

WINDOW = 40
LAYERS = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
QK_NORM, BRANCH_NORM = 1.5, 2.0
"""Norm weights for Gemma, whose norms multiply by 1 + weight.

With these weights, attention is sharp and branches outweigh the residual.
"""
PROMPTS = [Req(random_ids(9000 + i, 150 + 23 * i), max_tokens=12) for i in range(6)]


def gemma_config() -> dict[str, object]:
    """Return config.json; ``layer_types`` selects the layers with a window."""
    same = (
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    same += (
        "num_attention_heads",
        "num_key_value_heads",
        "attention_bias",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    base = tiny.config()
    return {name: base[name] for name in (*same, "torch_dtype", "dtype")} | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": len(LAYERS),
        "layer_types": LAYERS,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": tiny.HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    }


def gemma_weights(seed: int = 21) -> dict[str, NDArray[np.float32]]:
    """Return all tensors in float32, keyed by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = tiny.NUM_HEADS * tiny.HEAD_DIM, tiny.NUM_KV_HEADS * tiny.HEAD_DIM

    def dense(rows: int, cols: int, std: float) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) * std).astype(np.float32)

    def norm(size: int, gain: float = 0.0) -> NDArray[np.float32]:
        return np.full(size, gain, dtype=np.float32)

    width = tiny.HIDDEN
    tensors = {
        "model.embed_tokens.weight": dense(tiny.VOCAB, width, 1 / np.sqrt(width)),
        "model.norm.weight": norm(width),
    }
    for layer in range(len(LAYERS)):
        at = f"model.layers.{layer}."
        tensors |= {
            at + f"self_attn.{name}_norm.weight": norm(tiny.HEAD_DIM, QK_NORM) for name in "qk"
        }
        tensors |= {
            at + f"{name}_layernorm.weight": norm(width) for name in ("input", "pre_feedforward")
        }
        tensors |= {
            at + f"post_{name}_layernorm.weight": norm(width, BRANCH_NORM)
            for name in ("attention", "feedforward")
        }
        sizes = {
            "self_attn.q": (heads, width),
            "self_attn.k": (kv_heads, width),
            "self_attn.v": (kv_heads, width),
        }
        sizes |= {
            "self_attn.o": (width, heads),
            "mlp.gate": (tiny.FFN, width),
            "mlp.up": (tiny.FFN, width),
            "mlp.down": (width, tiny.FFN),
        }
        tensors |= {
            at + f"{name}_proj.weight": dense(*size, 1 / np.sqrt(size[1]))
            for name, size in sizes.items()
        }
    return tensors


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("gemma")
    (folder / "config.json").write_text(json.dumps(gemma_config(), indent=1))
    save_file(gemma_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def arguments(**more: Any) -> dict[str, Any]:
    return {"num_blocks": 300, "max_model_len": 512, "enable_prompt_embeds": False} | more


@pytest.fixture(scope="module")
def gemma_truth(zygote: Zygote, gemma: Path) -> Iterator[Truth]:
    """Return the outputs without a connector. vLLM then uses its hybrid KV cache manager, which
    reuses blocks outside the window.
    """
    oracle = Truth(lambda: zygote.engine(engine_kwargs(gemma, **arguments())))
    yield oracle
    oracle.close()


def ask_all(truth: Truth, engine: Engine) -> int:
    """Run every prompt, check its tokens, and return the number of external tokens."""
    results = engine.ask(*[p.again() for p in PROMPTS])
    assert [r.tokens for r in results] == [truth.tokens(p) for p in PROMPTS]
    return sum(r.num_external for r in results)


def test_tokens_depend_on_kv_inside_and_before_windows(gemma_truth: Truth) -> None:
    prompt = PROMPTS[0].ids or ()
    for first in (0, 64, len(prompt) - WINDOW):
        changed = (*prompt[:first], *random_ids(9100 + first, 32), *prompt[first + 32 :])
        assert (
            gemma_truth.tokens(Req(changed, max_tokens=12))[:4]
            != gemma_truth.tokens(PROMPTS[0])[:4]
        ), f"the output does not depend on {first}"


def test_windows_with_full_attention_answer_equally_cold_warm_and_after_a_restart(
    gemma_truth: Truth, gemma: Path, start: Callable[..., Engine], tmp_path: Path
) -> None:
    plain = start(model=gemma, **arguments(disable_hybrid_kv_cache_manager=True))
    assert [r.tokens for r in plain.ask(*[p.again() for p in PROMPTS])] == [
        gemma_truth.tokens(p) for p in PROMPTS
    ]
    plain.kill()
    settings = arguments(
        kv_transfer_config=kvloft(tmp_path, kv_groups="one"), enable_prefix_caching=True
    )
    full = sum(full_blocks(p.num_prompt_tokens) for p in PROMPTS)
    engine = start(model=gemma, **settings)
    assert "Hybrid KV cache manager is disabled for this hybrid model" in engine.log.read_text(), (
        "the windows have too little effect"
    )
    assert ask_all(gemma_truth, engine) == 0
    assert engine.reset()
    assert ask_all(gemma_truth, engine) == full
    engine.stop()
    again = start(model=gemma, **settings)
    assert ask_all(gemma_truth, again) == full
    metrics = again.metrics()
    assert metrics["vllm:kvloft_load_tokens_disk_total"] == full
    assert (
        metrics["vllm:kvloft_hook_errors_total"] + metrics["vllm:kvloft_verify_failures_total"] == 0
    )
    again.assert_at_rest()
