"""Tests how benchmarks split the time to first token into parts.

The tests run a torch model on the emulated GPU, so they do not need a GPU.
"""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, repeat
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from emulated_gpu import Gpu, emulated

from benches.gpu import attached, cold, engine, engine_child, parts
from benches.gpu.parts import ForwardParts, Parts
from kvloft.transfer.cuda import lanes


class Model(torch.nn.Module):
    """A model whose forward pass enqueues 7 commands."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def forward(self) -> None:
        for _ in range(7):
            self.gpu.compute.enqueue(lambda: None)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Disable garbage collection except where a test triggers it, and check that no GC callback
    remains.
    """
    gc.disable()
    before = list(gc.callbacks)
    yield
    gc.enable()
    assert gc.callbacks == before


@pytest.mark.usefixtures("no_collections")
def test_the_gpus_part_is_from_the_first_forward_to_the_end_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with emulated(1) as gpu:
        monkeypatch.setattr(parts, "driver", lanes.driver)
        clock = chain([0.0, 10.0, 10.5, 20.0, 20.25], repeat(30.0))
        monkeypatch.setattr(
            parts,
            "time",
            SimpleNamespace(perf_counter=lambda: next(clock), monotonic=time.monotonic),
        )
        model = Model(gpu)
        around = ForwardParts(model, lambda: gpu.compute)
        assert around.take(1.0) is None, "there was no forward pass"
        for _ in range(2):  # one iteration per request
            around.start()
            for _ in range(3):
                model()
                gpu.compute.enqueue(lambda: None)  # the sampling command
            found = around.take(100.0)
            assert found is not None
            # An event completes after all earlier work. After the first event, the GPU runs 3
            # forward passes, 2 sampling commands, 3 end events and 2 start events.
            assert found.gpu_s == 3 * 7 + 2 + 3 + 2
            assert found.between_s == 2 * 2, "one sampling command and one event"
            assert found.before_s in (0.5, 0.25)
            assert found.before_s + found.gpu_s + found.after_s == 100.0
        around.start()
        model()
        assert (found := around.take(100.0)) is not None and found.collected_s == 0
        model()
        gc.collect()
        assert (found := around.take(100.0)) is not None and found.collected_s > 0
        around.start()
        model()
        assert (found := around.take(100.0)) is not None and found.collected_s == 0
        around.start()
        for _ in range(parts.MAX_FORWARDS + 1):
            model()
        assert around.take(100.0) is None, "more forward passes than events"
        around.start()
        for _ in range(parts.MAX_FORWARDS):
            model()
        assert around.take(100.0) is not None
        around.start()
        around.close()
        model()
        assert around.take(100.0) is None, "close() did not remove a hook"


