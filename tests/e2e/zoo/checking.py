"""Runs `kvloft check` on a model of the zoo. The engines are started as users start them, or forked
by the zygote (`../forked.py`).

The results are written to build/models, where scripts/models_table.py finds them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e.client import ENV, Zygote, engine_kwargs

from .models import ZOO

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "build" / "models"
DRAFTED_STATES = tuple(
    f"{drafter}-states" for drafter in ("dflash", "draft-model", "eagle", "eagle3", "mtp", "ngram")
)
STATES = (
    "falcon-h1",
    "granite4",
    "lfm2",
    "nemotron-h",
    "ngram-mamba2",
    "qwen3-next",
    *DRAFTED_STATES,
)
NOT_SERVED = {
    *(("deepseek-v2", groups) for groups in ("auto", "one")),
    *((name, "one") for name in STATES),
    ("ngram-mamba2", "auto"),
}
"""Unsupported models and kv_groups values. Remove a row when kvloft supports the model."""
AS_A_USER, FORKED = (
    "import sys; from kvloft.cli import __main__, check_engine; "
    f"{change}sys.exit(__main__.main(sys.argv[1:]))"
    for change in ("", "check_engine.MODULE = 'e2e.forked'; ")
)
"""The Python programs that run `kvloft`."""


def flags_of(arguments: dict[str, Any]) -> list[str]:
    """Return vLLM's command-line flags for the arguments of an engine."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags += (
                [flag] if value else [] if name == "disable_log_stats" else [f"--no-{flag[2:]}"]
            )
        elif name != "model":
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def check(
    name: str, folder: Path, kv_groups: str, zygote: Zygote | None = None
) -> tuple[int, dict[str, Any], str]:
    """Run `kvloft check`, and return its exit status, its report and its stderr.

    Without ``zygote``, only models that do not need replaced kernels can run.
    """
    model = ZOO[name]
    files = model.write(folder / "files")
    program, env = (
        AS_A_USER,
        os.environ | ENV | {"PYTHONPATH": str(ROOT / "tests"), "TMPDIR": str(folder)},
    )
    if zygote is not None:
        zygote.wait()
        program, env = FORKED, env | {"ZYGOTE": str(zygote.address), "ZOO_PREPARE": model.prepare}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            program,
            "check",
            str(files),
            "--json",
            "--extra",
            json.dumps({"kv_groups": kv_groups}),
            "--",
            *flags_of(engine_kwargs(files, **model.engine(files))),
        ],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    if report:
        report |= {
            "model": name,
            "flags": [flag.replace(str(folder), "") for flag in report["flags"]],
        }
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{name}-{kv_groups}.json").write_text(json.dumps(report, indent=1))
    assert not list(folder.glob("kvloft-check-*")), "the temporary directory was not removed"
    return done.returncode, report, done.stderr
