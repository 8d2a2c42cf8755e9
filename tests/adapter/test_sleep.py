"""Engine sleep: what is in flight ends before vLLM's allocator unmaps anything, whichever of its methods does it."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from kvloft.config import Config
from kvloft.plan import Geometry
from kvloft.vllm import worker_half
from kvloft.vllm.sleep import drain_before_sleep


class Allocator:
    """vLLM's, as far as it matters: says what was done in which order."""

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

    def drain(self) -> None:
        self.log.append(f"{self.name} drained")


def test_copies_end_before_memory_is_unmapped() -> None:
    log: list[Any] = []
    allocator, core = NewerAllocator(log), Core("a", log)
    drain_before_sleep(core, allocator)
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up()
    allocator.discard(("kv_cache",))
    assert log == ["a drained", ("sleep", ("weights",)), "wake_up", "a drained", ("discard", ("kv_cache",))]


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


def test_an_allocator_that_cannot_be_watched_is_an_error() -> None:
    with pytest.raises(AttributeError):
        drain_before_sleep(Core("a", []), object())


def test_one_that_cannot_drain_stops_neither_the_others_nor_the_sleep(caplog: pytest.LogCaptureFixture) -> None:
    log: list[Any] = []
    allocator, cores = Allocator(log), [Core(name, log) for name in "abc"]
    for core in cores:
        drain_before_sleep(core, allocator)
    cores[1].drain = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with caplog.at_level("ERROR", logger="vllm.kvloft"):
        allocator.sleep()
    assert sorted(log[:2]) == ["a drained", "c drained"] and log[2:] == [("sleep", None)]


@pytest.mark.parametrize("is_on", [True, False])
def test_a_worker_drains_before_sleep_if_its_engine_can_sleep(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cores: list[Any] = []
    monkeypatch.setattr(worker_half, "drain_before_sleep", cores.append)
    settings: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=0, world_size=1),
        model_config=SimpleNamespace(dtype="float32", enable_sleep_mode=is_on, model="hub/name", revision=None),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    half = worker_half.WorkerHalf(settings, SimpleNamespace(num_blocks=4), Geometry(16, 1), Config())  # type: ignore[arg-type]
    assert cores == ([half.core] if is_on else [])
