"""The engines of `kvloft check`: each a child process that runs `kvloft.vllm.check`, watched, and ended whatever happens.

It knows processes and files; what an engine is asked and what its answers mean is not its business.
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

from kvloft.config import child_environment

POLL_S = 0.2
MODULE = "kvloft.vllm.check"
LATE, GONE = "it was not done", "its process ended"
TAIL_LINES = 30
MAX_ERROR = 600
"""Characters."""
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
"""The engine core runs in the child itself, where its scheduler can be looked at; its workers run where they always do."""
OURS = re.compile(r"(?:\b(?:Unsupported|Config|Layout|Store)Error|kvloft check MODEL --: error): (.+)")
THEIRS = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .+)")
CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed")


@dataclass(slots=True)
class Ran:
    """What one engine told; ``error`` says in one sentence why it did not come to its end, ``tail`` is its log's end then."""

    events: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    tail: str = ""

    def get(self, event: str) -> dict[str, Any]:
        """The first event of that name, empty if there was none."""
        return next((one for one in self.events if one["event"] == event), {})


def run_engine(name: str, job: dict[str, Any], *, folder: Path, limit_s: float, progress: Callable[[str], None]) -> Ran:
    """Run ``job`` in a new process, at most ``limit_s`` long; no process of it is left when this returns or raises."""
    events, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    events.touch()
    (folder / f"{name}.json").write_text(json.dumps(job | {"events": str(events)}))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(folder / f"{name}.json")],
            stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=child_environment(ENVIRONMENT),
        )  # fmt: skip
    try:
        ran = _watch(process, events, limit_s, progress)
    finally:
        _end(process)
    if ran.error is not None:
        text = log.read_text(errors="replace")
        ran.error, ran.tail = _cause(text, ran.error), "\n".join(text.splitlines()[-TAIL_LINES:])
    return ran


def _watch(process: subprocess.Popen[bytes], path: Path, limit_s: float, progress: Callable[[str], None]) -> Ran:
    """Read what it tells until it is done, gone, or late."""
    ran, begin, part = Ran(), time.monotonic(), ""
    with path.open() as file:
        while True:
            is_gone = process.poll() is not None  # asked first: what it told before its end is read below
            *lines, part = (part + file.read()).split("\n")
            for line in lines:
                ran.events.append(json.loads(line))
                progress(f"{_told(ran.events[-1])} ({time.monotonic() - begin:.0f} s)")
            last = ran.events[-1] if ran.events else {"event": "start"}
            if last["event"] == "failed":
                ran.error = last["error"]
            elif is_gone and last["event"] != "done":
                ran.error = f"{GONE} with status {process.returncode}"
            elif time.monotonic() - begin > limit_s:
                ran.error = f"{LATE} within {limit_s:g} s (--time-limit); the last it told was {_told(last)!r}"
            elif last["event"] != "done":
                time.sleep(POLL_S)
                continue
            return ran


def _told(event: dict[str, Any]) -> str:
    return str(event["name"] if event["event"] == "pass" else event["event"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it left in its session: when it says that it is done, its store is closed."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cause(log: str, error: str) -> str:
    """The sentence of kvloft, or of vLLM's parser, in the log if there is one; else ``error``, or the first one in the log that it
    only follows from.
    """
    if error.startswith(LATE):
        return error
    if ours := OURS.search(log):
        return ours[1].strip()
    theirs = [text for text in THEIRS.findall(log) if not any(word in text for word in CONSEQUENCES)]
    is_cause = not error.startswith(GONE) and not any(word in error for word in CONSEQUENCES)
    return " ".join((error if is_cause or not theirs else theirs[0]).split())[:MAX_ERROR]
