"""Weights replaced in a running engine: what it computes from then on is not its namespace's, so nothing is cached any more.

vLLM asks no connector before it replaces weights, so its own methods are wrapped, once a process: the engine core's calls to its
workers, for the scheduler half to offer nothing, and the worker's ``reload_weights``, for the worker half to move nothing. A reload
of the same files as at the start (as after level-2 sleep) changes nothing. It must not know the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from kvloft.vllm.identity.weights import Look, engine_start_s, hub_commit, look

logger = logging.getLogger("vllm.kvloft")

METHOD = "reload_weights"
HARMLESS = frozenset({
    "add_lora", "remove_lora", "list_loras", "pin_lora", "sleep", "wake_up", "profile", "check_health", "get_kv_cache_spec",
    "get_kv_connector_handshake_metadata", "reset_mm_cache", "reset_encoder_cache", "reset_prefix_cache", "save_sharded_state",
    "save_tensorized_model", "get_model_info", "get_cache_block_size_bytes", "determine_available_memory",
})  # fmt: skip
"""Methods of vLLM's workers that leave weights alone. What a user calls besides (code of their own, too) may not."""


class Half(Protocol):
    """One half of kvloft."""

    def stop(self, reason: str) -> None:
        """Offer, save and move nothing from now on."""
        ...


class Names(Protocol):
    """Tells adapters apart by what it saw first."""

    def identify(self, lora: Any) -> object: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was loaded at the start, as far as it can be seen."""

    model: str
    revision: str | None
    files: Look | None
    commit: str | None
    is_dummy: bool

    @classmethod
    def of(cls, model: Any, load: Any) -> _Loaded:
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


_loaded: WeakKeyDictionary[Any, _Loaded] = WeakKeyDictionary()
"""Whom to stop in this process, and what each has a namespace for."""
_names: WeakSet[Any] = WeakSet()


def stop_worker_when_reloaded(core: Half, model: Any, load: Any, worker: Any = None) -> None:
    """Have ``core.stop()`` called when other weights are loaded than at the start, for as long as ``core`` lives.

    ``model`` and ``load`` are vLLM's ModelConfig and LoadConfig; ``worker`` is its class of workers (None) or a test's.
    """
    if worker is None:
        try:
            from vllm.v1.worker.gpu_worker import Worker
        except ImportError:  # another platform's: its weights cannot be replaced so
            return
        worker = Worker
    _loaded[core] = _Loaded.of(model, load)
    _wrap(worker, METHOD, _is_other)


def stop_scheduler_when_reloaded(half: Half, model: Any, load: Any, engine: Any = None) -> None:
    """As `stop_worker_when_reloaded`, when vLLM's engine core (None: its class) is asked for what may replace weights."""
    if engine is None:
        from vllm.v1.engine.core import EngineCore

        engine = EngineCore
    _loaded[half] = _Loaded.of(model, load)
    _wrap(engine, "collective_rpc", _may_replace)


def see_adapters_before_they_load(names: Names, engine: Any = None) -> None:
    """Have ``names.identify`` called before vLLM's engine core (None: its class) loads an adapter that no request asked for yet."""
    if engine is None:
        from vllm.v1.engine.core import EngineCore

        engine = EngineCore
    _names.add(names)
    method = getattr(engine, "add_lora", None)
    if method is None or hasattr(method, "kvloft_sees"):
        return

    @wraps(method)
    def add_lora(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        for each in list(_names):
            try:
                each.identify(lora_request)
            except Exception:
                logger.exception("kvloft: an adapter cannot be looked at before it is loaded")
        return method(self, lora_request, *args, **kwargs)

    add_lora.kvloft_sees = True  # type: ignore[attr-defined]
    engine.add_lora = add_lora


def _may_replace(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool | None:
    """Of a call of collective_rpc(method, timeout, args, kwargs)."""
    given = dict(zip(("method", "timeout", "args", "kwargs"), args, strict=False)) | dict(kwargs)
    method = given.get("method")
    if method == METHOD:
        return _is_other(given.get("args") or (), given.get("kwargs") or {})
    return None if isinstance(method, str) and method in HARMLESS else True


def _is_other(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a reload is told where its weights are."""
    return bool(args) or any(value is not None for value in kwargs.values())


def _wrap(owner: Any, name: str, judge: Callable[[Sequence[Any], Mapping[str, Any]], bool | None]) -> None:
    """``judge`` says of a call: True, it brings other weights; False, only if what is on disk is another; None, none at all."""
    method = getattr(owner, name, None)
    if method is None or hasattr(method, "kvloft_stops"):
        return

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_other = judge(args, kwargs)
        if is_other is not None:
            _stop_where(is_other=is_other)
        try:
            return method(self, *args, **kwargs)
        finally:
            if is_other is not None:  # a hub's newer commit is seen now
                _stop_where(is_other=is_other)

    wrapped.kvloft_stops = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _stop_where(*, is_other: bool) -> None:
    for half, loaded in list(_loaded.items()):
        try:
            if is_other or not loaded.is_there():
                half.stop("its weights were replaced, or may have been")
        except Exception:
            logger.exception("kvloft: could not be stopped before weights are replaced")
