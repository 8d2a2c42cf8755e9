"""Measures, in a single process, how much time a connector adds to cold prompts.

The connector is alternately attached and detached between prompts. Comparing engines in separate
processes would be less precise: on an H200, identical engines differ by -0.2% to +0.7%, as much as
the connector adds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from benches.gpu.cold import cold_prompt, cold_wave, forward_parts, medians, milliseconds
from benches.gpu.llama import Engine
from benches.gpu.parts import Parts

REST_S = 60.0


@contextmanager
def detached(engine: Any) -> Iterator[None]:
    """Detach the connector from ``engine``, an in-process LLMEngine, and reattach it on exit.

    Raises RuntimeError if requests are running on entry or exit, because the connector tracks their
    blocks across steps.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    core = engine.engine_core.engine_core
    _bring_to_rest(engine, core)
    scheduler = core.scheduler
    in_runner = getattr(
        core.model_executor.driver_worker.worker.model_runner, "kv_connector", None
    )  # exists only in vLLM's newer model runner
    settings = {"connector": None, "defer_block_free": False}
    kept = {name: getattr(scheduler, name) for name in settings if hasattr(scheduler, name)}
    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    try:
        for name in kept:
            setattr(scheduler, name, settings[name])
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        if in_runner is not None:
            in_runner.set_disabled(True)
        yield
        _bring_to_rest(engine, core)
    finally:
        if in_runner is not None:
            in_runner.set_disabled(False)
        kv_transfer_state._KV_CONNECTOR_AGENT = agent
        for name, value in kept.items():
            setattr(scheduler, name, value)


def _bring_to_rest(engine: Any, core: Any) -> None:
    """Wait until no step is in flight.

    With async scheduling, a step is still in flight when the last request finishes. Attaching or
    detaching the connector at this point would lose the connector's output for that step. Raises
    RuntimeError if requests are running.
    """
    deadline = time.monotonic() + REST_S
    while not engine.has_unfinished_requests() and (
        core.batch_queue or core.scheduler.has_requests()
    ):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not become idle within {REST_S:.0f} s")
        engine.step()
    if engine.has_unfinished_requests():
        raise RuntimeError(
            "the connector cannot be attached or detached while requests are running"
        )


def compare(engine: Engine, context: int, num_prompts: int, num_waves: int) -> dict[str, Any]:
    """Measure cold prompts and waves with and without the connector.

    A prompt has ``context`` tokens. A wave is eight prompts of half that length. Prompts are
    measured ``num_prompts`` times and waves ``num_waves`` times, each with and without the
    connector.

    Returns {"context": context, "prompts": {"attached": times, "detached": times}, "waves": {...}}.
    Times hold the median ("ms"), the median of each part, and all values ("all_ms", "parts_ms").
    """
    for _ in range(2):
        engine.ttft(engine.prompt(context))
    around = forward_parts(engine)

    def prompt(tokens: Sequence[list[int]]) -> tuple[float, Parts | None]:
        seconds, parts = cold_prompt(engine, tokens[0], around)
        return seconds * 1e3, parts

    def wave(tokens: Sequence[list[int]]) -> tuple[float, Parts | None]:
        row, parts = cold_wave(engine, tokens, around)
        return float(row["makespan_ms"]), parts

    try:
        return {
            "context": context,
            "prompts": _in_turns(engine, prompt, num_prompts, [context]),
            "waves": _in_turns(engine, wave, num_waves, [context // 2] * 8),
        }
    finally:
        around.close()


def _in_turns(
    engine: Engine,
    measure: Callable[[Sequence[list[int]]], tuple[float, Parts | None]],
    count: int,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Run ``count`` pairs of attached and detached measurements, alternating their order.

    Waits for pending saves before each measurement.
    """
    times: dict[str, list[float]] = {"attached": [], "detached": []}
    parts: dict[str, list[Parts | None]] = {"attached": [], "detached": []}
    for number in range(count):
        for kind in sorted(times, reverse=number % 2 == 1):
            prompts = [engine.prompt(length) for length in lengths]
            engine.settle()
            with detached(engine.engine) if kind == "detached" else nullcontext():
                took_ms, taken = measure(prompts)
            times[kind].append(took_ms)
            parts[kind].append(taken)
    return {
        kind: {
            "ms": statistics.median(times[kind]),
            **medians(parts[kind]),
            "all_ms": [round(each, 2) for each in times[kind]],
            "parts_ms": [milliseconds(each) for each in parts[kind]],
        }
        for kind in times
        if times[kind]
    }
