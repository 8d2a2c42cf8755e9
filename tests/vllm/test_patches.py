"""Tests the table of wrapped vLLM calls: each target exists in this release, and a missing target
has the consequence that its row states.
"""

import gc
import importlib
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvloft.errors import UnsupportedError
from kvloft.plan.breaker import RETRY_S
from kvloft.vllm import patches, scheduler_half
from kvloft.vllm.connector import KVLoftConnector
from kvloft.vllm.identity.reload import HARMLESS
from kvloft.vllm.patches import PATCHES, Missing, Patch, listen, settle, wrap
from kvloft.vllm.scheduler_half import SchedulerHalf
from kvloft.vllm.shape import max_running
from kvloft.vllm.store_log import LOADS_FAIL_REQUESTS, StoreLog

pytestmark = pytest.mark.short
NOT_HARMLESS = frozenset(
    {
        "add_lora",
        "remove_lora",
        "sleep",
        "reload_weights",
        "apply_model",
        "compile_or_warm_up_model",
        "discard",
        "elastic_ep_execute",
        "execute_model",
        "finish_weight_update",
        "get_draft_model",
        "get_model",
        "handle_ft_command",
        "init_device",
        "init_worker",
        "initialize_from_config",
        "load_model",
        "reset_weights",
        "sample_tokens",
        "set_kv_cache_layout",
        "start_draft_weight_update",
        "start_weight_update",
        "update_config",
        "update_environment_variables",
        "update_weights",
    }
)
"""Calls that replace weights, write KV or expose the model."""
HOOK_FOR_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_told", set())


def name_of(patch: Patch) -> str:
    return f"{patch.owner}.{patch.method}"


@pytest.mark.parametrize("patch", PATCHES, ids=name_of)
def test_each_target_exists(patch: Patch) -> None:
    """Fails if a release renames a target. In that case, update the wrapper or the row."""
    assert patch.find() is not None
    assert settle([patch]) is False


