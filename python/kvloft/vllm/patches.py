"""What kvloft wraps in vLLM, because no hook tells a connector: the one table, and the wrappers.

A target that is not there means that its guarantee is not there. So each row says what is lost then, and what follows: no start,
nothing kept beyond this run, or a warning and less served; never silence. Everything is wrapped once a process, and serves
every engine in it. It must not know the store or plans.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from importlib import import_module
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from kvloft.errors import UnsupportedError
from kvloft.vllm.identity.reload import Loaded, Replacing, judge_reload, judge_rpc

logger = logging.getLogger("vllm.kvloft")


class Missing(Enum):
    """What follows where a target is missing."""

    REFUSE = "the engine does not start"
    THIS_RUN = "nothing is kept beyond this run of the engine"
    LESS = "less is served"


@dataclass(frozen=True, slots=True)
class Patch:
    """One method of vLLM that is wrapped. ``until``: the newest release that needs it; ``lost``: what does not hold without it."""

    module: str
    owner: str
    method: str
    why: str
    until: str
    lost: str
    missing: Missing

    def find(self) -> Any:
        """The owner, if it has the method and not only an interface's; else None."""
        try:
            owner = getattr(import_module(self.module), self.owner, None)
        except ImportError:
            return None
        method = getattr(owner, self.method, None)
        return owner if method is not None and not getattr(method, "__isabstractmethod__", False) else None


_CORE, _ALLOCATOR = "vllm.v1.engine.core", "vllm.device_allocator.cumem"
ENGINE_RPC = Patch(
    _CORE, "EngineCore", "collective_rpc", "weights are replaced through it, and no connector is asked", "0.33",
    "weights that are replaced in the running engine are not seen, and KV of the old ones would be served", Missing.REFUSE,
)  # fmt: skip
WORKER_RELOAD = Patch(
    "vllm.v1.worker.gpu_worker", "Worker", "reload_weights", "code inside a worker may call it", "0.33",
    "a reload that does not go through the engine core is not seen, and its KV would be kept as the old weights'", Missing.THIS_RUN,
)  # fmt: skip
ADD_ADAPTER = Patch(
    _CORE, "EngineCore", "add_lora", "an adapter's files are looked at before they are loaded", "0.33",
    "which files an adapter was loaded from is not known, so requests with adapters share no KV", Missing.LESS,
)  # fmt: skip
PAUSE_RESET = Patch(
    _CORE, "EngineCore", "_reset_caches", "pause and sleep ask connectors to forget what stays right", "0.33",
    "pause and sleep empty the cache, the disk tier too", Missing.LESS,
)  # fmt: skip
ENGINE_SLEEP = Patch(
    _CORE, "EngineCore", "sleep", "only its level says whether the weights stay", "0.33",
    "pause and sleep empty the cache, the disk tier too", Missing.LESS,
)  # fmt: skip
ADD_REQUEST = Patch(
    "vllm.v1.core.sched.scheduler", "Scheduler", "add_request", "a connector is not told whether it is a child of MultiConnector,"
    " nor asked whether blocks must stay taken until a step in flight has ended (0.26 to 0.29 preempt everyone meanwhile)",
    "0.33", "requests do not wait for chunks on disk, and vLLM preempts more requests under async scheduling", Missing.LESS,
)  # fmt: skip
FIND_CLASS = Patch(
    "vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory", "get_connector_class",
    "settings are read before weights are loaded", "0.33", "wrong settings are told only after weights are loaded", Missing.LESS,
)  # fmt: skip
SLEEP = Patch(
    _ALLOCATOR, "CuMemAllocator", "sleep", "paged KV is unmapped without a word to connectors", "0.32",
    "copies in flight do not end before the engine sleeps, which would end it", Missing.REFUSE,
)  # fmt: skip
DISCARD = Patch(
    _ALLOCATOR, "CuMemAllocator", "discard", "as sleep, in releases that have it (0.30 and newer)", "0.32",
    "copies in flight do not end before KV memory is discarded", Missing.REFUSE,
)  # fmt: skip
PATCHES = (ENGINE_RPC, WORKER_RELOAD, ADD_ADAPTER, PAUSE_RESET, ENGINE_SLEEP, ADD_REQUEST, FIND_CLASS, SLEEP, DISCARD)

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_told: set[Patch] = set()


