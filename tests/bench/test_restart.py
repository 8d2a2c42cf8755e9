"""Tests that the restart check reports every token that the next engine does not find in the cache.

The tests do not need a GPU.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benches.gpu import child as bench_child
from benches.gpu import restart


def life(**changes: Any) -> dict[str, Any]:
    return {
        "started_s": 9.0,
        "answered_s": 9.5,
        "ttft_ms": 100.0,
        "cached": 4096,
        "first": [7, -0.5],
        "hbm_ms": 40.0,
        "loaded_ms": 90.0,
        "loaded_cached": 4096,
        "first_loaded": [7, -0.5],
        **changes,
    }


def test_problems_of_a_restart_are_named() -> None:
    first = life(
        cached=0, first=[8, -0.6]
    )  # the engines compute different parts of the prompt, so rounding differs
    assert restart.problems([first, life()], 4096) == []
    assert "only 2000 of 4096" in restart.problems([first, life(cached=2000)], 4096)[0]
    for other in (life(first=[7, -0.4]), life(first_loaded=[9, -0.5])):
        assert "differ" in restart.problems([first, other], 4096)[0]
    assert (
        "engine 2 was not done"
        in restart.problems([first, {"error": "was not done in time"}], 4096)[0]
    )
    assert [row[0] for row in restart.table([first, life()])][1] == "time until ready, s"


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("raise SystemExit(3)", "exited with status 3"),
        ("print(); print('RESULT {}', flush=True)", ""),
    ],
)
def test_an_engine_that_dies_is_an_error_and_one_that_answered_is_killed(
    code: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, python = tmp_path / "child", tmp_path / "python"
    child.write_text(f"import time\n{code}\ntime.sleep(600)\n")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{child}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(bench_child.sys, "executable", str(python))
    found = restart._live({}, tmp_path / "log", restart.time.monotonic() + 120)
    assert word in found.get("error", "") and ("error" in found) == bool(word)
