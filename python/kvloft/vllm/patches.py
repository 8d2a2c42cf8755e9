"""The table of vLLM methods that kvloft wraps because vLLM has no connector hook for them, and
listeners for their calls.

If a target is missing, its guarantee is missing. Each row names the lost guarantee and the
reaction: no start, no caching beyond this run, or a warning and less support. Each method is
wrapped once per process, for every engine in it. It must not depend on the listeners.
"""

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
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
    """The reaction to a missing target."""

    REFUSE = "the engine does not start"
    THIS_RUN = "the cache is used in this run of the engine only"
    LESS = "reduced support"


@dataclass(frozen=True, slots=True)
class Patch:
    """A wrapped method of vLLM, the reason, and the consequence if it is missing."""

    module: str
    owner: str
    method: str
    why: str
    lost: str
    missing: Missing

    def find(self) -> Any:
        """Return the owner if it implements the method, not only inherits it from an interface."""
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
    "it replaces weights, and vLLM does not notify connectors",
    "weights replaced in the running engine are not detected, and KV of the old ones would be "
    "served",
    Missing.REFUSE,
)
WORKER_RELOAD = Patch(
    "vllm.v1.worker.gpu_worker",
    "Worker",
    "reload_weights",
    "code inside a worker may call it",
    "a reload that bypasses the engine core is not detected, and its KV would be saved under the "
    "old weights",
    Missing.THIS_RUN,
)
ADD_ADAPTER = Patch(
    _CORE,
    "EngineCore",
    "add_lora",
    "an adapter's files are checked before they are loaded",
    "the files of an adapter are unknown, so requests with adapters share no KV",
    Missing.LESS,
)
PAUSE_RESET = Patch(
    _CORE,
    "EngineCore",
    "_reset_caches",
    "pause and sleep clear connectors although KV stays valid",
    "pause and sleep empty the cache, the disk tier too",
    Missing.LESS,
)
ENGINE_SLEEP = Patch(
    _CORE,
    "EngineCore",
    "sleep",
    "only its level shows whether the weights stay",
    "pause and sleep empty the cache, the disk tier too",
    Missing.LESS,
)
POOL_RESET = Patch(
    "vllm.v1.core.block_pool",
    "BlockPool",
    "reset_prefix_cache",
    "its event removes all blocks, including kvloft's",
    "after a reset of vLLM's own cache, KV events omit the chunks in kvloft",
    Missing.LESS,
)
ADD_REQUEST = Patch(
    "vllm.v1.core.sched.scheduler",
    "Scheduler",
    "add_request",
    "no hook shows whether a connector is a child of MultiConnector, or lets it free blocks before "
    "a step in flight has ended (0.26 to 0.29 preempt every request meanwhile)",
    "requests do not wait for chunks on disk, and vLLM preempts more requests under async "
    "scheduling",
    Missing.LESS,
)
FIND_CLASS = Patch(
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "KVConnectorFactory",
    "get_connector_class",
    "settings are read before weights are loaded",
    "wrong settings are reported after weights are loaded",
    Missing.LESS,
)
RANK_CONFIGS = Patch(
    "vllm.v1.executor.abstract",
    "Executor",
    "initialize_from_config",
    "the scheduler's connector sees the first rank's layers only",
    "the layers of other ranks are unknown, so pipeline parallelism is not supported",
    Missing.LESS,
)
# 0.33 has the hooks `unregister_kv_caches` and `restore_kv_caches` instead.
SLEEP = Patch(
    _ALLOCATOR,
    "CuMemAllocator",
    "sleep",
    "paged KV is unmapped without notice to connectors",
    "copies in flight do not finish before the engine sleeps, which would crash it",
    Missing.REFUSE,
)
DISCARD = Patch(
    _ALLOCATOR,
    "CuMemAllocator",
    "discard",
    "as sleep, in releases that have it (0.30 and newer)",
    "copies in flight do not finish before KV memory is discarded",
    Missing.REFUSE,
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
PATCHES = (*OF_EVERY_ENGINE, ADD_ADAPTER, POOL_RESET, SLEEP, DISCARD)

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_told: set[Patch] = set()
_listeners: defaultdict[Patch, WeakKeyDictionary[Any, Callable[..., Any]]] = defaultdict(
    WeakKeyDictionary
)


def settle(patches: Iterable[Patch]) -> bool:
    """Log each missing target once. Returns True if the cache is for this run only."""
    this_run = False
    for patch in patches:
        if patch.find() is not None:
            continue
        text = f"this vLLM has no {patch.owner}.{patch.method}, which kvloft wraps: {patch.lost}"
        if patch.missing is Missing.REFUSE:
            raise UnsupportedError(f"{text}; use vLLM 0.26 to 0.33, or run without kvloft")
        if patch not in _told:
            _told.add(patch)
            logger.warning("kvloft: %s (%s)", text, patch.missing.value)
        this_run |= patch.missing is Missing.THIS_RUN
    return this_run


def wrap(patch: Patch, around: Around, owner: Any = None) -> None:
    """Replace the method by ``around(method, args, kwargs)``, once. ``owner`` is vLLM's class
    (None) or a test's.

    Does nothing if the target is missing: `settle` has logged the consequence.
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


def listen(patch: Patch, listener: Callable[..., Any], owner: Any = None) -> None:
    """Call ``listener``, a bound method, with the arguments of each call before it, while its
    object lives.

    If it returns a function, that is called after the method. Exceptions of both are logged only.
    ``owner`` is as for `wrap`.
    """
    _listeners[patch][listener.__self__] = listener.__func__  # type: ignore[attr-defined]

    def around(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ExitStack() as afterwards:
            for each, told in list(_listeners[patch].items()):
                after = _logged(patch, told, each, *args, **kwargs)
                if after is not None:
                    afterwards.callback(_logged, patch, after)
            return method(*args, **kwargs)

    wrap(patch, around, owner)


def _logged(patch: Patch, told: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return told(*args, **kwargs)
    except Exception:
        logger.exception("kvloft: error at a call of %s.%s", patch.owner, patch.method)
        return None
