"""Models with local attention in some layers (Gemma 3 and 4: windows; GPT-OSS: windows with sinks;
Llama 4: chunks) or in every layer (Mistral: windows).

The layer order determines vLLM's groups. Each group has as many layers as the rarest layer kind.
"""

from typing import Any

import numpy as np

from e2e.tiny import FFN, HEAD_DIM, HIDDEN, NUM_HEADS, NUM_KV_HEADS, VOCAB

from .parts import Heads, Tensors, config, weights

WINDOW = 64
CHUNK = 64
THREE_AND_ONE = ("local", "local", "local", "full") * 2
ONE_AND_ONE = ("local", "full") * 2

GEMMA_QK_NORM, GEMMA_BRANCH_NORM = 1.5, 2.0
"""Norm weights for Gemma, whose norms multiply by 1 + weight.

With these weights, attention is sharp and branches outweigh the residual.
"""


def gemma3_config(layers: tuple[str, ...] = THREE_AND_ONE, window: int = WINDOW) -> dict[str, Any]:
    """Return the config of Gemma 3. ``layers`` selects the layers with a window."""
    fields = config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        num_hidden_layers=len(layers),
        layer_types=[
            "sliding_attention" if kind == "local" else "full_attention" for kind in layers
        ],
        sliding_window=window,
        query_pre_attn_scalar=HEAD_DIM,
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=10000.0,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
    )
    return {k: v for k, v in fields.items() if k not in ("hidden_act", "rope_parameters")}


def gemma3_weights(
    seed: int = 21, layers: tuple[str, ...] = THREE_AND_ONE, num_heads: int = NUM_HEADS
) -> Tensors:
    """Return the weights of Gemma 3, which normalizes queries, keys, and the inputs and outputs of
    branches. The output layer uses the weights of the embedding.
    """
    made = weights(seed)
    made.normal("model.embed_tokens.weight", VOCAB, HIDDEN, std=1 / float(np.sqrt(HIDDEN)))
    made.norms("model.", "norm", value=0.0)
    for layer in range(len(layers)):
        at = f"model.layers.{layer}."
        made.norms(at + "self_attn.", "q_norm", "k_norm", width=HEAD_DIM, value=GEMMA_QK_NORM)
        made.norms(at, "input_layernorm", "pre_feedforward_layernorm", value=0.0)
        made.norms(
            at, "post_attention_layernorm", "post_feedforward_layernorm", value=GEMMA_BRANCH_NORM
        )
        made.attention(at + "self_attn.", Heads(num=num_heads, qk_gain=1.0, out_gain=1.0))
        made.mlp(at + "mlp.")
    return made.tensors


GPT_OSS_EXPERTS = 4


def gpt_oss_config(window: int = WINDOW) -> dict[str, Any]:
    """Return the config of GPT-OSS, in which layers alternate between windows and full attention.
    YaRN has no effect, because its factor is 1.
    """
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    return config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_hidden_layers=len(ONE_AND_ONE),
        layer_types=[
            "sliding_attention" if kind == "local" else "full_attention" for kind in ONE_AND_ONE
        ],
        sliding_window=window,
        num_local_experts=GPT_OSS_EXPERTS,
        num_experts_per_tok=2,
        attention_bias=True,
        rope_parameters=yarn | {"original_max_position_embeddings": 4096},
    )


def gpt_oss_weights(seed: int = 22) -> Tensors:
    """Return the weights of GPT-OSS. The experts' weights of each projection are in one tensor."""
    made = weights(seed)
    made.ends()
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    for layer in range(len(ONE_AND_ONE)):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm")
        made.attention(at + "self_attn.")
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads), ("o", HIDDEN)):
            made.fill(f"{at}self_attn.{name}_proj.bias", rows, value=0.0)
        made.fill(at + "self_attn.sinks", NUM_HEADS, value=1.0)
        made.dense(at + "mlp.router", GPT_OSS_EXPERTS, HIDDEN)
        made.fill(at + "mlp.router.bias", GPT_OSS_EXPERTS, value=0.0)
        for name, rows, cols in (("gate_up_proj", HIDDEN, 2 * FFN), ("down_proj", FFN, HIDDEN)):
            made.normal(
                f"{at}mlp.experts.{name}", GPT_OSS_EXPERTS, rows, cols, std=1 / float(np.sqrt(rows))
            )
            made.fill(f"{at}mlp.experts.{name}_bias", GPT_OSS_EXPERTS, cols, value=0.0)
    return made.tensors


