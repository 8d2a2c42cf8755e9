"""Wraps vLLM methods that have no connector hook, so that kvloft's listeners see calls to them.

A vLLM release without such a method loses a guarantee. Each table entry names the lost guarantee
and the reaction: the engine does not start, the cache lasts only for this run, or support is
reduced with a warning. Each method is wrapped once per process, for all of the process's engines.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from kvloft.errors import UnsupportedError

logger = logging.getLogger("vllm.kvloft")


class Missing(Enum):
    """How kvloft reacts to a missing method."""

    REFUSE = "the engine does not start"
    THIS_RUN = "the cache will not be reused after the engine restarts"
    LESS = "reduced support"


@dataclass(frozen=True, slots=True)
class Patch:
    """A vLLM method that kvloft wraps, with the reason and the consequence if it is missing."""

    module: str
    owner: str
    method: str
    why: str
    lost: str
    missing: Missing

    def find(self) -> Any:
        """Return the method's owner, or None if the method is missing or abstract."""
        try:
            owner = getattr(import_module(self.module), self.owner, None)
        except ImportError:
            return None
        method = getattr(owner, self.method, None)
        is_there = method is not None and not getattr(method, "__isabstractmethod__", False)
        return owner if is_there else None


_CORE, _ALLOCATOR = "vllm.v1.engine.core", "vllm.device_allocator.cumem"
ENGINE_RPC = Patch(
    _CORE,
    "EngineCore",
    "collective_rpc",
    "a call can replace weights, and vLLM does not notify connectors",
    "kvloft cannot detect new weights in a running engine, and would load KV computed with the old "
    "weights",
    Missing.REFUSE,
)
WORKER_RELOAD = Patch(
    "vllm.v1.worker.gpu_worker",
    "Worker",
    "reload_weights",
    "code inside a worker may call it",
    "kvloft cannot detect a reload that bypasses the engine core, and would save KV from the new "
    "weights under the old weights' identity",
    Missing.THIS_RUN,
)
ADD_ADAPTER = Patch(
    _CORE,
    "EngineCore",
    "add_lora",
    "kvloft checks an adapter's files before vLLM loads them",
    "kvloft cannot check an adapter's files before vLLM loads them, so requests with adapters are "
    "not cached",
    Missing.LESS,
)
PAUSE_RESET = Patch(
    _CORE,
    "EngineCore",
    "_reset_caches",
    "pause and sleep clear connectors' caches although their KV remains valid",
    "pause and sleep clear the cache, including the disk tier",
    Missing.LESS,
)
ENGINE_SLEEP = Patch(
    _CORE,
    "EngineCore",
    "sleep",
    "only the sleep level shows whether vLLM keeps the weights",
    "pause and sleep clear the cache, including the disk tier",
    Missing.LESS,
)
POOL_RESET = Patch(
    "vllm.v1.core.block_pool",
    "BlockPool",
    "reset_prefix_cache",
    "the method publishes an event that removes all blocks, including kvloft's",
    "after vLLM resets its prefix cache, KV events omit the chunks already in kvloft",
    Missing.LESS,
)
ADD_REQUEST = Patch(
    "vllm.v1.core.sched.scheduler",
    "Scheduler",
    "add_request",
    "no hook shows whether a connector is a child of MultiConnector, and none lets the connector "
    "free blocks while a step is in flight (otherwise, vLLM 0.26 to 0.29 preempts requests)",
    "requests do not wait for chunks on disk, and vLLM preempts more requests under async "
    "scheduling",
    Missing.LESS,
)
FIND_CLASS = Patch(
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "KVConnectorFactory",
    "get_connector_class",
    "kvloft checks its settings before vLLM loads the weights",
    "invalid settings are reported only after vLLM has loaded the weights",
    Missing.LESS,
)
RANK_CONFIGS = Patch(
    "vllm.v1.executor.abstract",
    "Executor",
    "initialize_from_config",
    "vLLM passes only the first rank's layers to the scheduler's connector",
    "other ranks' layers are unknown, so kvloft does not support pipeline parallelism",
    Missing.LESS,
)
# vLLM 0.33 replaces these methods with the hooks `unregister_kv_caches` and `restore_kv_caches`.
SLEEP = Patch(
    _ALLOCATOR,
    "CuMemAllocator",
    "sleep",
    "vLLM unmaps paged KV without notifying connectors",
    "in-flight copies could access unmapped memory and crash the engine when it enters sleep mode",
    Missing.REFUSE,
)
DISCARD = Patch(
    _ALLOCATOR,
    "CuMemAllocator",
    "discard",
    "vLLM 0.30 and newer discard paged KV without notifying connectors",
    "in-flight copies could access KV memory after vLLM discards it",
    Missing.REFUSE,
)
# Older releases lack this method, but also do not change the settings.
MEDIA_INPUTS = Patch(
    "vllm.config.vllm",
    "VllmConfig",
    "_resolve_mm_embedding_inputs",
    "vLLM enables media embedding inputs, even without tensors, for every KV consumer",
    "a request for media embeddings without tensors can stop a multimodal engine",
    Missing.LESS,
)
OF_EVERY_ENGINE = (
    ENGINE_RPC,
    WORKER_RELOAD,
    PAUSE_RESET,
    ENGINE_SLEEP,
    ADD_REQUEST,
    FIND_CLASS,
    RANK_CONFIGS,
)
PATCHES = (*OF_EVERY_ENGINE, ADD_ADAPTER, POOL_RESET, SLEEP, DISCARD, MEDIA_INPUTS)

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_told: set[Patch] = set()
_listeners: defaultdict[Patch, WeakKeyDictionary[Any, Callable[..., Any]]] = defaultdict(
    WeakKeyDictionary
)


