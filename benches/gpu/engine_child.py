"""Measures one engine in a separate process: `python -m benches.gpu.engine_child NAME JSON`.

Each measurement runs in a turn (see `turns`), while the other engines on the GPU are idle. Prints
`PHASE name` before each phase and `RESULT {...}` after it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benches.gpu.attached import compare
from benches.gpu.cold import cold_prompt, cold_wave, forward_parts, medians, milliseconds, wave
from benches.gpu.llama import Engine, count_asked, prompt_of, worker_totals
from benches.gpu.parts import Parts
from benches.gpu.peers import SERVED
from benches.gpu.turns import Turns
from kvloft.bench.link import Ceiling, HostFrames

KVLOFT = ("kvloft", "raw", "before", "groups", *SERVED)
LANDED_S = 0.1
"""Pause after a turn, so that its saves do not run during the next engine's turn."""

LINK_BYTES = 256 << 20
"""Bytes in the large copy that serves as the baseline for loads."""


@contextmanager
def turn(turns: Turns) -> Iterator[None]:
    """Run the body in this engine's next turn, and then wait `LANDED_S` for the turn's copies."""
    with turns.mine():
        yield
        time.sleep(LANDED_S)


def wait_registered(engine: Engine, options: dict[str, Any]) -> None:
    """Send a request, then wait until kvloft has registered its host memory.

    OffloadingConnector registers its memory before the engine is ready.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if options["name"] in KVLOFT:
        engine.ttft(engine.prompt(64))
        mover = get_kv_transfer_group()._worker.core._mover
        named_before = getattr(mover, "wait_pinned", lambda timeout: None)  # its former name
        getattr(mover, "wait_registered", named_before)(120.0)


def load_trace(options: dict[str, Any]) -> Any:
    """Return a `LoadTrace` around kvloft's mover if ``options`` request one, else None."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if not options.get("trace") or options["name"] not in KVLOFT:
        return None
    from benches.gpu.trace import LoadTrace

    return LoadTrace(get_kv_transfer_group()._worker.core._mover)


def phase_ttft(engine: Engine, turns: Turns, options: dict[str, Any]) -> dict[str, Any]:
    """Measure the TTFT of cached prompts, first from the connector (after emptying the GPU cache),
    then from HBM.

    Also records the cold times, which `phase_cold` measures more precisely.
    """
    context = options["context"]
    with turn(turns):
        engine.ttft(engine.prompt(2048))
        engine.ttft(engine.prompt(context))
        engine.settle()
    prompts = [engine.prompt(context) for _ in range(2)]
    before = worker_totals()
    cold, warm, hits = [], list[tuple[float, tuple[int, float], int]](), []
    asked, from_connector = count_asked(engine), list[int]()
    for prompt in prompts:
        with turn(turns):
            cold.append(engine.ttft(prompt))
            engine.settle()
    trace, traced = load_trace(options), list[dict[str, Any]]()
    middle, link, rates = before, Ceiling(HostFrames(2 * LINK_BYTES), LINK_BYTES), list[float]()
    for _ in range(options.get("rounds", 4)):
        with turn(turns):
            if options["name"] != "none":
                engine.empty_gpu_cache()
            rates += [link.gbps("load") for _ in range(3)]
        middle = worker_totals()
        for prompt in prompts:
            with turn(turns):
                if trace is not None:
                    trace.start()
                so_far, first = asked[0], engine.ttft(prompt)
                from_connector.append(asked[0] - so_far)
                traced += [trace.summary()] if trace is not None else []
                if options["name"] != "none":
                    warm.append(first)
                hits.append(engine.ttft(prompt))
    after = worker_totals()
    link.close()
    found = {
        name: [row[0] * 1e3 for row in rows]
        for name, rows in (("cold", cold), ("hbm", hits), ("warm", warm))
        if rows
    }
    loaded, gbps = (
        after.get("loaded_bytes", 0) - middle.get("loaded_bytes", 0),
        statistics.median(rates),
    )
    return {
        "link_gbps": gbps,
        **(
            of_bound(loaded / len(prompts) / gbps / 1e6, found["warm"], found["hbm"])
            if loaded
            else {}
        ),
        "context": context,
        **{f"{name}_ms": statistics.median(times) for name, times in found.items()},
        "all_ms": {name: [round(each, 2) for each in times] for name, times in found.items()},
        "cached_tokens": [row[2] for row in warm],
        "from_connector": from_connector,
        "cached_tokens_hbm": [row[2] for row in hits],
        "first_cold": [row[1] for row in cold],
        "first_hbm": [row[1] for row in hits],
        "first_warm": [row[1] for row in warm],
        "kv_bytes": engine.bytes_a_token * (context - 1),
        "loaded_bytes_last_round": loaded,
        "saved_bytes": after.get("saved_bytes", 0) - before.get("saved_bytes", 0),
        "trace": traced,
    }