def llama4_config(chunk: int = CHUNK) -> dict[str, Any]:
    """Return the config of Llama 4's text model without experts. Three of every four layers attend
    within chunks of ``chunk`` tokens and use position encoding.
    """
    return config(
        "Llama4ForCausalLM",
        "llama4_text",
        num_hidden_layers=len(THREE_AND_ONE),
        layer_types=[
            "chunked_attention" if kind == "local" else "full_attention" for kind in THREE_AND_ONE
        ],
        no_rope_layers=[int(kind == "local") for kind in THREE_AND_ONE],
        attention_chunk_size=chunk,
        intermediate_size_mlp=FFN,
        moe_layers=[],
        interleave_moe_layer_step=0,
        num_local_experts=1,
        use_qk_norm=False,
        attn_temperature_tuning=False,
    )


def llama4_weights(seed: int = 23) -> Tensors:
    """Return the weights of a Llama whose feed-forward layer is named feed_forward."""
    made = weights(seed)
    made.ends()
    for layer in range(len(THREE_AND_ONE)):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm")
        made.attention(at + "self_attn.")
        made.mlp(at + "feed_forward.")
    return made.tensors


MISTRAL_LAYERS = 4


def mistral_config(window: int = WINDOW) -> dict[str, Any]:
    """Return the config of the 2023 Mistral 7B. Every layer has a window, so vLLM creates only one
    sliding-window group.
    """
    return config(
        "MistralForCausalLM", "mistral", num_hidden_layers=MISTRAL_LAYERS, sliding_window=window
    )


def llama_config() -> dict[str, Any]:
    """Return the config of a model that has only full attention."""
    return config("LlamaForCausalLM", "llama", num_hidden_layers=MISTRAL_LAYERS)


def mistral_weights(seed: int = 24) -> Tensors:
    """Return the weights of a Llama."""
    made = weights(seed)
    made.ends()
    for layer in range(MISTRAL_LAYERS):
        at = f"model.layers.{layer}."
        made.norms(at, "input_layernorm", "post_attention_layernorm")
        made.attention(at + "self_attn.")
        made.mlp(at + "mlp.")
    return made.tensors


def gemma4_config(
    window: int = WINDOW, head: int = HEAD_DIM, full_head: int = 2 * HEAD_DIM
) -> dict[str, Any]:
    """Return the config of Gemma 4's text model without experts. By default, full-attention heads
    are wider than window heads, so pages with the same number of tokens would differ in size.
    """
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    fields = config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        num_hidden_layers=len(THREE_AND_ONE),
        layer_types=[
            "sliding_attention" if kind == "local" else "full_attention" for kind in THREE_AND_ONE
        ],
        sliding_window=window,
        head_dim=head,
        global_head_dim=full_head,
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters={"sliding_attention": rope, "full_attention": rope},
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        tie_word_embeddings=True,
    )
    return {k: v for k, v in fields.items() if k != "hidden_act"}


def gemma4_weights(seed: int = 25, head: int = HEAD_DIM, full_head: int = 2 * HEAD_DIM) -> Tensors:
    """Return weights like those of Gemma 3, except that norms multiply by their weight and scores
    are not scaled.
    """
    made = weights(seed)
    made.normal("model.embed_tokens.weight", VOCAB, HIDDEN, std=1 / float(np.sqrt(HIDDEN)))
    made.norms("model.", "norm")
    for layer, kind in enumerate(THREE_AND_ONE):
        at, dim = f"model.layers.{layer}.", head if kind == "local" else full_head
        made.norms(at + "self_attn.", "q_norm", "k_norm", width=dim, value=1.05)
        made.norms(at, "input_layernorm", "pre_feedforward_layernorm")
        made.norms(
            at,
            "post_attention_layernorm",
            "post_feedforward_layernorm",
            value=1 + GEMMA_BRANCH_NORM,
        )
        made.attention(at + "self_attn.", Heads(dim=dim, qk_gain=1.0, out_gain=1.0))
        made.mlp(at + "mlp.")
        made.fill(at + "layer_scalar", 1)
    return made.tensors


WIDE = {"head": 2 * HEAD_DIM, "full_head": HEAD_DIM}
"""As in the large Gemma 4 models, window layers have more bytes per token than full-attention
layers and therefore shorter blocks.
"""


def wide_gemma4_config(window: int = 96) -> dict[str, Any]:
    """Return a config in which a window spans three blocks, or one and a half chunks."""
    return gemma4_config(window, **WIDE)


def wide_gemma4_weights() -> Tensors:
    return gemma4_weights(26, **WIDE)
