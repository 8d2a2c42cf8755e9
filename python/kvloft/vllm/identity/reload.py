"""Which calls to vLLM's workers may replace weights, and whether a reload brings the same ones. It must not know who is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvloft.vllm.identity.weights import Look, engine_start_s, hub_commit, look

RELOAD = "reload_weights"
HARMLESS = frozenset({
    "add_lora", "annotate_profile", "check_health", "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums",
    "determine_available_memory", "execute_dummy_batch", "get_cache_block_size_bytes", "get_compilation_match_table",
    "get_encoder_timing_stats", "get_kv_cache_spec", "get_kv_connector_handshake_metadata", "get_model_inspection",
    "get_simple_cpu_offload_num_cpu_blocks", "get_supported_kv_cache_layouts", "get_supported_tasks",
    "init_weight_transfer_engine", "list_loras", "pin_lora", "profile", "randomize_dummy_inputs",
    "release_late_interaction_query_cache", "remove_lora", "reset_encoder_cache", "reset_mm_cache", "save_sharded_state",
    "save_tensorized_model", "shutdown", "shutdown_weight_transfer_engine", "sleep", "sleep_mode_backend",
    "supports_draft_weight_updates", "synchronize_device", "take_draft_token_ids", "update_max_model_len", "vocab_size", "wake_up",
})  # fmt: skip
"""What vLLM's workers offer that leaves weights and KV alone, read from the sources of 0.30 to 0.33."""
NOT_HARMLESS = frozenset({
    RELOAD, "apply_model", "compile_or_warm_up_model", "discard", "elastic_ep_execute", "execute_model", "finish_weight_update",
    "get_draft_model", "get_model", "handle_ft_command", "init_device", "init_worker", "initialize_from_config", "load_model",
    "reset_weights", "sample_tokens", "set_kv_cache_layout", "start_draft_weight_update", "start_weight_update", "update_config",
    "update_environment_variables", "update_weights",
})  # fmt: skip
"""What replaces weights, writes KV or hands the model out. A name in neither set (a user's code, a newer vLLM) counts as this."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded at the start, as far as it can be seen."""

    model: str
    revision: str | None
    files: Look | None
    commit: str | None
    is_dummy: bool

    @classmethod
    def of(cls, model: Any, load: Any) -> Loaded:
        """From vLLM's ModelConfig and LoadConfig."""
        commit = hub_commit(model.model, model.revision)
        return cls(model.model, model.revision, look(model.model), commit, str(load.load_format) == "dummy")

    def is_there(self) -> bool:
        """Whether a reload brings the same weights."""
        if self.is_dummy:
            return False
        if self.files is None:
            return self.commit is not None and hub_commit(self.model, self.revision) == self.commit
        now = look(self.model)
        return now is not None and now.files == self.files.files and self.files.latest_s <= engine_start_s()


@dataclass(frozen=True, slots=True)
class Replacing:
    """A call that may replace weights. ``is_other``: it brings others; if not, only what is on disk decides."""

    method: str
    is_other: bool


def judge_rpc(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replacing | None:
    """Of a call of collective_rpc(method, timeout, args, kwargs); None where it replaces nothing."""
    given = dict(zip(("method", "timeout", "args", "kwargs"), args, strict=False)) | dict(kwargs)
    method = given.get("method")
    if method == RELOAD:
        return judge_reload(given.get("args") or (), given.get("kwargs") or {})
    return None if isinstance(method, str) and method in HARMLESS else Replacing(str(method), is_other=True)


def judge_reload(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replacing:
    """A reload brings other weights where it is told what to load."""
    return Replacing(RELOAD, is_other=bool(args) or any(value is not None for value in kwargs.values()))