def of_bound(link_ms: float, warm_ms: Sequence[float], hbm_ms: Sequence[float]) -> dict[str, Any]:
    """Return the ratio of each warm TTFT to its lower bound, and the median ratio.

    The bound is the time to transfer the bytes over the link plus the TTFT from HBM, which is
    measured immediately afterwards.
    """
    shares = [warm / (link_ms + hit) for warm, hit in zip(warm_ms, hbm_ms, strict=True)]
    return {"shares_of_bound": shares, "warm_of_bound": statistics.median(shares)}


def phase_shared(engine: Engine, turns: Turns, options: dict[str, Any]) -> dict[str, Any]:
    """Measure the TTFT of cached prompts computed by this engine or the server's other engine."""
    name, context = options["name"], options["context"]
    of = {
        who: [prompt_of(random.Random(f"{who}-{n}"), context) for n in range(2)]
        for who in options["names"]
        if who in SERVED
    }
    whose = {"own": name, "other": next((who for who in of if who != name), "")}
    if name not in SERVED or not whose["other"]:
        return {}
    with turn(turns):
        engine.ttft(engine.prompt(context))
        cold = [engine.ttft(prompt) for prompt in of[name]]
        engine.settle()
    rows: dict[str, list[tuple[float, tuple[int, float], int]]] = {"own": [], "other": []}
    for _ in range(options.get("rounds", 4) * 2):
        with turn(turns):
            engine.empty_gpu_cache()
        for nth in range(len(cold)):
            for what, who in whose.items():
                with turn(turns):
                    rows[what].append(engine.ttft(of[who][nth]))
    found: dict[str, Any] = {
        f"{what}_ms": statistics.median(row[0] for row in got) * 1e3 for what, got in rows.items()
    }
    found |= {f"{what}_cached": min(row[2] for row in got) for what, got in rows.items()}
    found["all_ms"] = {what: [round(row[0] * 1e3, 2) for row in got] for what, got in rows.items()}
    return {
        **found,
        "first_cold": [row[1] for row in cold],
        "first": {what: [row[1] for row in got] for what, got in rows.items()},
    }


def phase_cold(engine: Engine, turns: Turns, options: dict[str, Any]) -> dict[str, Any]:
    """Measure the TTFT of new prompts, and its parts."""
    context = options["context"]
    with turn(turns):
        for length in (2048, context):
            engine.ttft(engine.prompt(length))
        engine.settle()
    around = forward_parts(engine)
    seconds, parts = list[float](), list[Parts | None]()
    for _ in range(options.get("colds", 12)):
        with turn(turns):
            one, taken = cold_prompt(engine, engine.prompt(context), around)
            seconds.append(one)
            parts.append(taken)
    around.close()
    return {
        "context": context,
        "cold_ms": statistics.median(seconds) * 1e3,
        **medians(parts),
        "all_ms": [round(each * 1e3, 2) for each in seconds],
        "parts_ms": [milliseconds(each) for each in parts],
    }


