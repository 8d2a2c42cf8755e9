"""Shared by the benches of whole engines, except for their figures: processes of one engine each,
and the end of a bench.

It must not import torch or vLLM, so that an engine that cannot start costs only its own row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvloft.bench.command import gpu_bytes
from kvloft.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
"""Where `-m benches.gpu.NAME` finds this package."""
CHILD_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "VLLM_PLUGINS": "",
}


def start(
    log: Path, child: str, *asked: str, env: Mapping[str, str] = CHILD_ENV
) -> subprocess.Popen[bytes]:
    """The module ``child`` of this package in a separate process, with ``log`` as its output."""
    settings = [f"{key}={value}" for key, value in env.items()]
    with log.open("w") as file:
        return subprocess.Popen(
            ["env", *settings, *command(child, *asked)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )


def command(child: str, *asked: str) -> list[str]:
    """How ``child`` is started."""
    return [sys.executable, "-m", f"benches.gpu.{child}", *asked]


def end_of(process: subprocess.Popen[bytes], timeout_s: float) -> int | str:
    """Wait for its exit status, or "timeout" after a kill."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        process.kill()
        process.wait()


def result_of(log: Path, status: int | str | None) -> dict[str, Any]:
    """A child's last whole line ``RESULT {...}``; with an "error" if it failed."""
    text = log.read_text(errors="replace")
    found = [
        line[7:]
        for line in text.splitlines(keepends=True)
        if line.startswith("RESULT ") and line.endswith("\n")
    ]
    result: dict[str, Any] = json.loads(found[-1]) if found else {}
    if status != 0:
        why = "was not done in time (--timeout)" if status == "timeout" else f"ended with {status}"
        result["error"] = f"{why}; the end of {log}:\n{text[-1500:] or '(it is empty)'}"
    return result


def errors_of(results: Mapping[str, Any]) -> list[str]:
    """A line for each engine that failed."""
    return [f"{name} {result['error']}" for name, result in results.items() if "error" in result]


def can_run(bench: str) -> bool:
    """Return whether there is a GPU; otherwise print a line."""
    try:
        return gpu_bytes() > 0
    except UnsupportedError as error:
        print(f"kvloft: the {bench} bench cannot run here: {error}", file=sys.stderr)
        return False


def verdict(problems: Sequence[str]) -> int:
    """The exit status; each problem is a line on stderr."""
    for problem in problems:
        print(f"kvloft: {problem}", file=sys.stderr)
    return 1 if problems else 0
