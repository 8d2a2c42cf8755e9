"""Starts the child processes of the engine benches and reads their results.

Each engine runs in a child process, so an engine that fails to start does not affect the others.
This module does not import torch or vLLM.
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
"""The children's working directory, where `-m benches.gpu.NAME` finds this package."""
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
    """Start the module ``child`` of this package in a separate process that writes to ``log``."""
    settings = [f"{key}={value}" for key, value in env.items()]
    with log.open("w") as file:
        return subprocess.Popen(
            ["env", *settings, *command(child, *asked)],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )


def command(child: str, *asked: str) -> list[str]:
    return [sys.executable, "-m", f"benches.gpu.{child}", *asked]


def end_of(process: subprocess.Popen[bytes], timeout_s: float) -> int | str:
    """Wait for the process. Return its exit status, or "timeout" if it was killed."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        process.kill()
        process.wait()


def result_of(log: Path, status: int | str | None) -> dict[str, Any]:
    """Return the result in the last complete ``RESULT {...}`` line of a child's log.

    Adds the key "error" if the child failed.
    """
    text = log.read_text(errors="replace")
    found = [
        line[7:]
        for line in text.splitlines(keepends=True)
        if line.startswith("RESULT ") and line.endswith("\n")
    ]
    result: dict[str, Any] = json.loads(found[-1]) if found else {}
    if status != 0:
        why = (
            "did not finish in time (--timeout)"
            if status == "timeout"
            else f"exited with status {status}"
        )
        result["error"] = f"{why}; end of {log}:\n{text[-1500:] or '(empty)'}"
    return result


def errors_of(results: Mapping[str, Any]) -> list[str]:
    """Return one message per failed engine."""
    return [f"{name} {result['error']}" for name, result in results.items() if "error" in result]


def can_run(bench: str) -> bool:
    """Return True if the machine has a GPU; otherwise print the reason and return False."""
    try:
        return gpu_bytes() > 0
    except UnsupportedError as error:
        print(f"kvloft: the {bench} benchmark cannot run on this machine: {error}", file=sys.stderr)
        return False


def verdict(problems: Sequence[str]) -> int:
    """Print each problem to stderr and return the exit status."""
    for problem in problems:
        print(f"kvloft: {problem}", file=sys.stderr)
    return 1 if problems else 0
