"""Weights replaced in a running engine: what it computes from then on is not its namespace's, so nothing is cached any more.

vLLM asks no connector before ``reload_weights``, so its own methods are wrapped, once a process: the engine's call to its workers,
for the scheduler half to offer nothing, and the worker's method, for the worker half to move nothing. A reload of the same files as
at the start (as after level-2 sleep) changes nothing. Trainers that write into the model themselves are known by their settings and
have namespaces of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kvloft.vllm.weights import engine_start_s, look

logger = logging.getLogger("vllm.kvloft")

METHOD = "reload_weights"
_REASON = f"its weights were replaced by {METHOD}"


class Stops(Protocol):
    """One half of kvloft, which does what it does until it is told not to."""

    def stop(self, reason: str) -> None: ...


_models: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Whom to stop in this process, and the model that each has a namespace for."""


def stop_worker_when_reloaded(core: Stops, model: str, worker: Any = None) -> None:
    """Have ``core.stop()`` called before other weights than ``model``'s are loaded, for as long as ``core`` lives.

    ``worker`` is vLLM's class of workers (None) or a test's.
    """
    if worker is None:
        try:
            from vllm.v1.worker.gpu_worker import Worker
        except ImportError:  # another platform's: its weights cannot be replaced so
            return
        worker = Worker
    _models[core] = model
    method = getattr(worker, METHOD, None)
    if method is None or hasattr(method, "kvloft_stops"):
        return

    @wraps(method)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        _stop_all(args, kwargs)
        return method(self, *args, **kwargs)

    reload_weights.kvloft_stops = True  # type: ignore[attr-defined]
    worker.reload_weights = reload_weights


def stop_scheduler_when_reloaded(half: Stops, model: str, engine: Any = None) -> None:
    """As `stop_worker_when_reloaded`, when vLLM's engine core (None: its class) is asked to have its workers do it."""
    if engine is None:
        from vllm.v1.engine.core import EngineCore

        engine = EngineCore
    _models[half] = model
    call = getattr(engine, "collective_rpc", None)
    if call is None or hasattr(call, "kvloft_stops"):
        return

    @wraps(call)
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        if method == METHOD:
            _stop_all(args, kwargs or {})
        return call(self, method, timeout, args, kwargs, **more)

    collective_rpc.kvloft_stops = True  # type: ignore[attr-defined]
    engine.collective_rpc = collective_rpc


def _stop_all(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Stop everything here that knows another model than what a reload with these arguments leaves."""
    is_other = bool(args) or any(value is not None for value in kwargs.values())
    for half, model in list(_models.items()):
        try:
            files = look(model)
            if is_other or (files is not None and files.latest_s > engine_start_s()):
                half.stop(_REASON)
        except Exception:
            logger.exception("kvloft: could not be stopped before weights are replaced")