@pytest.mark.parametrize("patch", PATCHES, ids=name_of)
def test_a_renamed_target_has_the_consequence_that_its_row_states(
    patch: Patch, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    monkeypatch.delattr(patch.find(), patch.method)
    wrap(patch, lambda *_: None)  # does nothing, because the method is missing
    if patch.missing is Missing.REFUSE:
        with pytest.raises(UnsupportedError, match=rf"{patch.owner}\.{patch.method}"):
            settle([patch])
        return
    for _ in range(2):
        assert settle([patch]) is (patch.missing is Missing.THIS_RUN)
    (record,) = logged()
    assert (
        name_of(patch) in record.message
        and patch.lost in record.message
        and record.levelname == "WARNING"
    )


def test_a_module_that_is_gone_counts_as_renamed() -> None:
    gone = Patch("vllm.no_such_module", "Owner", "method", "", "", Missing.THIS_RUN)
    assert settle([gone]) is True


def test_wrapped_once_however_often_and_arguments_and_results_pass() -> None:
    calls: list[Any] = []

    class Core:
        def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return "done"

        @staticmethod
        def add_lora(value: int) -> int:
            return value

        @classmethod
        def sleep(cls, value: int) -> Any:
            return cls, value

    def around(method: Any, args: Any, kwargs: Any) -> Any:
        calls.append("around")
        return method(*args, **kwargs)

    for _ in range(2):
        for patch in (patches.ENGINE_RPC, patches.ADD_ADAPTER, patches.ENGINE_SLEEP):
            wrap(patch, around, Core)
    assert Core().collective_rpc(1, more=2) == "done"
    assert (Core.add_lora(3), Core().add_lora(4), Core.sleep(5)) == (3, 4, (Core, 5))
    assert calls == ["around", ((1,), {"more": 2}), *["around"] * 3]


# -- workers ---------------------------------------------------------------------------------------


def public_names(owner: type) -> set[str]:
    public = {
        name: inspect.getattr_static(owner, name) for name in dir(owner) if not name.startswith("_")
    }
    return {
        name
        for name, value in public.items()
        if callable(getattr(owner, name)) or isinstance(value, property)
    }


def methods_of_workers() -> set[str]:
    found: set[str] = set()
    for module, owner in (
        ("vllm.v1.worker.gpu_worker", "Worker"),
        ("vllm.v1.worker.cpu_worker", "CPUWorker"),
        ("vllm.v1.worker.worker_base", "WorkerBase"),
        ("vllm.v1.worker.worker_base", "WorkerWrapperBase"),
    ):
        found |= public_names(getattr(importlib.import_module(module), owner))
    return found


def test_each_method_of_vllms_workers_is_classified() -> None:
    """A new method is treated as changing weights until it is added to one of the two sets."""
    assert methods_of_workers() - HARMLESS - NOT_HARMLESS == set()
    assert not HARMLESS & NOT_HARMLESS


def test_no_judged_name_is_stale(vllm_release: tuple[int, int]) -> None:
    """The test lists the names that exist only in other releases, so that it detects typos."""
    later = {
        (0, 31): {"discard", "randomize_dummy_inputs"},
        (0, 32): {
            "compute_weight_checksums",
            "release_late_interaction_query_cache",
            "reset_weights",
            "shutdown_weight_transfer_engine",
        },
        (0, 33): {"get_simple_cpu_offload_num_cpu_blocks"},
    }
    of_others = {
        name for release, names in later.items() if release > vllm_release for name in names
    }
    assert (HARMLESS | NOT_HARMLESS) - methods_of_workers() == of_others


@pytest.mark.skipif(
    HOOK_FOR_SLEEP, reason="this vLLM calls a connector hook before it unmaps pages"
)
def test_calls_that_unmap_pages_are_wrapped() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    unmapping = {
        name
        for name, method in vars(CuMemAllocator).items()
        if inspect.isfunction(method) and "unmap_and_release(" in inspect.getsource(method)
    }
    wrapped = {patches.SLEEP.method, patches.DISCARD.method}
    # torch calls `_python_free_callback` when it releases blocks and when the process exits.
    assert (
        unmapping - {"release_pools", "use_memory_pool", "_trim", "_python_free_callback"}
        == wrapped
    )


# -- pauses, schedulers ----------------------------------------------------------------------------


@pytest.fixture
def engine() -> Any:
    """Return the part of vLLM's engine core that handles pauses, with a fake scheduler side."""

    class Core:
        def __init__(self) -> None:
            self.seen: list[bool] = []
            self.model_executor = SimpleNamespace(sleeping_tags=set())

        def reset(self) -> None:
            self.seen.append(scheduler_half._pausing.get())

        def _reset_caches(self, *, fails: bool = False) -> None:
            self.reset()
            if fails:
                raise RuntimeError("Failed to reset the KV connector cache.")

        def sleep(self, level: int = 1, mode: str = "abort") -> Any:
            if level:
                self._reset_caches(fails=mode == "fails")
                if mode != "nothing":
                    self.model_executor.sleeping_tags |= {"weights", "kv_cache"}
            return Future[None]() if mode == "later" else None

        def collective_rpc(self, method: str, *, fails: bool = False) -> None:
            if fails:
                raise RuntimeError("out of memory")

    half = object.__new__(SchedulerHalf)
    half._weights_go, half._can_sleep, half._has_draft_kv = False, True, False
    half._is_live = half._is_stopped = False
    calls: list[str] = []
    half.core = SimpleNamespace(  # type: ignore[assignment]
        calls=calls,
        pause_caching=lambda: calls.append("pause"),
        resume_caching=lambda: calls.append("resume"),
        stop=lambda: calls.append("stop"),
    )
    listen(patches.PAUSE_RESET, half.hear_pause, Core)
    listen(patches.ENGINE_SLEEP, half.hear_sleep, Core)
    listen(patches.ENGINE_RPC, half.hear_rpc, Core)
    return SimpleNamespace(core=Core(), half=half)


@pytest.mark.parametrize(
    ("clears", "weights_go", "call"),
    [(False, False, "release"), (True, False, "reset"), (False, True, "reset")],
)
def test_a_pause_releases_what_waiting_requests_hold(
    engine: Any, clears: bool, weights_go: bool, call: str
) -> None:
    half = engine.half
    half._clears_on_pause, half._weights_go = clears, weights_go
    half.core.reset = lambda: half.core.calls.append("reset")
    half.core.release_waiting = lambda: half.core.calls.append("release")
    after = half.hear_pause()
    half.reset()
    after()
    half.reset()
    assert half.core.calls == [call, "reset"]


@pytest.mark.parametrize(
    ("config", "num"),
    [
        (SimpleNamespace(max_num_seqs=8), 8),
        (SimpleNamespace(max_num_seqs=8, max_num_active_seqs=None), 8),
        (SimpleNamespace(max_num_seqs=8, max_num_active_seqs=3), 3),
    ],
)
def test_the_number_of_running_requests_is_vllms_limit(config: Any, num: int) -> None:
    assert max_running(SimpleNamespace(scheduler_config=config)) == num


def test_a_reset_by_pause_differs_from_a_users_reset(engine: Any) -> None:
    engine.core.reset()
    engine.core._reset_caches()
    with pytest.raises(RuntimeError):
        engine.core._reset_caches(fails=True)
    engine.core.reset()
    assert engine.core.seen == [False, True, True, False]


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((), {}, False),
        ((0,), {}, False),
        ((1, "wait"), {}, False),
        ((2,), {}, True),
        ((), {"level": 2}, True),
        ((3,), {}, True),
    ],
)
def test_a_sleep_that_drops_weights_is_reported(
    engine: Any, args: Any, kwargs: Any, told: bool
) -> None:
    engine.core.sleep(*args, **kwargs)
    assert engine.half._weights_go == told
    engine.core.collective_rpc("wake_up")
    calls = ["pause"] if told else []
    assert engine.half.core.calls == calls, "waking up loads no weights"
    with pytest.raises(RuntimeError):
        engine.core.collective_rpc("reload_weights", fails=True)
    assert engine.half.core.calls == calls, "no weights were loaded"
    engine.core.collective_rpc("reload_weights")
    assert engine.half.core.calls == [*calls, "resume"]