def settle(patches: Iterable[Patch]) -> bool:
    """Log each missing method once. Return True if the cache may be used only for this run.

    Raises UnsupportedError if the engine must not start.
    """
    this_run = False
    for patch in patches:
        if patch.find() is not None:
            continue
        text = f"this vLLM release has no {patch.owner}.{patch.method}: {patch.lost}"
        if patch.missing is Missing.REFUSE:
            raise UnsupportedError(f"{text}; use vLLM 0.26 to 0.33, or run without kvloft")
        if patch not in _told:
            _told.add(patch)
            logger.warning("kvloft: %s (%s)", text, patch.missing.value)
        this_run |= patch.missing is Missing.THIS_RUN
    return this_run


def wrap(patch: Patch, around: Around, owner: Any = None) -> None:
    """Replace the method with ``around(method, args, kwargs)``, unless it is already wrapped.

    ``owner`` is the class or object that has the method, or None for vLLM's class. Does nothing if
    the method is missing, because `settle` has already logged the consequence.
    """
    owner = owner if owner is not None else patch.find()
    method = getattr(owner, patch.method, None)
    if method is None or hasattr(method, "kvloft_wraps"):
        return

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, args, kwargs)

    wrapped.kvloft_wraps = patch  # type: ignore[attr-defined]
    has_no_self = inspect.isclass(owner) and isinstance(
        inspect.getattr_static(owner, patch.method), staticmethod | classmethod
    )
    setattr(owner, patch.method, staticmethod(wrapped) if has_no_self else wrapped)


@dataclass(frozen=True, slots=True)
class IfReturned:
    """A function to call once a wrapped method and any Future that it returned have succeeded."""

    call: Callable[[], None]


def listen(patch: Patch, listener: Callable[..., Any], owner: Any = None) -> None:
    """Call ``listener`` before each call to the method, with the same arguments.

    ``listener`` is a bound method, which is no longer called once its object is deleted. If
    ``listener`` returns a function or an `IfReturned`, that function runs after the method.
    Exceptions are logged and suppressed. ``owner`` has the same meaning as in `wrap`.
    """
    _listeners[patch][listener.__self__] = listener.__func__  # type: ignore[attr-defined]

    def around(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        on_success: list[IfReturned] = []
        with ExitStack() as afterwards:
            for each, told in list(_listeners[patch].items()):
                after = _logged(patch, told, each, *args, **kwargs)
                if isinstance(after, IfReturned):
                    on_success.append(after)
                elif after is not None:
                    afterwards.callback(_logged, patch, after)
            result = method(*args, **kwargs)
        for success in on_success:
            _call_on_success(patch, success, result)
        return result

    wrap(patch, around, owner)


def _call_on_success(patch: Patch, after: IfReturned, result: Any) -> None:
    """Call ``after`` now or, if ``result`` is a Future, once the Future succeeds."""

    def call(future: Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            _logged(patch, after.call)

    if isinstance(result, Future):
        result.add_done_callback(call)
    else:
        _logged(patch, after.call)


def _logged(patch: Patch, told: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return told(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic in Rust is not an Exception
        logger.exception("kvloft: listener for %s.%s failed; continuing", patch.owner, patch.method)
        return None
