"""Tests the closed-loop chat bench without a GPU: the content of each turn, the counters, and the
results of the other engines after an engine fails.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benches.gpu import chats, child, peers
from benches.gpu.chats_child import Load, run_chats

LOAD = {"num_chats": 3, "num_turns": 2, "first_tokens": 8, "more_tokens": 4, "generated_tokens": 2}
RUN = {
    "makespan_s": 2.0,
    "unfinished": 0,
    "prompt_tokens": 20,
    "known_tokens": 10,
    "cached_tokens": 5,
    "ttft_ms": [3.0, 1.0],
    "preemptions": 7,
    "moved": {},
}
CHILD = """
import json, sys, time
name, options = sys.argv[1], json.loads(sys.argv[2])
run = json.loads(sys.argv[3])
if name == "native":
    sys.exit("this one cannot start")
print("RESULT", json.dumps({"name": name, "start_s": 1.0, "runs": [run]}), flush=True)
if name == "none":
    time.sleep(6000)
if name == "kvloft":
    late = {**run, "unfinished": 4}
    print("RESULT", json.dumps({"name": name, "start_s": 1.0, "runs": [run, late]}), flush=True)
"""


class FakeEngine:
    """Completes every request in two steps, with one token per step.

    Like vLLM, the engine appends a suffix to request ids.
    """

    def __init__(self) -> None:
        self.engine = self
        self.prompts: dict[str, list[int]] = {}
        self.sent: list[list[int]] = []
        self.steps: dict[str, int] = {}
        self.aborted: list[str] = []
        self._numbers, self._tokens = count(1), count(1000)

    def prompt(self, num_tokens: int) -> list[int]:
        return [next(self._tokens) for _ in range(num_tokens)]

    def add(self, prompt: list[int], max_tokens: int) -> str:
        assert max_tokens == 2
        name = f"bench{next(self._numbers)}"
        self.prompts[name], self.steps[name] = prompt, 0
        self.sent.append(prompt)
        return name

    def step(self) -> Iterator[Any]:
        for name, prompt in list(self.prompts.items()):
            self.steps[name] += 1
            is_last = self.steps[name] == 2
            if is_last:
                del self.prompts[name]
            output = SimpleNamespace(token_ids=[1, 2][: self.steps[name]])
            yield SimpleNamespace(
                request_id=f"{name}-0a1b",
                outputs=[output],
                finished=is_last,
                num_cached_tokens=len(prompt) // 2,
            )

    def abort_request(self, names: list[str]) -> None:
        self.aborted = names


def test_each_turn_contains_all_earlier_turns() -> None:
    engine, clock = FakeEngine(), count()
    found = run_chats(
        engine,
        Load(num_chats=11, num_turns=3, first_tokens=8, more_tokens=4, generated_tokens=2),
        10**9,
        lambda: next(clock),
    )
    assert len(engine.sent) == 33 and not engine.aborted
    for prompt in engine.sent[11:]:
        before = next(other for other in engine.sent if other == prompt[: len(prompt) - 6])
        assert prompt == [*before, 1, 2, *prompt[-4:]] and prompt[0] >= 1000
    assert {len(prompt) for prompt in engine.sent} == {8, 14, 20}
    assert found["unfinished"] == 0 and found["prompt_tokens"] == 11 * (8 + 14 + 20)
    assert found["known_tokens"] == 11 * (10 + 16) and found["cached_tokens"] == 11 * (4 + 7 + 10)
    assert len(found["ttft_ms"]) == 3 and all(found["ttft_ms"])


def test_a_loop_that_times_out_reports_missing_turns() -> None:
    engine, clock = FakeEngine(), count()
    found = run_chats(
        engine,
        Load(num_chats=5, num_turns=3, first_tokens=8, more_tokens=4, generated_tokens=2),
        20,
        lambda: next(clock),
    )
    assert found["unfinished"] > 0 and engine.aborted


class Child(subprocess.Popen[bytes]):
    """A child process. `wait` times out only for "none", which keeps running after it has printed
    its results.
    """

    def __init__(self, argv: list[str], **more: Any) -> None:
        self._goes_on, self._log = "none" in argv, Path(more["stdout"].name)
        super().__init__(argv, **more)

    def wait(self, timeout: float | None = None) -> int:
        while timeout is not None and self._goes_on and self.poll() is None:
            if re.search(
                r"^RESULT .*\n", self._log.read_text(), re.MULTILINE
            ):  # print writes a line in multiple calls
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return super().wait(timeout)


@pytest.fixture
def fake_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        child,
        "command",
        lambda _child, name, options: [sys.executable, "-c", CHILD, name, options, json.dumps(RUN)],
    )
    own = SimpleNamespace(
        Popen=Child, TimeoutExpired=subprocess.TimeoutExpired, STDOUT=subprocess.STDOUT
    )
    monkeypatch.setattr(child, "subprocess", own)
    monkeypatch.setattr(chats, "KILL_S", 0.5)
    monkeypatch.setattr(chats, "LEAST_S", 0.1)
    monkeypatch.setattr(chats, "is_installed", lambda name: name != "lmcache")


@pytest.mark.usefixtures("fake_children")
def test_other_engines_are_measured_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        peers.SERVERS,
        "pegaflow",
        lambda _: ([sys.executable, "-c", "raise SystemExit('no such pool')"], {}),
    )
    kept: list[str] = []
    found = chats.run(
        connectors=chats.CONNECTORS,
        rounds=2,
        options={"host_bytes": 1 << 30, "child_s": 600.0, "load": LOAD},
        log_dir=tmp_path,
        timeout_s=60_000.0,
        keep=lambda results: kept.append(json.dumps(results)),
        progress=lambda _: None,
    )
    assert len(found["none"]["runs"]) == 2 and "--timeout" in found["none"]["error"], (
        "killed after its figures were printed"
    )
    assert (
        "cannot start" in found["native"]["error"] and "did not finish" in found["kvloft"]["error"]
    )
    assert (
        "no such pool" in found["pegaflow"]["error"]
        and "not installed" in found["lmcache"]["error"]
    )
    assert len(kept) == 2 * len(chats.CONNECTORS) and json.loads(kept[0])["none"]["runs"], (
        "results are kept after each engine"
    )
    rows = {row[0]: row for row in chats.table(found)}
    assert rows["kvloft"][1:5] == ("2.0", "2.0, 2.0", "10 of 20 (50.0%)", "7, 7")
    assert rows["native"][1] == "-" and rows["none"][5] == "3, 1"


def test_a_result_that_was_cut_off_by_a_kill_is_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('RESULT {"runs": [1]}\nRESULT {"ru')
    assert child.result_of(log, 0) == {"runs": [1]}
    log.write_text("RESULT ")
    assert "exited with status -9" in child.result_of(log, -9)["error"]


@pytest.mark.usefixtures("fake_children")
def test_without_time_no_engine_starts(tmp_path: Path) -> None:
    found = chats.run(
        connectors=("none",),
        rounds=1,
        options={"host_bytes": 1 << 30, "child_s": 5.0},
        log_dir=tmp_path,
        timeout_s=0.0,
        keep=lambda _: None,
        progress=lambda _: None,
    )
    assert found == {"none": {"runs": [], "error": "was not started: no time left (--timeout)"}}


def test_no_chat_starts_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert chats.main([]) == 2
    assert "cannot run on this machine" in capsys.readouterr().err
