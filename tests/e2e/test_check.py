"""`kvloft check` as a user runs it: real vLLM, tiny models of the zoo, each in engines of its own.

With KV_ZOO=all every model is checked, and what came of it is left in build/models, which scripts/models_table.py reads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .client import ENV, engine_kwargs
from .zoo.models import IS_WHOLE, ZOO, ZooModel

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "models"
STATES = ("falcon-h1", "granite4", "lfm2", "nemotron-h", "qwen3-next")
NOT_SERVED = {
    *(("deepseek-v2", groups) for groups in ("all", "one")),
    *((name, "one") for name in STATES),
}
"""Models with a setting of kv_groups; whatever begins to be served loses its row."""


@pytest.fixture(scope="module", autouse=True)
def _release(vllm_release: tuple[int, int]) -> None:
    if vllm_release != (0, 32):
        pytest.skip("the zoo's models are made for vLLM 0.32")


def flags_of(arguments: dict[str, Any]) -> list[str]:
    """vLLM's flags for arguments of an engine."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags += [flag] if value else [] if name == "disable_log_stats" else [f"--no-{flag[2:]}"]
        elif name != "model":
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def environment(model: ZooModel, folder: Path) -> dict[str, str]:
    """The tests' own; the kernels that a model needs come as a plugin of vLLM, which every process of an engine loads."""
    if model.prepare:
        plugin = folder / "plugins" / "zoo-0.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text(f"[vllm.general_plugins]\nzoo = e2e.zoo.kernels:{model.prepare}\n")
    path = os.pathsep.join([str(folder / "plugins"), str(ROOT / "tests")])
    return os.environ | ENV | {"PYTHONPATH": path, "TMPDIR": str(folder)}


def check(name: str, folder: Path, *, kv_groups: str, more: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and stderr of a check of one model of the zoo."""
    model = ZOO[name]
    files = model.write(folder / "files")
    arguments = engine_kwargs(files, **model.engine(files))
    done = subprocess.run(
        [sys.executable, "-m", "kvloft.cli", "check", str(files), "--json", "--extra", json.dumps({"kv_groups": kv_groups}),
         "--", *flags_of(arguments), *more],
        env=environment(model, folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if IS_WHOLE and report:
        KEPT.mkdir(parents=True, exist_ok=True)
        kept = report | {"model": name, "flags": [flag.replace(str(folder), "") for flag in report["flags"]]}
        (KEPT / f"{name}-{kv_groups}.json").write_text(json.dumps(kept, indent=1))
    assert not list(folder.glob("kvloft-check-*")), "the temporary directory is still there"
    return done.returncode, report, done.stderr


def test_a_model_with_windows_is_served_with_all_groups(tmp_path: Path) -> None:
    status, report, progress = check("gemma3", tmp_path, kv_groups="all")
    assert status == 0, (report, progress)
    passes = {one["name"]: one for one in report["passes"]}
    assert all(one["equal"] == one["answers"] for one in passes.values())
    assert passes["host"]["host"] == passes["disk"]["disk"] == passes["own"]["cached"]
    *windows, full = passes["disk"]["blocks"]
    assert 0 < min(windows) <= max(windows) < full, "as many blocks of windows as of full attention"
    assert report["engines"]["alone"]["blocks"] == report["engines"]["with kvloft"]["blocks"]


@pytest.mark.skipif(not IS_WHOLE, reason="takes minutes: KV_ZOO=all checks every model")
def test_a_model_that_is_not_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    status, report, _ = check("deepseek-v2", tmp_path, kv_groups="one")
    assert status == 1
    assert report["missing"][0].startswith("with kvloft it did not run: kvloft gives back the beginning of a prompt, and vLLM")
    assert [one["name"] for one in report["passes"]] == ["plain", "own"]


@pytest.mark.skipif(not IS_WHOLE, reason="takes an hour: KV_ZOO=all checks every model")
@pytest.mark.parametrize("kv_groups", ["all", "one"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_model_is_served_or_says_why(name: str, kv_groups: str, tmp_path: Path) -> None:
    status, report, progress = check(name, tmp_path, kv_groups=kv_groups)
    assert not any(one["wrong"] for one in report["passes"])
    assert (status == 0) == ((name, kv_groups) not in NOT_SERVED), (report["missing"], progress)
