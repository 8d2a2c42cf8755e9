"""Tests the worker side in an engine: copies complete before memory is unmapped, gathers run before
zeroing, and changed weights stop saves and loads.
"""

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvloft.config.table import Config
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.transfer.cuda import mover
from kvloft.transfer.layout import LayoutError
from kvloft.transfer.movers import choose_mover
from kvloft.vllm import worker_half
from kvloft.vllm.connector import KVLoftConnector
from kvloft.vllm.patches import DISCARD, SLEEP, WORKER_RELOAD, Patch, listen


class Allocator:
    """Replaces vLLM's allocator and records the order of calls."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def sleep(self, offload_tags: tuple[str, ...] | None = None) -> None:
        self.log.append(("sleep", offload_tags))

    def wake_up(self) -> None:
        self.log.append("wake_up")


class NewerAllocator(Allocator):
    def discard(self, tags: tuple[str, ...]) -> None:
        self.log.append(("discard", tags))


class Core:
    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def drain(self, *_args: Any, **_kwargs: Any) -> None:
        self.log.append(self.name + " drained")


def drain_before_sleep(core: Any, allocator: Any) -> None:
    for patch in (SLEEP, DISCARD):
        listen(patch, core.drain, allocator)


def test_copies_end_before_memory_is_unmapped() -> None:
    log: list[Any] = []
    allocator, core = NewerAllocator(log), Core("a", log)
    drain_before_sleep(core, allocator)
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up()
    allocator.discard(("kv_cache",))
    assert log == [
        "a drained",
        ("sleep", ("weights",)),
        "wake_up",
        "a drained",
        ("discard", ("kv_cache",)),
    ]


def test_engines_of_one_process_drain_once_each_and_gone_ones_not() -> None:
    log: list[Any] = []
    allocator, first, second = Allocator(log), Core("a", log), Core("b", log)
    for core in (first, second):
        drain_before_sleep(core, allocator)
    allocator.sleep()
    assert sorted(log[:2]) == ["a drained", "b drained"] and log[2:] == [("sleep", None)]
    log.clear()
    del first, core
    gc.collect()
    allocator.sleep()
    assert log == ["b drained", ("sleep", None)]


def test_one_that_cannot_drain_stops_neither_the_others_nor_the_sleep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log: list[Any] = []
    allocator, cores = Allocator(log), [Core("a", log), Core(None, log), Core("c", log)]  # type: ignore[arg-type]
    for core in cores:
        drain_before_sleep(core, allocator)
    with caplog.at_level("ERROR", logger="vllm.kvloft"):
        allocator.sleep()
    assert sorted(log[:2]) == ["a drained", "c drained"] and log[2:] == [("sleep", None)]


def listeners(monkeypatch: pytest.MonkeyPatch) -> dict[Patch, Any]:
    """Return the listeners that a worker side registers, by patch."""
    heard: dict[Patch, Any] = {}
    monkeypatch.setattr(
        worker_half, "listen", lambda patch, listener, _owner=None: heard.update({patch: listener})
    )
    return heard


ALONE, WITH_STATES = (GroupShape(16),), (GroupShape(16), GroupShape(16, kind="state"))


def half_of(
    *,
    can_sleep: bool = False,
    zeroes: bool = False,
    extension: str = "",
    drafter: str | None = None,
    groups: tuple[GroupShape, ...] = ALONE,
) -> worker_half.WorkerHalf:
    settings: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, world_size=1, worker_extension_cls=extension),
        model_config=SimpleNamespace(
            dtype="float32", enable_sleep_mode=can_sleep, model="hub/name", revision=None
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=drafter and SimpleNamespace(method=drafter),
    )
    layers = [SimpleNamespace(layer_names=[]) for _ in groups]
    kv: Any = SimpleNamespace(num_blocks=4, needs_kv_cache_zeroing=zeroes, kv_cache_groups=layers)
    return worker_half.WorkerHalf(settings, kv, CacheShape(groups), Config())


@pytest.mark.parametrize(
    ("is_on", "has_hook", "drains"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_a_worker_drains_before_sleep_if_its_engine_can_sleep(
    is_on: bool, has_hook: bool, drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM 0.33 and newer, a connector hook replaces the patches of the allocator."""
    heard = listeners(monkeypatch)
    base: Any = type("Base", (), {"unregister_kv_caches": None} if has_hook else {})
    monkeypatch.setattr(worker_half, "KVConnectorBase_V1", base)
    monkeypatch.setattr(SLEEP.find(), "get_instance", lambda: "allocator")
    half = half_of(can_sleep=is_on)
    assert {patch: heard.get(patch) for patch in (SLEEP, DISCARD)} == dict.fromkeys(
        (SLEEP, DISCARD), half.drain if drains else None
    )
    monkeypatch.setattr(half, "core", Core("core", log := []))
    half.drain("tags")
    assert log == ["core drained"]