def test_a_sleep_that_keeps_the_weights_does_not_pause_the_cache(engine: Any) -> None:
    with pytest.raises(RuntimeError):
        engine.core.sleep(2, "fails")
    engine.core.sleep(1)
    engine.core.sleep(2)  # the engine is already asleep
    engine.core.model_executor.sleeping_tags = set()
    engine.core.sleep(2, "nothing")
    engine.half._can_sleep = False
    engine.core.sleep(2)
    assert engine.half.core.calls == []


@pytest.mark.parametrize("fails", [True, False])
def test_a_sleep_that_completes_later_pauses_the_cache_then(engine: Any, fails: bool) -> None:
    future = engine.core.sleep(2, "later")
    assert engine.half.core.calls == []
    if fails:
        future.set_exception(RuntimeError("Failed to reset the KV connector cache."))
    else:
        future.set_result(None)
    assert engine.half.core.calls == ([] if fails else ["pause"])


def test_weights_that_are_awake_alone_are_discarded(engine: Any) -> None:
    engine.core.model_executor.sleeping_tags = {"kv_cache"}
    engine.core.sleep(2)
    assert engine.half.core.calls == ["pause"]


def test_caching_ends_if_the_weights_of_a_draft_model_are_discarded(
    engine: Any, logged: Any
) -> None:
    engine.half._has_draft_kv = True
    engine.core.sleep(2)
    assert engine.half.core.calls == ["stop"]
    assert "does not reload the draft model's weights" in logged()[-1].getMessage()


def test_the_sleep_of_another_engine_in_this_process_is_ignored(engine: Any) -> None:
    engine.core.scheduler = SimpleNamespace(connector=SimpleNamespace(_half=object()))
    engine.core.sleep(2)
    engine.core.collective_rpc("reload_weights")
    assert engine.half.core.calls == []
    child = SimpleNamespace(_half=engine.half)
    engine.core.scheduler.connector = SimpleNamespace(_connectors=[object(), child])
    engine.core.model_executor.sleeping_tags = set()
    engine.core.sleep(2)
    assert engine.half.core.calls == ["pause"]


@pytest.mark.parametrize("num_free", [8, 7])
def test_a_reset_of_vllms_own_cache_is_noted_if_it_succeeded(num_free: int) -> None:
    noted: list[int] = []
    half: Any = object.__new__(SchedulerHalf)
    half._announcer, half._own_pool = None, lambda: None
    half.core = SimpleNamespace(note_pool_reset=lambda: noted.append(num_free))
    pool = SimpleNamespace(
        kv_event_queue=(), get_num_free_blocks=lambda: num_free, num_gpu_blocks=9
    )
    half.hear_pool_reset(pool)()
    assert noted == [8][: num_free == 8]
    half._own_pool = lambda: pool
    half.hear_pool_reset(pool)()
    assert noted == [8, 8][: 2 * (num_free == 8)]
    half._own_pool = object
    assert half.hear_pool_reset(pool) is None, "another engine's pool in the same process"


class Pool:
    """A block pool."""


def new_connector() -> Any:
    """Return a connector that can be used alone or as a child of MultiConnector."""
    connector = object.__new__(KVLoftConnector)
    core = SimpleNamespace(has_siblings=False)
    core.meet_siblings = partial(setattr, core, "has_siblings", True)
    core.meet_engine = lambda *args: setattr(core, "engine", args)
    half = object.__new__(SchedulerHalf)
    half.siblings, half.core, half._loads_allowed = None, core, True  # type: ignore[assignment]
    half._log = StoreLog(None, b"")
    connector._scheduler = half
    return connector


