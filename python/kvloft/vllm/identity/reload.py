"""Detects calls that may replace the weights in vLLM's workers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvloft.vllm.identity.weights import engine_start_s, hub_commit, look

RELOAD = "reload_weights"
_HARMLESS = """
    annotate_profile check_health checkpoint_prepare checkpoint_restore
    compute_weight_checksums determine_available_memory execute_dummy_batch
    get_cache_block_size_bytes get_compilation_match_table get_encoder_timing_stats
    get_kv_cache_spec get_kv_connector_handshake_metadata get_model_inspection
    get_simple_cpu_offload_num_cpu_blocks get_supported_kv_cache_layouts get_supported_tasks
    init_weight_transfer_engine list_loras pin_lora profile randomize_dummy_inputs
    release_late_interaction_query_cache reset_encoder_cache reset_mm_cache
    save_sharded_state save_tensorized_model shutdown shutdown_weight_transfer_engine
    sleep_mode_backend supports_draft_weight_updates synchronize_device take_draft_token_ids
    update_max_model_len vocab_size wake_up
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Worker methods in vLLM 0.30 to 0.33 that do not change weights or KV. Sleep and LoRA methods are
not listed, because kvloft handles only the engine's own calls to them.
"""


class WeightsWatch:
    """Observes calls that may replace weights, and calls ``stop(reason)`` if the weights may have
    changed since startup.

    ``model`` and ``load`` are vLLM's ModelConfig and LoadConfig. ``is_of`` returns False for
    another engine in this process.
    """

    def __init__(
        self,
        model: Any,
        load: Any,
        stop: Callable[[str], None],
        is_of: Callable[[Any], bool] = lambda _engine: True,
    ) -> None:
        self._name, self._stop, self._is_of = (model.model, model.revision), stop, is_of
        self._is_dummy = str(load.load_format) == "dummy"
        self._files, self._commit = look(model.model), hub_commit(*self._name)

    def hear_rpc(self, engine: Any, /, *args: Any, **kwargs: Any) -> Callable[[], None] | None:
        """Handle a call to the engine core's collective_rpc(method, timeout, args, kwargs)."""
        if not self._is_of(engine):
            return None
        given = dict(zip(("method", "timeout", "args", "kwargs"), args, strict=False)) | kwargs
        method = given.get("method")
        if method == RELOAD:
            is_other = _names_weights(given.get("args") or (), given.get("kwargs") or {})
            return self._check(RELOAD, is_other=is_other)
        if not can_load_weights(method):
            return None
        return self._check(str(method), is_other=True)

    def hear_reload(self, _worker: Any, /, *args: Any, **kwargs: Any) -> Callable[[], None]:
        """Handle a reload_weights call from code inside a worker."""
        return self._check(RELOAD, is_other=_names_weights(args, kwargs))

    def _check(self, method: str, *, is_other: bool) -> Callable[[], None]:
        """Check the weights before a call, and return a function that checks them after the call.

        The second check detects a call that loaded a newer commit of the model.
        """

        def look_again() -> None:
            try:
                is_same = not is_other and self._are_there()
            except (OSError, RuntimeError, ValueError):  # the weights may have changed
                is_same = False
            if not is_same:
                self._stop(f"{method} may have replaced the weights")

        look_again()
        return look_again

    def _are_there(self) -> bool:
        """Return True if a reload would load the same weights."""
        if self._is_dummy:
            return False
        if self._files is None:
            return self._commit is not None and hub_commit(*self._name) == self._commit
        now = look(self._name[0])
        is_unchanged = now is not None and now.files == self._files.files
        return is_unchanged and self._files.latest_s <= engine_start_s()


def can_load_weights(method: object) -> bool:
    """Return False if ``method`` (a name or a function) is a name in `HARMLESS`."""
    return not (isinstance(method, str) and method in HARMLESS)


def _names_weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a reload's arguments specify weights. Otherwise, vLLM reloads the model's own
    files.
    """
    return bool(args) or any(value is not None for value in kwargs.values())