def settle(patches: Iterable[Patch]) -> bool:
    """Say what each missing target costs, once; True where nothing may be kept beyond this run. Raises UnsupportedError."""
    this_run = False
    for patch in patches:
        if patch.find() is not None:
            continue
        text = f"this vLLM has no {patch.owner}.{patch.method}, which kvloft wraps: {patch.lost}"
        if patch.missing is Missing.REFUSE:
            raise UnsupportedError(f"{text}; use a vLLM from 0.26 to 0.33, or run it without kvloft")
        if patch not in _told:
            _told.add(patch)
            logger.warning("kvloft: %s (%s)", text, patch.missing.value)
        this_run |= patch.missing is Missing.THIS_RUN
    return this_run


def wrap(patch: Patch, around: Around, owner: Any = None) -> None:
    """Put ``around(method, args, kwargs)`` in the method's place, once. ``owner`` is vLLM's class (None) or a test's.

    Does nothing where the target is missing: `settle` has said what follows.
    """
    owner = owner if owner is not None else patch.find()
    method = getattr(owner, patch.method, None)
    if method is None or hasattr(method, "kvloft_wraps"):
        return

    @wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, args, kwargs)

    wrapped.kvloft_wraps = patch  # type: ignore[attr-defined]
    is_bound = inspect.isclass(owner) and inspect.ismethod(method)
    setattr(owner, patch.method, staticmethod(wrapped) if is_bound or _is_static(owner, patch.method) else wrapped)


def _is_static(owner: Any, name: str) -> bool:
    return inspect.isclass(owner) and isinstance(inspect.getattr_static(owner, name), staticmethod)


# -- weights and adapters -----------------------------------------------------------------------------------------


class Half(Protocol):
    """One half of kvloft."""

    def stop(self, reason: str) -> None:
        """Offer, save and move nothing from now on."""
        ...


class Names(Protocol):
    """Tells adapters apart by what it saw first."""

    def identify(self, lora: Any) -> object: ...


_loaded: WeakKeyDictionary[Any, Loaded] = WeakKeyDictionary()
"""Whom to stop in this process, and what each has a namespace for."""
_names: WeakSet[Any] = WeakSet()


def stop_worker_when_reloaded(core: Half, model: Any, load: Any, worker: Any = None) -> None:
    """Have ``core.stop()`` called when other weights are loaded than at the start, for as long as ``core`` lives.

    ``model`` and ``load`` are vLLM's ModelConfig and LoadConfig.
    """
    _loaded[core] = Loaded.of(model, load)
    wrap(WORKER_RELOAD, lambda method, args, kwargs: _watched(judge_reload(args[1:], kwargs), method, args, kwargs), worker)


def stop_scheduler_when_reloaded(half: Half, model: Any, load: Any, engine: Any = None) -> None:
    """As `stop_worker_when_reloaded`, when vLLM's engine core is asked for what may replace weights."""
    _loaded[half] = Loaded.of(model, load)
    wrap(ENGINE_RPC, lambda method, args, kwargs: _watched(judge_rpc(args[1:], kwargs), method, args, kwargs), engine)