def phase_wave(engine: Engine, turns: Turns, options: dict[str, Any]) -> dict[str, Any]:
    """Measure waves of eight prompts, each half the context long: cold, from HBM and from the
    connector. Each cold wave has new prompts.
    """
    trace = load_trace(options)
    around = forward_parts(engine)
    found: dict[str, Any] = {"cold": [], "hbm": None, "warm": []}
    prompts: list[list[int]] = []
    parts: list[Parts | None] = []
    for _ in range(options.get("colds", 12) // 4):
        prompts = [engine.prompt(options["context"] // 2) for _ in range(8)]
        with turn(turns):
            row, taken = cold_wave(engine, prompts, around)
            found["cold"].append(row)
            parts.append(taken)
            engine.settle()
    around.close()
    with turn(turns):
        found["hbm"] = wave(engine, prompts, trace)
    for _ in range(0 if options["name"] == "none" else options.get("rounds", 4) + 1):
        with turn(turns):
            engine.empty_gpu_cache()
            found["warm"].append(wave(engine, prompts, trace))
    for kind in ("cold", "warm"):
        if found[kind]:
            found[f"{kind}_makespan_ms"] = statistics.median(
                row["makespan_ms"] for row in found[kind]
            )
    if found["cold"]:
        found["cold_parts"] = medians(parts)
    return found


def phase_attached(engine: Engine, turns: Turns, options: dict[str, Any]) -> dict[str, Any]:
    """Measure how much time the connector adds to cold prompts, within this process."""
    with turn(turns):
        return compare(
            engine, options["context"], options.get("colds", 12), options.get("colds", 12) // 2
        )


def phase_startup(engine: Engine, turns: Turns, options: dict[str, Any]) -> dict[str, Any]:
    """Record saved chunks, failed saves and registered memory in an engine's first seconds, while
    host memory is being registered.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    rows: list[dict[str, float]] = []
    worker_totals()  # the first call starts the counters
    begin = time.perf_counter()
    with turn(turns):
        while not rows or rows[-1]["at_s"] < options.get("startup_s", 10.0):
            wave(engine, [engine.prompt(options["context"] // 4) for _ in range(4)])
            worker = (
                getattr(get_kv_transfer_group(), "_worker", None)
                if has_kv_transfer_group()
                else None
            )
            shared = getattr(worker.core._mover, "_shared", None) if worker is not None else None
            num_bytes = shared.registered.num_registered_bytes if shared is not None else 0
            rows.append(
                {
                    "at_s": time.perf_counter() - begin,
                    "pinned_gib": num_bytes / 2**30,
                    **worker_totals(),
                }
            )
    last = rows[-1]
    counts = {f"{what}_chunks": last.get(f"{what}_chunks", 0) for what in ("saved", "failed")}
    return {"rows": rows, "pinned_gib": last["pinned_gib"], **counts}


def phase_decode(engine: Engine, turns: Turns, options: dict[str, Any]) -> dict[str, Any]:
    """Measure decode steps of 16 running requests.

    The requests run alone, then while prompts of half the context are computed and saved, and then
    while these prompts are loaded.
    """
    running = [engine.prompt(1000) for _ in range(16)]
    num_runs, num_arriving = options.get("rounds", 4), 8

    def run(arriving: Sequence[list[int]]) -> list[tuple[float, str]]:
        """Return the duration in seconds and the kind of each step after the first 20.

        The kind is "before" until the first prompt arrives. Afterwards, it is "mixed" while an
        arrived prompt is unfinished, and otherwise "alone".
        """
        for prompt in running:
            engine.add([*prompt[:-8], *engine.prompt(8)], 400)
        queue, pending, steps, count = list(arriving), set[str](), list[tuple[float, str]](), 0
        while engine.engine.has_unfinished_requests():
            if count >= 60 and queue and not pending and (count - 60) % 40 == 0:
                pending.add(engine.add(queue.pop(0), 2))
            kind = "mixed" if pending else "before" if len(queue) == len(arriving) else "alone"
            begin = time.perf_counter()
            outputs = engine.engine.step()
            steps.append((time.perf_counter() - begin, kind))
            count += 1
            for output in outputs:
                if output.finished:
                    pending = {name for name in pending if not output.request_id.startswith(name)}
        return steps[20:]

    found: dict[str, Any] = {}
    runs: list[dict[str, float]] = []
    for _ in range(num_runs + 4):
        with turn(turns):
            runs.append(_percentiles("alone", [seconds for seconds, _ in run([])]))
    found["plain"] = _middle(runs)
    runs, big = [], list[list[int]]()
    for _ in range(num_runs // 2 + 1):
        big = [engine.prompt(options["context"] // 2) for _ in range(num_arriving)]
        with turn(turns):
            runs.append(_by_kind(run(big)))
            engine.settle()
    found["saving"] = _middle(runs)
    with turn(turns):
        if options["name"] != "none":
            engine.empty_gpu_cache()
        found["loading"] = _by_kind(
            run(big if options["name"] != "none" else [p[::-1] for p in big])
        )
    return found


def _middle(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each figure over the runs, and all runs.

    The median is not affected by a few runs that the host disturbed.
    """
    return {
        **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
        "runs": list(runs),
    }


def _by_kind(steps: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return percentiles by kind of step.

    "all" covers every step after the first arrival. These steps determine a running request's
    inter-token latency.
    """
    kinds = {
        kind: [seconds for seconds, other in steps if other == kind] for kind in ("alone", "mixed")
    }
    every = [seconds for seconds, kind in steps if kind != "before"]
    return {
        **_percentiles("all", every),
        **_percentiles("alone", kinds["alone"]),
        **_percentiles("mixed", kinds["mixed"]),
    }


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    marks = {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for p in (50, 90, 99)}
    return {
        **{f"{name}_p{p}_ms": value for p, value in marks.items()},
        f"{name}_steps": len(seconds),
        f"{name}_max_ms": ordered[-1] * 1e3,
    }


PHASES: dict[str, Callable[[Engine, Turns, dict[str, Any]], dict[str, Any]]] = {
    "cold": phase_cold,
    "ttft": phase_ttft,
    "wave": phase_wave,
    "decode": phase_decode,
    "shared": phase_shared,
    "attached": phase_attached,
    "startup": phase_startup,
}


def main(name: str, options: dict[str, Any]) -> None:
    import vllm

    options["name"] = name
    begin = time.perf_counter()
    print("PHASE start", flush=True)
    engine = Engine(name, options)
    result: dict[str, Any] = {
        "name": name,
        "start_s": time.perf_counter() - begin,
        "parameters": engine.num_parameters,
    }
    result["vllm"] = vllm.__version__
    result["kv_blocks"] = engine.engine.vllm_config.cache_config.num_gpu_blocks
    result["v2_runner"] = bool(getattr(engine.engine.vllm_config, "use_v2_model_runner", False))
    print("RESULT", json.dumps(result), flush=True)
    for phase in options["phases"]:
        if phase != "startup":
            wait_registered(engine, options)
        print("PHASE", phase, flush=True)
        turns = Turns(Path(options["turns"]) / phase, name, options["names"])
        begin = time.perf_counter()
        result[phase] = PHASES[phase](engine, turns, options)
        result[phase]["phase_s"] = time.perf_counter() - begin
        turns.leave()
        print("RESULT", json.dumps(result), flush=True)
    result["totals"] = worker_totals()
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # skip the engine's shutdown, which can hang in some vLLM releases
