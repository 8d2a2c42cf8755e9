"""The zoo: each model with its engine arguments and the groups that vLLM 0.32.0 creates for it.

The tests run the models of ``ZOO`` that `chosen` returns.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import draft_states, drafts, latent, mamba2, states, windows
from .parts import Tensors, write

Config = Callable[[], dict[str, Any]]
Make = Callable[[], Tensors]


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafting method.

    ``files`` selects the model directory in vLLM's speculative config: "draft", "target", or empty
    for none.
    """

    method: str
    num_tokens: int
    files: str = ""
    config: Config | None = None
    weights: Make | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    layer: str = ""
    """Part of each draft layer's name that no other layer's name contains.

    Empty if the draft model has no KV.
    """


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model. ``kinds`` lists its groups in vLLM's order, named as in probe.groups."""

    name: str
    config: Config
    weights: Make
    kinds: tuple[str, ...]
    hit_tokens: int = 32
    """Hits in vLLM's own cache are multiples of this number of tokens."""
    arguments: dict[str, Any] = field(default_factory=dict)
    prepare: str = ""
    """Name of the function in kernels.py that the engine process calls first."""
    draft: Draft | None = None
    kv_groups: str = "all"
    """The value of kvloft's setting `kv_groups`."""
    alone: bool = False
    """True if vLLM's CPU build gives a different output in a batch, even without any cache.

    Requests then run one at a time.
    """

    def write(self, folder: Path) -> Path:
        """Write the files of the model and its draft model, and return the model's directory."""
        if self.draft and self.draft.config and self.draft.weights:
            write(folder / "draft", self.draft.config(), self.draft.weights())
        return write(folder / "model", self.config(), self.weights())

    def plain(self) -> dict[str, Any]:
        """Return the arguments of the reference engine, which has no cache and no draft model."""
        return SMALL | {k: v for k, v in self.arguments.items() if k != "mamba_cache_mode"}

    def engine(self, folder: Path) -> dict[str, Any]:
        """Return the arguments of an engine with vLLM's prefix cache and the draft model, for the
        model in ``folder``.
        """
        arguments = SMALL | {"enable_prefix_caching": True} | self.arguments
        if self.draft is None:
            return arguments
        files = {"draft": folder.parent / "draft", "target": folder}
        speculative = {
            "method": self.draft.method,
            "num_speculative_tokens": self.draft.num_tokens,
        } | self.draft.settings
        return arguments | {
            "speculative_config": speculative
            | ({"model": str(files[self.draft.files])} if self.draft.files else {})
        }

    def own_hit(self, num_tokens: int) -> int:
        """Return the number of tokens that vLLM's own prefix cache finds when a prompt is repeated
        immediately.
        """
        whole = (num_tokens - 1) // self.hit_tokens * self.hit_tokens
        return (
            max(0, whole - self.hit_tokens)
            if self.drops_a_block
            else whole
            if self.is_cached_by_vllm
            else 0
        )

    @property
    def drops_a_block(self) -> bool:
        """True if vLLM drops the last block of a hit, because the block's draft KV depends on the
        next token.
        """
        return self.draft is not None and self.draft.method in ("eagle", "eagle3", "mtp", "dflash")

    @property
    def is_cached_by_vllm(self) -> bool:
        """True if vLLM's own prefix cache supports the model.

        On CPUs, vLLM disables its prefix cache for latent attention.
        """
        return "latent" not in self.kinds

    def target_layers(self, layers: list[str]) -> list[str]:
        """Return the ``layers`` that do not belong to the draft model."""
        return [
            name
            for name in layers
            if not (self.draft and self.draft.layer and self.draft.layer in name)
        ]


SMALL: dict[str, Any] = {"num_blocks": 300, "max_model_len": 1024, "enable_prompt_embeds": False}
STATES = {"mamba_cache_mode": "align"}
NGRAM = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
LLAMA = (drafts.llama_config, drafts.llama_weights, ("full",))
WINDOWS = (drafts.windows_config, drafts.windows_weights)
AFTER = f".layers.{drafts.NUM_LAYERS}."
"""Part of the name of a draft layer that is numbered after the target's layers."""
READER = f".layers.{drafts.NUM_LAYERS + drafts.NUM_COPIES}."
"""The DFlash layer that reads the prompt."""
DRAFT_LAYER = f".layers.{len(draft_states.LAYERS)}."
"""The draft layer after a target with Mamba states."""
NUM_LONG_LAYERS = len(draft_states.MORE_LAYERS) + drafts.NUM_COPIES
THREE_STATES = (*("state (align)",) * 3, "full")
TWO_STATES = ("full", *("state (align)",) * 2)
DELTA_NET = (64, STATES, "exact_delta_net")
MAMBA2 = (THREE_STATES, 64, STATES, "mamba2_checkpoints")
QWEN3_NEXT = (states.qwen3_next_config, states.qwen3_next_weights, THREE_STATES, *DELTA_NET)
FROM_TOKENS = Draft("ngram", 3, settings=NGRAM)
EAGLE = Draft("eagle", 3, "draft", drafts.eagle_config, drafts.eagle_weights, layer=AFTER)
EAGLE3 = Draft("eagle3", 3, "draft", drafts.eagle3_config, drafts.eagle3_weights, layer=AFTER)
DFLASH = Draft("dflash", 3, "draft", drafts.dflash_config, drafts.dflash_weights, layer=READER)
SMALLER = Draft(
    "draft_model", 3, "draft", drafts.small_config, drafts.small_weights, layer="draft_model."
)
LATENT = {"block_size": 16, "max_num_batched_tokens": 2048}

