"""Measures the TTFT of new prompts and the makespan of waves, and splits these times into parts.

The garbage collector runs before each measurement, so that a full collection during the measurement
is unlikely.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benches.gpu.llama import Engine, apply_model
from benches.gpu.parts import ForwardParts, Parts
from kvloft.bench.link import current_stream

WAVE_TIMEOUT_S = 60.0


def forward_parts(engine: Engine) -> ForwardParts:
    return ForwardParts(apply_model(engine.llm, lambda model: model)[0], current_stream)


def cold_prompt(
    engine: Engine, prompt: list[int], around: ForwardParts
) -> tuple[float, Parts | None]:
    """Return the TTFT of ``prompt`` in seconds, and its parts."""
    gc.collect()
    around.start()
    seconds = engine.ttft(prompt)[0]
    return seconds, around.take(seconds)


def cold_wave(
    engine: Engine, prompts: Sequence[list[int]], around: ForwardParts
) -> tuple[dict[str, Any], Parts | None]:
    """Measure a cold wave. Return the row from `wave` with "parts_ms" added, and the parts."""
    gc.collect()
    around.start()
    row = wave(engine, prompts)
    parts = around.take(row["makespan_ms"] / 1e3)
    return {**row, "parts_ms": milliseconds(parts)}, parts


def wave(engine: Engine, prompts: Sequence[list[int]], trace: Any = None) -> dict[str, Any]:
    """Send all ``prompts`` together, compute one token for each, and return the times.

    Times are in milliseconds, and completion times are relative to the wave's start. Raises
    RuntimeError if a prompt does not finish in time, because a wave without it would look faster.
    """
    if trace is not None:
        trace.start()
    begin = time.perf_counter()
    waiting = {engine.add(p, 1) for p in prompts}
    added = time.perf_counter() - begin
    times: list[float] = []
    steps: list[tuple[float, float]] = []
    while engine.engine.has_unfinished_requests() and time.perf_counter() - begin < WAVE_TIMEOUT_S:
        stepped = time.perf_counter()
        for output in engine.engine.step():
            if output.finished and any(output.request_id.startswith(name) for name in waiting):
                times.append(time.perf_counter() - begin)  # noqa: PERF401
        steps.append((time.perf_counter() - stepped, stepped - begin))
    if len(times) < len(prompts):
        engine.engine.abort_request(sorted(waiting))
        raise RuntimeError(
            f"only {len(times)} of {len(prompts)} prompts finished within {WAVE_TIMEOUT_S:.0f} s"
        )
    return {
        "makespan_ms": max(times) * 1e3,
        "mean_ms": statistics.mean(times) * 1e3,
        "finished": len(times),
        "added_ms": added * 1e3,
        "steps": len(steps),
        "first_step_ms": steps[0][0] * 1e3,
        "finished_ms": [round(seconds * 1e3, 1) for seconds in times],
        "longest_steps_ms": [
            (round(took * 1e3, 1), round(at * 1e3, 1))
            for took, at in sorted(steps, reverse=True)[:12]
        ],
        "trace": trace.summary() if trace is not None else None,
    }


def milliseconds(parts: Parts | None) -> dict[str, float]:
    """Return the parts in milliseconds by name ("before_ms" etc.), or {} if ``parts`` is None."""
    return (
        {
            name.replace("_s", "_ms"): round(seconds * 1e3, 3)
            for name, seconds in parts._asdict().items()
        }
        if parts
        else {}
    )


def medians(every: Sequence[Parts | None]) -> dict[str, float]:
    """Return the median of each part in milliseconds, or {} if no parts were measured."""
    taken = [parts for parts in every if parts is not None]
    return milliseconds(Parts(*map(statistics.median, zip(*taken, strict=True)))) if taken else {}
