"""Weights replaced in a running engine: from then on nothing is saved and nothing loaded; the same weights again change nothing."""

import gc
from pathlib import Path
from typing import Any

import pytest

from kvloft.vllm import reload
from kvloft.vllm.reload import stop_scheduler_when_reloaded, stop_worker_when_reloaded


class Core:
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

        def reload_weights(self, *args: Any, **kwargs: Any) -> str:
            self.calls.append((args, kwargs))
            return "done"

    return Worker


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.safetensors").write_text("one")
    files = reload.look(str(tmp_path))
    assert files is not None
    monkeypatch.setattr(reload, "engine_start_s", lambda: files.latest_s + 0.01)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "kwargs"), [((["weights"],), {}), ((), {"weights_path": "/other"}), ((), {"weights_iterator": iter(())})]
)
def test_other_weights_stop_the_cache_first(model: Path, args: Any, kwargs: Any) -> None:
    worker, core = new_worker(), Core(fails=True)
    stop_worker_when_reloaded(core, str(model), worker)
    stop_worker_when_reloaded(core, str(model), worker)
    running = worker()
    assert running.reload_weights(*args, **kwargs) == "done"
    assert running.calls == [(args, kwargs)]
    assert len(core.reasons) == 1 and "reload_weights" in core.reasons[0]


def test_the_same_weights_again_change_nothing(model: Path) -> None:
    worker, core = new_worker(), Core()
    stop_worker_when_reloaded(core, str(model), worker)
    worker().reload_weights()
    worker().reload_weights(weights_path=None)
    assert core.reasons == []


def test_files_written_since_the_start_are_other_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, core = new_worker(), Core()
    stop_worker_when_reloaded(core, str(model), worker)
    monkeypatch.setattr(reload, "engine_start_s", lambda: 0.0)
    worker().reload_weights()
    assert len(core.reasons) == 1


def test_an_engine_that_is_gone_is_not_told(model: Path) -> None:
    worker, core = new_worker(), Core()
    stop_worker_when_reloaded(core, str(model), worker)
    reasons = core.reasons
    del core
    gc.collect()
    worker().reload_weights("other")
    assert reasons == []


def test_vllms_own_methods_are_wrapped() -> None:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    core = Core()
    stop_worker_when_reloaded(core, "hub/name")
    stop_scheduler_when_reloaded(core, "hub/name")
    assert hasattr(Worker.reload_weights, "kvloft_stops")
    assert hasattr(EngineCore.collective_rpc, "kvloft_stops")


def test_the_scheduler_hears_when_the_engine_is_asked(model: Path) -> None:
    calls: list[Any] = []

    class Engine:
        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[str]:
            calls.append((method, timeout, args, kwargs))
            return ["done"]

    half = Core()
    for _ in range(2):
        stop_scheduler_when_reloaded(half, str(model), Engine)
    engine = Engine()
    assert engine.collective_rpc("reload_weights") == ["done"]
    engine.collective_rpc("add_lora", 3.0, ("adapter",))
    engine.collective_rpc(len, args=("adapter",))
    assert half.reasons == []
    engine.collective_rpc("reload_weights", kwargs={"weights_path": "/other"})
    assert len(half.reasons) == 1
    assert calls[1:] == [
        ("add_lora", 3.0, ("adapter",), None), (len, None, ("adapter",), None),
        ("reload_weights", None, (), {"weights_path": "/other"}),
    ]  # fmt: skip
