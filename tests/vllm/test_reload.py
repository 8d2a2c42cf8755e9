"""Tests that kvloft stops saving and loading when the weights of a running engine change.

Reloading the same weights has no effect.
"""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloft.vllm.identity import reload
from kvloft.vllm.identity.reload import WeightsWatch
from kvloft.vllm.patches import ADD_ADAPTER, ENGINE_RPC, WORKER_RELOAD, listen
from kvloft.vllm.scheduler_half import SchedulerHalf


class Core:
    """Replaces the part of the connector that watches the weights and stops caching."""

    watch: WeightsWatch

    def __init__(self, *, fails: bool = False) -> None:
        self.reasons: list[str] = []
        self.fails = fails

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.fails:
            raise RuntimeError("a bug")


def new_worker() -> Any:
    class Worker:
        def __init__(self) -> None:
            self.calls: list[Any] = []
            self.during: Any = lambda: None

        def reload_weights(self, *args: Any, **kwargs: Any) -> str:
            self.during()
            self.calls.append((args, kwargs))
            return "done"

    return Worker


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's ModelConfig for a directory that is older than the engine."""
    (tmp_path / "model.safetensors").write_text("one")
    files = reload.look(str(tmp_path))
    assert files is not None
    monkeypatch.setattr(reload, "engine_start_s", lambda: files.latest_s + 0.01)
    return SimpleNamespace(model=str(tmp_path), revision=None)


AUTO, DUMMY = SimpleNamespace(load_format="auto"), SimpleNamespace(load_format="dummy")


def watched(model: Any, load: Any = AUTO) -> tuple[Any, Core]:
    """Return a worker, and the core that the worker's watch stops."""
    worker, core = new_worker(), Core()
    core.watch = WeightsWatch(model, load, core.stop)
    for _ in range(2):
        listen(WORKER_RELOAD, core.watch.hear_reload, worker)
    return worker(), core


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((["weights"],), {}), ((), {"weights_path": "/other"}), ((), {"weights_iterator": iter(())})],
)
def test_other_weights_stop_the_cache(model: Any, args: Any, kwargs: Any) -> None:
    worker, core = watched(model)
    core.fails = True
    assert worker.reload_weights(*args, **kwargs) == "done"
    assert worker.calls == [(args, kwargs)]
    assert core.reasons


def test_the_same_weights_again_change_nothing(model: Any) -> None:
    worker, core = watched(model)
    worker.reload_weights()
    worker.reload_weights(weights_path=None)
    assert core.reasons == []


