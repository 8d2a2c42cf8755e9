"""Times of new prompts, one at a time or eight together, and the parts of these times.

Python's garbage is collected before each, so that only its own is collected during it. Must not
depend on connectors.
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
    """Around the model of ``engine``."""
    return ForwardParts(apply_model(engine.llm, lambda model: model)[0], current_stream)


def cold_prompt(
    engine: Engine, prompt: list[int], around: ForwardParts
) -> tuple[float, Parts | None]:
    """Return its TTFT in seconds and the parts of it."""
    gc.collect()
    around.start()
    seconds = engine.ttft(prompt)[0]
    return seconds, around.take(seconds)


def cold_wave(
    engine: Engine, prompts: Sequence[list[int]], around: ForwardParts
) -> tuple[dict[str, Any], Parts | None]:
    """As `wave`, with its parts, which the row contains as "parts_ms", too."""
    gc.collect()
    around.start()
    row = wave(engine, prompts)
    parts = around.take(row["makespan_ms"] / 1e3)
    return {**row, "parts_ms": milliseconds(parts)}, parts


def wave(engine: Engine, prompts: Sequence[list[int]], trace: Any = None) -> dict[str, Any]:
    """One token for each of ``prompts``, sent together: times in milliseconds since then.

    Raises RuntimeError if some are not finished in time: the others would look like a fast wave.
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
                # Read the clock after each output.
                times.append(time.perf_counter() - begin)  # noqa: PERF401
        steps.append((time.perf_counter() - stepped, stepped - begin))
    if len(times) < len(prompts):
        engine.engine.abort_request(sorted(waiting))
        raise RuntimeError(
            f"{len(times)} of {len(prompts)} prompts had their token after {WAVE_TIMEOUT_S:.0f} s"
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
    """By the names that results have: "before_ms" and so on; {} for None."""
    return (
        {
            name.replace("_s", "_ms"): round(seconds * 1e3, 3)
            for name, seconds in parts._asdict().items()
        }
        if parts
        else {}
    )


def medians(every: Sequence[Parts | None]) -> dict[str, float]:
    """Medians of each part in milliseconds; empty without parts."""
    taken = [parts for parts in every if parts is not None]
    return milliseconds(Parts(*map(statistics.median, zip(*taken, strict=True)))) if taken else {}