def _watched(replacing: Replacing | None, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if replacing is not None:
        _stop_where(replacing)
    try:
        return method(*args, **kwargs)
    finally:
        if replacing is not None:  # a hub's newer commit is seen now
            _stop_where(replacing)


def _stop_where(replacing: Replacing) -> None:
    for half, loaded in list(_loaded.items()):
        try:
            if replacing.is_other or not loaded.is_there():
                half.stop(f"{replacing.method} replaced its weights, or may have")
        except Exception:
            logger.exception("kvloft: could not be stopped before weights are replaced")


def see_adapters_before_they_load(names: Names, engine: Any = None) -> None:
    """Have ``names.identify`` called before vLLM's engine core loads an adapter that no request asked for yet."""
    _names.add(names)
    wrap(ADD_ADAPTER, _see_adapter, engine)


def _see_adapter(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for each in list(_names):
        try:
            each.identify(args[1] if len(args) > 1 else kwargs["lora_request"])
        except Exception:
            logger.exception("kvloft: an adapter cannot be looked at before it is loaded")
    return method(*args, **kwargs)


# -- pauses, the scheduler, sleep ---------------------------------------------------------------------------------

_pausing: ContextVar[bool] = ContextVar("kvloft_pausing", default=False)


class Sleeper(Protocol):
    """Something whose cache belongs to the weights at hand."""

    def weights_will_go(self) -> None:
        """The engine goes to sleep without keeping its weights; the reset that belongs to it follows."""
        ...


_sleepers: WeakSet[Any] = WeakSet()


def notice_pauses(sleeper: Sleeper, engine: Any = None) -> bool:
    """Let `is_pausing` tell a reset that belongs to a pause from a user's; False where it cannot be told whether weights stay."""
    _sleepers.add(sleeper)
    wrap(PAUSE_RESET, _pause, engine)
    wrap(ENGINE_SLEEP, _sleep, engine)
    return engine is not None or None not in (PAUSE_RESET.find(), ENGINE_SLEEP.find())


def _pause(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = _pausing.set(True)
    try:
        return method(*args, **kwargs)
    finally:
        _pausing.reset(token)


def _sleep(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    level = args[1] if len(args) > 1 else kwargs.get("level", 1)
    if level not in (0, 1):  # 2 throws the weights away; what newer levels do is not known
        for each in list(_sleepers):
            each.weights_will_go()
    return method(*args, **kwargs)


def is_pausing() -> bool:
    """Whether vLLM resets caches because it pauses or sleeps."""
    return _pausing.get()


class OwnConnector(Protocol):
    """A connector that may be the engine's own, or a child of MultiConnector."""

    def found_alone(self) -> None:
        """It is the engine's own."""
        ...


_not_met: WeakSet[Any] = WeakSet()


def meet_scheduler(connector: OwnConnector, scheduler: Any = None) -> None:
    """Have ``connector.found_alone()`` called before the first request, if its scheduler has no other connector.

    That scheduler then frees a preempted or finished request's blocks at once, as without a connector. vLLM defers that while
    a step in flight may write them, for a connector might fill them first; kvloft's loads come after whatever was launched
    before their step (on a GPU they wait for an event recorded at the step's begin, on a CPU workers run in order), and after saves
    that read the blocks. 0.26 to 0.29 preempt one request after another while they wait for the deferred blocks.
    """
    _not_met.add(connector)
    wrap(ADD_REQUEST, _add_request, scheduler)


def _add_request(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scheduler = args[0]
    for connector in [each for each in _not_met if each is scheduler.connector]:
        _not_met.discard(connector)
        connector.found_alone()
        if not getattr(scheduler, "defer_async_loads", False):  # HiSparse reads pages of its own after they are free
            scheduler.defer_block_free = False
    return method(*args, **kwargs)


class Drains(Protocol):
    """Something with copies in flight."""

    def drain(self) -> None: ...


_draining: WeakSet[Any] = WeakSet()


def drain_before_sleep(core: Drains, allocator: Any = None) -> None:
    """Have ``core.drain()`` called before anything is unmapped, for as long as ``core`` lives.

    vLLM waits only for what is on the GPU, not for what kvloft still has to send, and a kernel on unmapped pages ends the engine.
    """
    if allocator is None:
        settle([SLEEP])
        allocator = SLEEP.find().get_instance()
    _draining.add(core)
    for patch in (SLEEP, DISCARD):
        wrap(patch, _unmap, allocator)


def _unmap(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for core in list(_draining):
        try:
            core.drain()
        except Exception:
            logger.exception("kvloft: copies in flight could not be waited for before memory is unmapped")
    return method(*args, **kwargs)