@pytest.mark.parametrize("what", ["written", "gone", "too many", "newer at the start"])
def test_other_files_are_other_weights(
    model: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, core = watched(model)
    file = Path(model.model) / "model.safetensors"
    if what == "written":
        file.write_text("two")
    elif what == "gone":
        file.unlink()
    elif what == "too many":
        monkeypatch.setattr("kvloft.vllm.identity.weights.MAX_ENTRIES", 1)
    else:
        monkeypatch.setattr(reload, "engine_start_s", lambda: 0.0)
    worker.reload_weights()
    assert core.reasons


def test_weights_that_were_made_up_are_others_than_those_of_a_file(model: Any) -> None:
    worker, core = watched(model, DUMMY)
    worker.reload_weights()
    assert core.reasons


def test_a_newer_commit_of_the_hub_is_seen_when_it_was_loaded(hub_cache: Any) -> None:
    hub_cache("hub/name", "config.json", "c0ffee")
    worker, core = watched(SimpleNamespace(model="hub/name", revision=None))
    worker.reload_weights()
    assert core.reasons == []
    worker.during = lambda: hub_cache("hub/name", "config.json", "decade")
    worker.reload_weights()
    assert core.reasons


def test_a_model_of_which_nothing_is_seen_may_be_another() -> None:
    worker, core = watched(SimpleNamespace(model="hub/unknown", revision=None))
    worker.reload_weights()
    assert core.reasons


def test_a_collected_engine_is_not_notified(model: Any) -> None:
    worker, core = watched(model)
    reasons = core.reasons
    del core
    gc.collect()
    worker.reload_weights("other")
    assert reasons == []


class Engine:
    """The part of vLLM's engine core that the tests call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[str]:
        self.calls.append((method, timeout, args, kwargs))
        return ["done"]


def test_rpcs_of_another_engine_in_the_process_are_ignored(model: Any) -> None:
    half, own = Core(), object()
    watch = WeightsWatch(model, AUTO, half.stop, is_of=lambda engine: engine is own)
    assert watch.hear_rpc(object(), "train_on") is None and not half.reasons
    assert watch.hear_rpc(own, "train_on") is not None and half.reasons


@pytest.mark.parametrize(
    ("args", "kwargs", "stops"),
    [
        (("reload_weights",), {}, False),
        (("add_lora", 3.0, ("adapter",)), {}, True),
        (("sleep",), {"args": (2,)}, True),
        (("list_loras",), {}, False),
        (("reload_weights",), {"kwargs": {"weights_path": "/other"}}, True),
        (("reload_weights", None, ("x",)), {}, True),
        ((), {"method": "reload_weights", "args": ("x",)}, True),
        ((len,), {"args": ("adapter",)}, True),
        ((["not", "hashable"],), {}, True),
        (("apply_model",), {"args": (len,)}, True),
        (("update_config",), {}, True),
        (("train_on",), {}, True),
        (("get_model_inspection",), {}, False),
        (("synchronize_device",), {}, False),
    ],
)
def test_engine_rpcs_reach_the_weights_watch(
    model: Any, args: Any, kwargs: Any, stops: bool
) -> None:
    class Asked(Engine):
        collective_rpc = Engine.collective_rpc

    half, engine = Core(), Asked()
    half.watch = WeightsWatch(model, AUTO, half.stop)
    for _ in range(2):
        listen(ENGINE_RPC, half.watch.hear_rpc, Asked)
    assert engine.collective_rpc(*args, **kwargs) == ["done"]
    assert bool(half.reasons) == stops
    assert len(engine.calls) == 1


def test_an_adapter_is_seen_before_it_is_loaded() -> None:
    log: list[Any] = []

    class Adding:
        def add_lora(self, lora_request: Any) -> bool:
            log.append(("loaded", lora_request))
            return True

    class Names:
        def identify(self, lora: Any) -> None:
            log.append(("seen", lora))
            raise OSError

    half = object.__new__(SchedulerHalf)
    half._adapters = Names()  # type: ignore[assignment]
    for _ in range(2):
        listen(ADD_ADAPTER, half.see_adapter, Adding)
    assert Adding().add_lora("a") is True
    assert log == [("seen", "a"), ("loaded", "a")]
    other = Adding()
    other.scheduler = SimpleNamespace(connector=object())  # type: ignore[attr-defined]
    assert other.add_lora("b") is True
    assert log[2:] == [("loaded", "b")], "another engine in this process"


@pytest.mark.parametrize(
    ("lora", "num_preemptions", "checked"),
    [("a", 1, ["a"]), ("a", 0, []), (None, 1, [])],
)
def test_an_adapter_is_checked_again_when_its_request_resumes(
    lora: str | None, num_preemptions: int, checked: list[str]
) -> None:
    admitted, seen = list[Any](), list[Any]()
    half: Any = object.__new__(SchedulerHalf)
    half._new_tables = list
    half._adapters = SimpleNamespace(check_again=lambda lora: seen.append((lora, len(admitted))))
    half.core = SimpleNamespace(admit=lambda *args: admitted.append(args))
    request = SimpleNamespace(request_id="r", lora_request=lora, num_preemptions=num_preemptions)
    half.admit(request, (), 0)
    assert seen == [(each, 1) for each in checked], "after the load has been planned"