class Wave:
    """An engine that finishes one request per step.

    With ``is_graph``, the forward pass in a step does not call the model's hooks.
    """

    llm = None

    def __init__(self, model: Model, *, is_graph: bool) -> None:
        self.engine, self.model, self.is_graph = self, model, is_graph
        self.waiting: list[str] = []
        self.num_added = 0

    def prompt(self, num_tokens: int) -> list[int]:
        return [1]

    def add(self, prompt: list[int], num_tokens: int) -> str:
        self.num_added += 1
        self.waiting.append(f"r{self.num_added}")
        return self.waiting[-1]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        if not self.is_graph:
            self.model()
        return [SimpleNamespace(finished=True, request_id=f"{self.waiting.pop(0)}-x")]

    def settle(self) -> None: ...

    empty_gpu_cache = settle

    def ttft(self, prompt: list[int]) -> tuple[float, tuple[int, float], int]:
        self.model()
        return 0.5, (1, 0.0), 0


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Return a model on the emulated GPU, and make the benches measure it."""
    with emulated(1) as gpu:
        found = Model(gpu)
        monkeypatch.setattr(parts, "driver", lanes.driver)
        monkeypatch.setattr(cold, "apply_model", lambda llm, function: [function(found)])
        monkeypatch.setattr(cold, "current_stream", lambda: gpu.compute)
        monkeypatch.setattr(engine_child, "LANDED_S", 0)
        yield found


@pytest.mark.parametrize("is_graph", [False, True])
def test_waves_are_split_into_parts_if_forwards_are_visible(is_graph: bool, model: Model) -> None:
    turns: Any = SimpleNamespace(mine=nullcontext)
    wave: Any = Wave(model, is_graph=is_graph)
    found = engine_child.phase_wave(
        wave, turns, {"context": 64, "name": "kvloft", "colds": 12, "rounds": 1}
    )
    assert len(found["cold"]) == 3 and len(found["warm"]) == 2 and found["cold_makespan_ms"] > 0
    if is_graph:
        assert found["cold_parts"] == {} and all(row["parts_ms"] == {} for row in found["cold"])
    else:
        assert found["cold_parts"]["gpu_ms"] == 1e3 * (8 * 7 + 8 + 7)
        assert (
            set(found["cold_parts"]) == set(engine.COLD_PARTS) == set(found["cold"][0]["parts_ms"])
        )
        of_first = found["cold"][0]["parts_ms"]
        assert sum(of_first[f"{part}_ms"] for part in ("before", "gpu", "after")) == pytest.approx(
            found["cold"][0]["makespan_ms"], abs=0.01
        )


def test_one_disturbed_prompt_does_not_decide_and_one_without_parts_does_not_count() -> None:
    every = [Parts(*(float(n) for _ in range(5))) for n in (1, 2, 90)]
    assert cold.medians([*every, None]) == dict.fromkeys(engine.COLD_PARTS, 2000.0)
    assert cold.medians([None]) == {} == cold.milliseconds(None)


def test_a_wave_that_hangs_is_no_fast_wave(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    steps, clock = iter(range(1000)), SimpleNamespace(now=0.0)

    class Hanging(Wave):
        def step(self) -> list[Any]:
            if next(steps) < 3:
                return [
                    SimpleNamespace(finished=False, request_id=f"{self.waiting[0]}-x"),
                    *super().step(),
                ]
            clock.now += 0.01
            return []

        def abort_request(self, names: list[str]) -> None:
            aborted.extend(names)

    monkeypatch.setattr(cold, "WAVE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(cold, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    with pytest.raises(RuntimeError, match="only 3 of 8 prompts finished within 0 s"):
        cold.wave(Hanging(model, is_graph=True), [[1]] * 8)  # type: ignore[arg-type]
    assert aborted == [f"r{n}" for n in range(1, 9)]


def test_a_waves_makespan_is_until_its_last_prompt(model: Model) -> None:
    class Slow(Wave):
        def step(self) -> list[Any]:
            time.sleep(0.02)
            return super().step()

    row = cold.wave(Slow(model, is_graph=True), [[1]] * 3)  # type: ignore[arg-type]
    assert (
        row["finished"] == 3
        and row["makespan_ms"] >= 60
        and row["makespan_ms"] == pytest.approx(row["finished_ms"][-1], abs=0.1)
    )


def test_a_trace_starts_with_its_wave(model: Model) -> None:
    said: list[str] = []
    trace = SimpleNamespace(start=lambda: said.append("start"), summary=lambda: said)
    assert cold.wave(Wave(model, is_graph=False), [[1]], trace)["trace"] == ["start"]  # type: ignore[arg-type]
    assert cold.wave(Wave(model, is_graph=False), [[1]])["trace"] is None  # type: ignore[arg-type]


def test_with_and_without_a_connector_take_turns_and_neither_is_always_first(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the connector attached, a forward pass has one more command, so that the test detects a
    time in the wrong column.
    """
    away: list[str] = []
    order: list[str] = []

    @contextmanager
    def without(engine: Any) -> Iterator[None]:
        assert engine is wave, "expected vLLM's engine, not the bench's wrapper"
        away.append("yes")
        yield
        away.clear()

    collected = gc.collect

    def collect() -> int:
        assert settled == [True], "saves must complete before the collection"
        settled.clear()
        return collected()

    def forward() -> None:
        assert settled == [] or len(order) < 2, "garbage must be collected before this pass"
        order.append("detached" if away else "attached")
        for _ in range(7 + (not away)):
            model.gpu.compute.enqueue(lambda: None)

    settled: list[bool] = []
    monkeypatch.setattr(Wave, "settle", lambda self: settled.append(True))
    monkeypatch.setattr(cold, "gc", SimpleNamespace(collect=collect))
    monkeypatch.setattr(attached, "detached", without)
    monkeypatch.setattr(model, "forward", forward)
    wave: Any = Wave(model, is_graph=False)
    turns: Any = SimpleNamespace(mine=nullcontext)
    found = engine_child.phase_attached(wave, turns, {"context": 64, "name": "kvloft", "colds": 4})
    assert order[2:10] == ["attached", "detached", "detached", "attached"] * 2
    assert order[10:] == ["attached"] * 8 + ["detached"] * 16 + ["attached"] * 8
    prompts, waves = found["prompts"], found["waves"]
    for kind, length in (("attached", 8), ("detached", 7)):
        assert prompts[kind]["gpu_ms"] == 1e3 * (length + 1), "includes the event before it"
        assert waves[kind]["gpu_ms"] == 1e3 * (8 * length + 8 + 7)
        assert (
            len(prompts[kind]["all_ms"]) == len(prompts[kind]["parts_ms"]) == 4
            and prompts[kind]["ms"] == 500.0
        )
        assert len(waves[kind]["all_ms"]) == 2
    rows = engine.table({"kvloft": {"attached": found}})[1:]
    assert rows[0] == ("in one process, connector detached: TTFT cold, ms", "500.00")
    assert len(rows) == 4 * (1 + len(engine.COLD_PARTS))


def test_a_connector_is_restored_after_any_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(_KV_CONNECTOR_AGENT="agent")
    for name in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules["vllm.distributed.kv_transfer"], "kv_transfer_state", state, raising=False
    )
    scheduler = SimpleNamespace(connector="connector", defer_block_free=True)
    disabled: list[bool] = []
    runner = SimpleNamespace(kv_connector=SimpleNamespace(set_disabled=disabled.append))
    executor = SimpleNamespace(
        driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    )
    scheduler.has_requests = lambda: False
    core = SimpleNamespace(scheduler=scheduler, model_executor=executor, batch_queue=None)
    is_busy = False
    engine: Any = SimpleNamespace(
        has_unfinished_requests=lambda: is_busy, engine_core=SimpleNamespace(engine_core=core)
    )

    def seen() -> tuple[Any, ...]:
        return (
            scheduler.connector,
            scheduler.defer_block_free,
            state._KV_CONNECTOR_AGENT,
            disabled[-1:],
        )

    with pytest.raises(KeyError), attached.detached(engine):
        assert seen() == (None, False, None, [True])
        raise KeyError
    assert seen() == ("connector", True, "agent", [False])
    is_busy = True
    with (
        pytest.raises(RuntimeError, match="cannot be attached or detached"),
        attached.detached(engine),
    ):
        pass
    assert seen() == ("connector", True, "agent", [False])
    assert disabled == [True, False]
    is_busy, core.batch_queue, engine.step = False, ["a step"], lambda: None
    monkeypatch.setattr(attached, "REST_S", 0.1)
    with pytest.raises(RuntimeError, match="did not become idle"), attached.detached(engine):
        pass
    assert disabled == [True, False]
