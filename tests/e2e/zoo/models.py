"""The zoo: each model with the engine arguments that it needs and the groups that vLLM 0.32.0 makes of it.

``ZOO`` is what the tests go through; README.md tells what is not in it and why.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import drafts, latent, states, windows
from .parts import Tensors, write

Config = Callable[[], dict[str, Any]]
Make = Callable[[], Tensors]


@dataclass(frozen=True, slots=True)
class Draft:
    """How an engine guesses tokens ahead; without ``config`` there is no model to it but the target's own files."""

    method: str
    num_tokens: int
    config: Config | None = None
    weights: Make | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    """Names of the layers whose KV is the drafter's."""


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model. ``kinds`` are its groups, in vLLM's order, as probe.groups names them."""

    name: str
    config: Config
    weights: Make
    kinds: tuple[str, ...]
    hit_tokens: int = 32
    """A hit of vLLM's own cache is a multiple of it."""
    arguments: dict[str, Any] = field(default_factory=dict)
    prepare: str = ""
    """Function of kernels.py that the engine's process calls first."""
    draft: Draft | None = None

    def write(self, folder: Path) -> Path:
        """Write the model's files, and the drafter's beside them; returns the model's folder."""
        if self.draft and self.draft.config and self.draft.weights:
            write(folder / "draft", self.draft.config(), self.draft.weights())
        return write(folder / "model", self.config(), self.weights())

    def engine(self, folder: Path, *, drafting: bool = True) -> dict[str, Any]:
        """Arguments of an engine for the model in ``folder``."""
        if not (self.draft and drafting):
            return dict(self.arguments)
        model = folder.parent / "draft" if self.draft.config else folder if self.draft.method == "mtp" else None
        speculative = {"method": self.draft.method, "num_speculative_tokens": self.draft.num_tokens} | self.draft.settings
        return self.arguments | {"speculative_config": speculative | ({"model": str(model)} if model else {})}


STATES = {"mamba_cache_mode": "align"}
LAYER = "model.layers.{}.self_attn.attn"
NGRAM = {"prompt_lookup_max": 2, "prompt_lookup_min": 1}
LLAMA = (drafts.llama_config, drafts.llama_weights, ("full",))

ZOO = {
    model.name: model
    for model in (
        ZooModel("gemma3", windows.gemma3_config, windows.gemma3_weights, ("full", *("window 64",) * 3)),
        ZooModel("gpt-oss", windows.gpt_oss_config, windows.gpt_oss_weights, ("full", "window 64")),
        ZooModel("llama4", windows.llama4_config, windows.llama4_weights, ("full", *("chunk 64",) * 3)),
        ZooModel(
            "qwen3-next",
            states.qwen3_next_config,
            states.qwen3_next_weights,
            ("full", *("state (align)",) * 3),
            64,
            STATES,
            "exact_delta_net",
        ),
        ZooModel("granite4", states.granite4_config, states.granite4_weights, ("full", *("state (align)",) * 3), 64, STATES),
        ZooModel("nemotron-h", states.nemotron_h_config, states.nemotron_h_weights, ("full", *("state (align)",) * 3), 64, STATES),
        ZooModel("lfm2", states.lfm2_config, states.lfm2_weights, ("full", *("state (align)",) * 3), 32, STATES),
        ZooModel("deepseek-v2", latent.deepseek_v2_config, latent.deepseek_v2_weights, ("latent",), 16, {"block_size": 16}),
        ZooModel("ngram", *LLAMA, draft=Draft("ngram", 3, settings=NGRAM)),
        ZooModel("draft-model", *LLAMA, draft=Draft("draft_model", 3, drafts.small_config, drafts.small_weights)),
        ZooModel("eagle", *LLAMA, draft=Draft("eagle", 3, drafts.eagle_config, drafts.eagle_weights)),
        ZooModel("eagle3", *LLAMA, draft=Draft("eagle3", 3, drafts.eagle3_config, drafts.eagle3_weights)),
        ZooModel("mtp", drafts.mimo_config, drafts.mimo_weights, ("full",), draft=Draft("mtp", 1)),
    )
}
