"""`kvloft bench engine`: plain vLLM, vLLM's OffloadingConnector and kvloft, one after the other on the same GPU and prompts.

Each runs in a process of its own (`engine_child`); only the phase `cold` has all of them at once, in turns. It must not import
vLLM itself, so that one that cannot start costs only its own row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONNECTORS = ("none", "native", "kvloft")
CHILD_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    "VLLM_PLUGINS": "",
}  # fmt: skip


def run(
    *, connectors: Sequence[str], phases: Sequence[str], options: dict[str, Any], log_dir: Path, timeout_s: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """{connector: result of its phases, or {"error": ...}}; logs go to ``log_dir``."""
    log_dir.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        asked = {"model_dir": f"{folder}/model", "turns": folder, "names": list(connectors), **options}
        if "cold" in phases:
            progress("cold prompts, in turns")
            shared = shared_gpu(options["num_blocks"], options.get("model", {}))
            with ThreadPoolExecutor() as pool:
                together = {
                    name: pool.submit(
                        _child, name, {**asked, "model_dir": f"{folder}/{name}", "phases": ["cold"], "llm": shared},
                        log_dir / f"engine_cold_{name}.log", deadline - time.monotonic(),
                    )
                    for name in connectors
                }  # fmt: skip
            results = {name: child.result() for name, child in together.items()}
        alone = [phase for phase in phases if phase != "cold"]
        for name in connectors if alone else ():
            progress(name)
            found = _child(name, {**asked, "phases": alone}, log_dir / f"engine_{name}.log", deadline - time.monotonic())
            results[name] = {**results.get(name, {}), **found}
    return results


def shared_gpu(num_blocks: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's settings for engines that start on a GPU together: none measures what the others leave free."""
    block_bytes = 16 * 2 * int(model.get("num_key_value_heads", 8)) * 128 * 2 * int(model.get("num_hidden_layers", 32))
    return {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": num_blocks * block_bytes}


def _child(name: str, options: dict[str, Any], log: Path, timeout_s: float) -> dict[str, Any]:
    settings = [f"{key}={value}" for key, value in CHILD_ENV.items()]
    command = ["env", *settings, sys.executable, "-m", "kvloft.bench.engine_child", name, json.dumps(options)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            status: int | str = process.wait(max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = "timeout"
    return result_of(log, status)


def result_of(log: Path, status: int | str | None) -> dict[str, Any]:
    """What a child printed last as ``RESULT {...}``, with an "error" if it did not end well."""
    text = log.read_text(errors="replace")
    found = [line[7:] for line in text.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(found[-1]) if found else {}
    if status != 0:
        result["error"] = f"ended with {status}: {text[-1500:]}"
    return result


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows (what, then one column a connector) of everything that was measured by all."""
    names = list(results)
    rows: list[tuple[str, ...]] = [("", *names)]

    def row(label: str, *path: str) -> None:
        values = []
        for name in names:
            value: Any = results[name]
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            values.append(f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value))
        if any(value != "-" for value in values):
            rows.append((label, *values))

    row("TTFT cold, in turns, ms", "cold", "cold_ms")
    for what in ("cold", "warm", "hbm"):
        row(f"TTFT {what}, ms", "ttft", f"{what}_ms")
    row("bytes loaded, last round", "ttft", "loaded_bytes_last_round")
    row("8 at once: cold makespan, ms", "wave", "cold", "makespan_ms")
    row("8 at once: warm makespan, ms", "wave", "warm_makespan_ms")
    for what in ("plain", "plain_again", "saving", "loading"):
        for load in ("alone", "mixed"):
            for mark in ("p50", "p99"):
                row(f"decode {what}, steps {load}: {mark}, ms", "decode", what, f"{load}_{mark}_ms")
    return rows


def same_tokens(results: dict[str, Any]) -> dict[str, Any]:
    """Whether greedy tokens agree: between connectors, and cold against warm; and that a load skipped is not the same."""
    found: dict[str, Any] = {}
    plain = results.get("none", {}).get("tokens", {})
    for name, result in results.items():
        tokens = result.get("tokens", {})
        for kind in ("cold", "hbm", "warm", "skipped_load"):
            if kind in tokens and plain:
                found[f"{name} {kind} = none cold"] = [_same(a, b) for a, b in zip(tokens[kind], plain["cold"], strict=True)]
        load, plain_load = result.get("load", {}), results.get("none", {}).get("load", {})
        for kind in ("tokens", "again"):
            if kind in load and plain_load:
                pairs = list(zip(load[kind], plain_load["tokens"], strict=True))
                found[f"{name} load {kind} = none"] = f"{sum(a == b for a, b in pairs)} of {len(pairs)}"
    return found


def _same(a: Sequence[int], b: Sequence[int]) -> str:
    """How many of the first tokens agree."""
    count = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{count}/{max(len(a), len(b))}"