ZOO = {
    model.name: model
    for model in (
        ZooModel(
            "gemma3", windows.gemma3_config, windows.gemma3_weights, (*("window 64",) * 3, "full")
        ),
        ZooModel("gpt-oss", windows.gpt_oss_config, windows.gpt_oss_weights, ("window 64", "full")),
        ZooModel(
            "llama4", windows.llama4_config, windows.llama4_weights, (*("chunk 64",) * 3, "full")
        ),
        ZooModel(
            "gemma4",
            windows.gemma4_config,
            windows.gemma4_weights,
            (*("window 64",) * 3, "full"),
            64,
        ),
        ZooModel(
            "gemma4-wide",
            windows.wide_gemma4_config,
            windows.wide_gemma4_weights,
            (*("window 96",) * 3, "full"),
            64,
        ),
        ZooModel("llama", windows.llama_config, windows.mistral_weights, ("full",)),
        ZooModel("mistral", windows.mistral_config, windows.mistral_weights, ("window 64",)),
        ZooModel("qwen3-next", *QWEN3_NEXT),
        ZooModel("granite4", mamba2.granite4_config, mamba2.granite4_weights, *MAMBA2),
        ZooModel("nemotron-h", mamba2.nemotron_h_config, mamba2.nemotron_h_weights, *MAMBA2),
        ZooModel(
            "falcon-h1",
            mamba2.falcon_h1_config,
            mamba2.falcon_h1_weights,
            ("full", "state (align)"),
            *MAMBA2[1:],
        ),
        ZooModel(
            "lfm2", states.lfm2_config, states.lfm2_weights, THREE_STATES, 32, STATES, alone=True
        ),
        ZooModel(
            "deepseek-v2",
            latent.deepseek_v2_config,
            latent.deepseek_v2_weights,
            ("latent",),
            16,
            LATENT,
            alone=True,
        ),
        ZooModel("ngram", *LLAMA, draft=FROM_TOKENS),
        ZooModel("draft-model", *LLAMA, draft=SMALLER),
        ZooModel("eagle", *LLAMA, draft=EAGLE),
        ZooModel("eagle3", *LLAMA, draft=EAGLE3),
        ZooModel("ngram-states", *QWEN3_NEXT, FROM_TOKENS),
        ZooModel(
            "ngram-mamba2",
            mamba2.granite4_config,
            mamba2.granite4_weights,
            THREE_STATES,
            96,
            STATES,
            "mamba2_checkpoints",
            FROM_TOKENS,
        ),
        ZooModel(
            "mtp-states",
            draft_states.qwen3_next_mtp_config,
            draft_states.qwen3_next_mtp_weights,
            TWO_STATES,
            *DELTA_NET,
            Draft("mtp", 2, "target", layer="mtp."),
        ),
        *(
            ZooModel(
                f"{name}-states",
                draft_states.plain_config,
                draft_states.plain_weights,
                TWO_STATES,
                *DELTA_NET,
                draft,
            )
            for name, draft in (
                ("draft-model", replace(SMALLER, weights=draft_states.small_weights)),
                ("eagle", replace(EAGLE, weights=draft_states.eagle_weights, layer=DRAFT_LAYER)),
                (
                    "eagle3",
                    replace(
                        EAGLE3,
                        config=draft_states.eagle3_config,
                        weights=draft_states.eagle3_weights,
                        layer=DRAFT_LAYER,
                    ),
                ),
            )
        ),
        ZooModel(
            "dflash-states",
            draft_states.long_config,
            draft_states.long_weights,
            ("full", "state (align)"),
            64,
            STATES,
            "delta_net_and_masks",
            replace(
                DFLASH, weights=draft_states.dflash_weights, layer=f".layers.{NUM_LONG_LAYERS}."
            ),
        ),
        ZooModel("ngram-windows", *WINDOWS, ("full", *("window 64",) * 2), draft=FROM_TOKENS),
        ZooModel("eagle-windows", *WINDOWS, ("full", "window 64"), draft=EAGLE),
        ZooModel(
            "dflash",
            drafts.qwen3_config,
            drafts.qwen3_weights,
            ("full",),
            prepare="masks_to_guess",
            draft=DFLASH,
        ),
        ZooModel(
            "mtp",
            drafts.mimo_config,
            drafts.mimo_weights,
            ("full",),
            draft=Draft("mtp", 1, "target", layer=AFTER),
        ),
    )
}

USUAL = ("gemma3",)
"""The models that test_zoo.py runs by default. KV_ZOO=all runs all models."""
RARE = frozenset(
    (
        "dflash-states",
        "draft-model-states",
        "gemma4-wide",
        "nemotron-h",
        "ngram",
        "ngram-states",
        "ngram-windows",
    )
)
"""Models that test_checks.py skips unless KV_ZOO=all is set. Each is similar to a model that it
always checks.
"""
IS_WHOLE = os.environ.get("KV_ZOO") == "all"


def chosen() -> list[str]:
    """Return the names of the models to test: the usual models or, with KV_ZOO=all, all models."""
    return sorted(ZOO if IS_WHOLE else USUAL)