def test_vllms_hooks_of_sleep_reach_the_worker() -> None:
    log: list[str] = []
    connector = object.__new__(KVLoftConnector)
    core: Any = SimpleNamespace(
        suspend=lambda: log.append("suspend"), resume=lambda: log.append("resume")
    )
    connector._worker = SimpleNamespace(core=core)  # type: ignore[assignment]
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert log == ["suspend", "resume"]


@pytest.mark.parametrize("zeroes", [True, False])
def test_gathers_run_first_if_the_engine_zeroes_new_blocks(
    zeroes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvloft passes vLLM's own setting to the GPU mover.

    The engine zeroes blocks before any hook of the step.
    """
    assert hasattr(KVCacheConfig, "needs_kv_cache_zeroing")
    settings = half_of(zeroes=zeroes).core._settings
    given: list[Any] = []
    monkeypatch.setattr(
        mover,
        "Kernels",
        lambda *_: SimpleNamespace(vec_bytes=16, num_planes=1, num_sms=132, encodes=False),
    )
    monkeypatch.setattr(
        mover, "CudaMover", lambda *_, **options: given.append(options["gathers_first"])
    )
    monkeypatch.setattr(mover.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(mover.torch.cuda, "get_device_name", lambda _: "a GPU")
    storage = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    layout: Any = SimpleNamespace(
        planes=[SimpleNamespace(storage=storage, base=0, block_stride=1, page_bytes=1)],
        block_bytes=4096,
        digest=b"",
    )
    memory = SimpleNamespace(memory=SimpleNamespace(part_bytes=4096))
    window: Any = SimpleNamespace(raw=memory, raw_class=0, compact=None, compact_class=0)
    choose_mover([layout], [1], settings)([window])
    assert given == [zeroes]


def test_gathers_run_first_if_vllm_moves_states_before_hooks() -> None:
    """`preprocess_mamba` copies a state into a block that was allocated in this step, while another
    request's saves might still read this block.
    """
    assert half_of(groups=WITH_STATES).core._settings.gathers_first
    assert not half_of(
        groups=(GroupShape(16), GroupShape(16, kind="window", reach=31))
    ).core._settings.gathers_first


@pytest.mark.parametrize(
    ("drafter", "groups", "saves_late"),
    [
        (None, ALONE, False),
        ("ngram", ALONE, False),
        ("eagle", ALONE, True),
        (None, WITH_STATES, False),
        ("ngram", WITH_STATES, True),
    ],
)
def test_saves_wait_for_work_after_the_results(
    drafter: str | None, groups: tuple[GroupShape, ...], saves_late: bool
) -> None:
    """vLLM processes results before a draft model runs, and before it copies the states of accepted
    draft tokens. vLLM calls `wait_for_save` after both.
    """
    half = half_of(drafter=drafter, groups=groups)
    half.core.run_saves = lambda: log.append("saves")  # type: ignore[method-assign]
    log: list[str] = []
    half.take_finished()
    assert log == ([] if saves_late else ["saves"])


@pytest.mark.parametrize(("extension", "stops"), [("", True), ("trainer.Extension", False)])
def test_a_worker_stops_at_other_weights_but_for_a_trainers(
    extension: str, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = listeners(monkeypatch)
    half = half_of(extension=extension)
    assert heard.keys() == ({WORKER_RELOAD} if stops else set())
    if stops:
        heard[WORKER_RELOAD](None, "other weights")
    assert half.core._is_stopped == stops


def test_a_layer_of_several_groups_that_vllm_did_not_register_is_refused() -> None:
    half = half_of()
    half._group_layers = [["a", "b"], ["c"]]
    with pytest.raises(LayoutError, match="layer 'b' of a KV cache group has no KV tensor"):
        half.register({"a": torch.zeros(1), "c": torch.zeros(1), "else": torch.zeros(1)})
