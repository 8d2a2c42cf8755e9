"""Runs the engines of `kvloft check` as child processes that execute `kvloft.vllm.check`.

This module handles processes, event files and logs. It does not interpret prompts or outputs.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloft.config.environment import child_environment

POLL_S = 0.2
MODULE = "kvloft.vllm.check"
LATE, GONE = "it did not finish", "its process exited"
TAIL_LINES = 30
MAX_ERROR_CHARS = 600
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
"""With these variables, vLLM runs the engine core in the child process, where the scheduler is
accessible, and sends no usage statistics."""
OURS = re.compile(
    r"(?:\b(?:Unsupported|Config|Layout|Store)Error|kvloft check MODEL --: error): (.+)"
)
THEIRS = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .+)")
CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed")


@dataclass(slots=True)
class Ran:
    """The events that one engine reported.

    If the engine failed, ``error`` is the reason and ``tail`` holds the end of the engine's log.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    tail: str = ""

    def get(self, event: str) -> dict[str, Any]:
        """Return the first event with this name, or an empty dict if there is none."""
        return next((each for each in self.events if each["event"] == event), {})


def run_engine(
    name: str, job: dict[str, Any], *, folder: Path, limit_s: float, progress: Callable[[str], None]
) -> Ran:
    """Run ``job`` in a new process for at most ``limit_s`` seconds.

    All of the engine's processes have exited when this function returns.
    """
    events, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    events.touch()
    (folder / f"{name}.json").write_text(json.dumps(job | {"events": str(events)}))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(folder / f"{name}.json")],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=child_environment(ENVIRONMENT),
        )
    try:
        ran = _watch(process, events, limit_s, progress)
    finally:
        _kill(process)
    if ran.error is not None:
        text = log.read_text(errors="replace")
        ran.error, ran.tail = _cause(text, ran.error), "\n".join(text.splitlines()[-TAIL_LINES:])
    return ran


def _watch(
    process: subprocess.Popen[bytes], path: Path, limit_s: float, progress: Callable[[str], None]
) -> Ran:
    """Read events until the engine is done, exits or exceeds its time limit."""
    ran, begin, part = Ran(), time.monotonic(), ""
    with path.open() as file:
        while True:
            # Poll before reading, so that no event of an exited process is missed.
            is_gone = process.poll() is not None
            *lines, part = (part + file.read()).split("\n")
            for line in lines:
                ran.events.append(json.loads(line))
                progress(f"{_name_of(ran.events[-1])} ({time.monotonic() - begin:.0f} s)")
            last = ran.events[-1] if ran.events else {"event": "start"}
            if last["event"] == "failed":
                ran.error = last["error"]
            elif is_gone and last["event"] != "done":
                ran.error = f"{GONE} with status {process.returncode}"
            elif time.monotonic() - begin > limit_s:
                ran.error = (
                    f"{LATE} within {limit_s:g} s (--time-limit); its last event was "
                    f"{_name_of(last)!r}"
                )
            elif last["event"] != "done":
                time.sleep(POLL_S)
                continue
            return ran


def _name_of(event: dict[str, Any]) -> str:
    return str(event["name"] if event["event"] == "pass" else event["event"])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes in the session.

    No data is lost, because an engine that reported "done" has closed its store.
    """
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(log: str, error: str) -> str:
    """Return the cause of a failure.

    An error in the log from kvloft or vLLM's argument parser is the cause. Otherwise, the cause is
    ``error``, or the log's first exception if ``error`` merely results from it.
    """
    if error.startswith(LATE):
        return error
    if ours := OURS.search(log):
        return ours[1].strip()
    theirs = [
        text for text in THEIRS.findall(log) if not any(word in text for word in CONSEQUENCES)
    ]
    is_cause = not error.startswith(GONE) and not any(word in error for word in CONSEQUENCES)
    return " ".join((error if is_cause or not theirs else theirs[0]).split())[:MAX_ERROR_CHARS]
