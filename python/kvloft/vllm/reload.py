"""Weights replaced in a running engine: what it computes from then on is not its namespace's, so nothing is cached any more.

vLLM asks no connector before ``reload_weights``, so the worker's own method is wrapped, once a process. A reload of the same files
as at the start (as after level-2 sleep) changes nothing. Trainers that write into the model themselves are known by their settings
and have namespaces of their own.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kvloft.vllm.weights import engine_start_s, look

logger = logging.getLogger("vllm.kvloft")


class Stops(Protocol):
    """Something that moves pages until it is told not to."""

    def stop(self, reason: str) -> None: ...


_models: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def stop_when_reloaded(core: Stops, model: str, worker: Any = None) -> None:
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
    method = getattr(worker, "reload_weights", None)
    if method is not None and not hasattr(method, "kvloft_stops"):
        worker.reload_weights = _stopping(method)


def _stopping(method: Any) -> Any:
    @wraps(method)
    def reload_weights(*args: Any, **kwargs: Any) -> Any:
        is_other = len(args) > 1 or any(value is not None for value in kwargs.values())  # args[0] is the worker
        for core, model in list(_models.items()):
            try:
                files = look(model)
                if is_other or (files is not None and files.latest_s > engine_start_s()):
                    core.stop("its weights were replaced by reload_weights")
            except Exception:
                logger.exception("kvloft: copies could not be stopped before weights are replaced")
        return method(*args, **kwargs)

    reload_weights.kvloft_stops = True  # type: ignore[attr-defined]
    return reload_weights