def new_scheduler(connector: Any, **more: Any) -> Any:
    class Scheduler:
        def __init__(self) -> None:
            self.connector, self.added, self.running = connector, list[int](), [1, 2, 3]
            vars(self).update({"defer_block_free": True} | more)

        def add_request(self, request: int) -> None:
            self.added.append(request)

    return Scheduler


def test_the_engines_own_connector_is_found_before_the_first_request_and_once() -> None:
    own = new_connector()
    cls = new_scheduler(own)
    listen(patches.ADD_REQUEST, own.meet_scheduler, cls)
    scheduler = cls()
    scheduler.add_request(0)
    assert (scheduler.added, own._scheduler.siblings, scheduler.defer_block_free) == (
        [0],
        (),
        False,
    )
    scheduler.defer_block_free = True
    scheduler.add_request(1)
    assert (scheduler.added, scheduler.defer_block_free) == ([0, 1], True)


@pytest.mark.parametrize("other", [None, SimpleNamespace(children="ours"), new_connector()])
def test_a_child_of_another_connector_is_not_found(other: Any) -> None:
    child = new_connector()
    cls = new_scheduler(other)
    listen(patches.ADD_REQUEST, child.meet_scheduler, cls)
    scheduler = cls()
    scheduler.add_request(1)
    assert (scheduler.added, child._scheduler.siblings, scheduler.defer_block_free) == (
        [1],
        None,
        True,
    )
    num_listeners = len(patches._listeners[patches.ADD_REQUEST])
    del child
    gc.collect()
    assert len(patches._listeners[patches.ADD_REQUEST]) < num_listeners


def test_a_listener_that_panics_does_not_stop_the_method() -> None:
    class Panic(BaseException):
        """Like a panic in Rust, which is not an Exception."""

    class Listener:
        def hear(self, *_: Any) -> None:
            raise Panic

    cls, listener = new_scheduler(None), Listener()
    listen(patches.ADD_REQUEST, listener.hear, cls)
    scheduler = cls()
    scheduler.add_request(1)
    assert scheduler.added == [1]


def test_a_child_of_multi_connector_finds_its_siblings() -> None:
    child, sibling = new_connector(), object()
    scheduler = new_scheduler(SimpleNamespace(_connectors=[sibling, child]))
    listen(patches.ADD_REQUEST, child.meet_scheduler, scheduler)
    made = scheduler()
    made.add_request(1)
    assert (child._scheduler.siblings, made.defer_block_free) == ((sibling,), True)
    assert child._scheduler.core.has_siblings


@pytest.mark.parametrize("is_child", [False, True])
@pytest.mark.parametrize(
    ("attributes", "num_running", "retry_s"),
    [
        ({}, 3, RETRY_S),
        ({"recompute_kv_load_failures": True, "num_waiting_for_streaming_input": 2}, 5, RETRY_S),
        ({"recompute_kv_load_failures": False}, 3, math.inf),
    ],
)
def test_the_schedulers_settings_apply(
    is_child: bool,
    attributes: dict[str, Any],
    num_running: int,
    retry_s: float,
    logged: Callable[[], list[logging.LogRecord]],
) -> None:
    """MultiConnector's children have settings of their own, which vLLM ignores."""
    own = new_connector()
    parent = SimpleNamespace(_connectors=[own, object()]) if is_child else own
    scheduler = new_scheduler(parent, **attributes)()
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=Pool())
    own.meet_scheduler(scheduler)
    assert own._scheduler._own_pool() is scheduler.kv_cache_manager.block_pool
    count_running, retries = own._scheduler.core.engine
    assert (count_running(), retries) == (num_running, retry_s)
    scheduler.running = []
    assert count_running() == num_running - 3
    is_retried = retry_s == RETRY_S
    warnings = [record.getMessage() for record in logged() if record.levelname == "WARNING"]
    assert warnings == ([] if is_retried else [LOADS_FAIL_REQUESTS])
    own._scheduler._log.warn(Counter(load_breaker_trips=1))
    pause = "for a minute" if is_retried else "until the engine restarts"
    assert f"pausing loads and saves {pause}" in logged()[-1].getMessage()


def test_a_scheduler_with_late_free_page_reads_keeps_deferring() -> None:
    own = new_connector()
    cls = new_scheduler(own, defer_async_loads=True)
    listen(patches.ADD_REQUEST, own.meet_scheduler, cls)
    scheduler = cls()
    scheduler.add_request(1)
    assert (own._scheduler.siblings, scheduler.defer_block_free) == ((), True)
    assert not own._scheduler.core.has_siblings
