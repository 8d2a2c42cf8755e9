"""`python -m benches.gpu.equality`: checks that greedy tokens do not depend on the cache.

Exact equality requires vLLM's batch-invariant mode (with a fix, see `equality_child`) and Triton
attention, whose tiles do not depend on the batch. FlashAttention 3 selects its kernel by the
longest query in the batch, so equal rows can be rounded differently. The reference has neither a
connector nor a prefix cache. Inexact setups show how much vLLM's own results vary. Engines share
one GPU, so timings are meaningless.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benches.gpu.child import CHILD_ENV, can_run, result_of, start, verdict
from benches.gpu.engine import shared_gpu
from benches.gpu.options import STATUS, add_model, add_sizes, some_of, table_of
from benches.gpu.shapes import options_of
from kvloft.bench.command import console, whole, write

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine's configuration.

    With ``exact``, the engine's tokens must equal the reference's. Otherwise, differing tokens are
    only counted, except in the phase `kept`, where they are a failure.
    """

    what: str
    connector: str = "kvloft"
    exact: bool = True
    llm: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


_EXACT = {"VLLM_BATCH_INVARIANT": "1"}
_TUNED = {"TRITON_CACHE_AUTOTUNING": "1"}
"""Lets engines reuse Triton's autotuning results; requires `--at-once 1`."""
_TRITON = {"attention_backend": "TRITON_ATTN"}


def _exact(what: str, layout: str, *, connector: str = "kvloft", **llm: Any) -> Setup:
    return Setup(
        what, connector, llm={**_TRITON, **llm}, env={**_EXACT, "VLLM_KV_CACHE_LAYOUT": layout}
    )


SETUPS = {
    REFERENCE: _exact(
        "no connector, no prefix cache", "NHD", connector="none", enable_prefix_caching=False
    ),
    "hnd": _exact("kvloft, HND", "HND"),
    "nhd": _exact("kvloft, NHD", "NHD"),
    "hnd-nopc": _exact("kvloft, HND, no prefix cache", "HND", enable_prefix_caching=False),
    "nhd-nopc": _exact("kvloft, NHD, no prefix cache", "NHD", enable_prefix_caching=False),
    "hnd-sync": _exact("kvloft, HND, no async scheduling", "HND", async_scheduling=False),
    "plain-pc": _exact("no connector, prefix cache", "NHD", connector="none"),
    "flash": Setup("kvloft, vLLM's defaults (FlashAttention 3)", exact=False),
    "plain-flash": Setup(
        "no connector, vLLM's defaults (FlashAttention 3)", "none", exact=False, env=_TUNED
    ),
    "plain-flash-invariant": Setup(
        "no connector, FlashAttention 3, batch-invariant mode", "none", exact=False, env=_EXACT
    ),
}
DEFAULT_SETUPS = tuple(SETUPS)
SETUPS["hnd-sleep"] = _exact("kvloft, HND, put to sleep", "HND", enable_sleep_mode=True)
"""Setup for the phase `sleep`. Run it together with `reference`."""
SETUPS["groups"] = _exact("kvloft, kv_groups=all", "NHD", connector="groups")
"""Setup for `--model gemma3`. Run it together with `reference` and `plain-pc`."""
SETUPS["flash-groups"] = Setup(
    "kvloft, kv_groups=all, vLLM's defaults", "groups", exact=False, env=_TUNED
)
"""Setup for `--model qwen35` and `--model tiny-gdn`, whose kernels are not batch-invariant. Run it
together with `plain-flash`.

The phase `kept` runs prompts one at a time, so the outputs must be equal if kvloft and vLLM's own
prefix cache have hits of the same length.
"""


def options(*, num_blocks: int, host_bytes: int, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings shared by all engines."""
    llm = {"max_model_len": 24576, **shared_gpu(num_blocks, shape), **shape["llm"]}
    return {**shape, "num_blocks": num_blocks, "host_bytes": host_bytes, "llm": llm}


def run(
    *,
    setups: Iterable[str],
    phases: Iterable[str],
    options: dict[str, Any],
    log_dir: Path,
    at_once: int,
    timeout_s: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run all setups. Return {setup: its child's results, or {"error": ...}}.

    At most ``at_once`` engines share the GPU.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    waiting, running, results = list(setups), dict[str, subprocess.Popen[bytes]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                asked = {
                    "model_dir": f"{folder}/{name}",
                    "phases": list(phases),
                    "only_first": name == REFERENCE,
                    **options,
                }
                asked["invariant"] = bool(SETUPS[name].env.keys() & _EXACT.keys())
                asked["llm"] = {**options.get("llm", {}), **SETUPS[name].llm}
                running[name] = _start(name, asked, log_dir / f"equality_{name}.log")
                progress(f"{name} started")
            time.sleep(0.2)
            for name, process in list(running.items()):
                late = time.monotonic() > deadline
                if process.poll() is not None or late:
                    if late:
                        process.kill()
                        process.wait()
                    del running[name]
                    results[name] = result_of(
                        log_dir / f"equality_{name}.log", "timeout" if late else process.returncode
                    )
                    progress(f"{name} exited with status {process.returncode}")
            if time.monotonic() > deadline:
                results |= {
                    name: {"error": "was not started: no time left (--timeout)"} for name in waiting
                }
                waiting.clear()
    return {name: results[name] for name in SETUPS if name in results}


def _start(name: str, options: dict[str, Any], log: Path) -> subprocess.Popen[bytes]:
    setup = SETUPS[name]
    return start(
        log, "equality_child", setup.connector, json.dumps(options), env={**CHILD_ENV, **setup.env}
    )


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one run of a setup."""

    setup: str
    run: str
    equal: int | None
    """Number of requests, out of ``total``, whose tokens equal the reference's.

    For an inexact setup, the reference is plain vLLM or one of the setup's own runs.
    """
    total: int
    preemptions: int
    loaded: int
    """Number of loaded chunks that the audit compared with the computed pages."""
    differing: int
    resaved: str
    problem: str
    loaded_of: tuple[int, ...] = ()
    """Number of loaded chunks per KV cache group. Empty if there is only one group."""


def judge(results: Mapping[str, Any]) -> list[Row]:
    """Return one row per run. A row with a problem fails the check."""
    wanted = results.get(REFERENCE, {}).get("phases", {})
    rows: list[Row] = []
    for name, result in results.items():
        for phase, runs in result.get("phases", {}).items():
            alike = wanted.get(phase, {}) if SETUPS[name].exact else _alike(results, phase) or runs
            first: dict[str, Any] = next(iter(alike.values()), {})
            reference = (runs.get("hbm", first) if phase == "kept" else first).get("tokens")
            rows += [_row(name, f"{phase} {run}", found, reference) for run, found in runs.items()]
    return rows


def _alike(results: Mapping[str, Any], phase: str) -> Mapping[str, Any]:
    """Return plain vLLM's runs of the phase `prompts`, in which prompts run one at a time. Other
    phases have no such runs, so each setup is compared with itself.
    """
    plain: Mapping[str, Any] = results.get("plain-flash", {}).get("phases", {}).get(phase, {})
    return plain if phase == "prompts" else {}


def _row(name: str, run: str, found: Mapping[str, Any], reference: list[list[int]] | None) -> Row:
    tokens, audit, moved = found["tokens"], found["audit"], found["moved"]
    equal = (
        None if reference is None else sum(a == b for a, b in zip(tokens, reference, strict=True))
    )
    differing = audit.get("loaded_differing", 0)
    problems: list[str] = []
    if run == "kept warm":
        problems += _kept_problems(found, tokens, reference or [])
    if run.endswith("skipped_load"):
        most = (
            len(tokens) - 1 if "cached" in found else len(tokens) // 2
        )  # some prompts in `kept` are misses, and their tokens stay correct
        if equal is not None and equal > most:
            problems.append("tokens do not depend on the loaded KV")
        if audit.get("loaded", 0) and not differing:
            problems.append("the audit compared nothing")
    else:
        if SETUPS[name].exact and equal != len(tokens):
            problems.append("tokens differ")
        if differing or audit.get("unknown", 0):
            problems.append("loaded pages differ or are unknown")
        if SETUPS[name].exact and audit.get("resaved_differing", 0):
            problems.append("recomputed pages differ")
        if (
            audit
            and run.endswith(("warm", "backwards"))
            and not (audit["loaded"] and moved.get("loaded_bytes"))
        ):
            problems.append("nothing was loaded")
    if moved.get("bad_chunks"):
        problems.append("tags failed")
    resaved = f"{audit.get('resaved_differing', 0)} of {audit.get('resaved', 0)}" if audit else "-"
    loaded_of = tuple(
        count for label, count in sorted(audit.items()) if label.removeprefix("loaded_").isdecimal()
    )
    return Row(
        name,
        run,
        equal,
        len(tokens),
        found["preemptions"],
        audit.get("loaded", 0),
        differing,
        resaved,
        "; ".join(problems),
        loaded_of,
    )


def _kept_problems(
    found: Mapping[str, Any], tokens: list[list[int]], of_hbm: list[list[int]]
) -> Iterator[str]:
    """Yield differences between loads from host memory and hits in vLLM's own cache."""
    kept, ours, vllms = found["kept"], found["cached"], found["cached_hbm"]
    same = [name for name in kept if name.startswith("same_")]
    if any(count for name, count in kept.items() if name.startswith("differing_")):
        yield "loaded pages differ from the pages in vLLM's own cache"
    if len(same) < found["kv_groups"]:
        yield f"pages of only {len(same)} KV cache groups were compared with vLLM's own cache"
    if any(mine < theirs - found["block_tokens"] for mine, theirs in zip(ours, vllms, strict=True)):
        yield f"fewer cached tokens than with vLLM's own cache: {ours}, expected {vllms}"
    alike = [mine == theirs for mine, theirs in zip(ours, vllms, strict=True)]
    if sum(alike) * 2 <= len(alike):
        yield (
            "too few prompts with the same number of cached tokens as with vLLM's own cache: "
            f"{ours}, expected {vllms}"
        )
    if any(a != b for a, b, is_alike in zip(tokens, of_hbm, alike, strict=True) if is_alike):
        yield "tokens differ from the tokens with vLLM's own cache"


def problems(results: Mapping[str, Any]) -> list[str]:
    """Return the reasons why the check fails, or an empty list if it passes."""
    found = [f"{name}: {result['error']}" for name, result in results.items() if "error" in result]
    rows = judge(results)
    found += [f"{row.setup}, {row.run}: {row.problem}" for row in rows if row.problem]
    blocks = {
        name: result["kv_blocks"] for name, result in results.items() if "kv_blocks" in result
    }
    if len(set(blocks.values())) > 1:
        found.append(f"engines have different numbers of KV blocks: {blocks}")
    for row in rows:
        groups = results[row.setup].get("kv_groups", 1)
        if (
            groups > 1
            and SETUPS[row.setup].connector != "none"
            and row.run == "prompts warm"
            and len(row.loaded_of) != groups
        ):
            found.append(
                f"{row.setup}, {row.run}: not every KV cache group was loaded and compared: "
                f"{row.loaded_of}"
            )
    if any(row.run.startswith("crowd") for row in rows) and not any(
        row.preemptions for row in rows if row.setup != REFERENCE
    ):
        found.append("no request was preempted")
    return found


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results with one row per run in place of the tokens, and the problems."""
    rows = judge(results)
    setups = {
        name: {
            "what": SETUPS[name].what,
            **{key: value for key, value in result.items() if key != "phases"},
            "runs": [asdict(row) for row in rows if row.setup == name],
        }
        for name, result in results.items()
    }
    return {"setups": setups, "problems": problems(results)}


def table(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the header and one row per run."""
    head = (
        "engine",
        "run",
        "tokens equal",
        "preempted",
        "chunks loaded",
        "differing",
        "recomputed differing",
        "",
    )
    body = [
        (
            SETUPS[row.setup].what,
            row.run,
            "-" if row.equal is None else f"{row.equal} of {row.total}",
            str(row.preemptions),
            str(row.loaded),
            str(row.differing),
            row.resaved,
            row.problem,
        )
        for row in judge(results)
    ]
    return [head, *body]


def parser() -> argparse.ArgumentParser:
    equality = argparse.ArgumentParser(
        prog="equality",
        description=(
            "Check that greedy tokens equal the tokens of vLLM without any cache, and that loaded "
            f"pages equal the computed pages byte for byte. {STATUS}"
        ),
    )
    equality.add_argument(
        "--setups",
        type=some_of(*SETUPS),
        default=list(DEFAULT_SETUPS),
        help=f"engines to run, in this order: {','.join(SETUPS)} (default the first "
        f"{len(DEFAULT_SETUPS)})",
    )
    equality.add_argument(
        "--phases",
        type=some_of("prompts", "crowd", "load", "sleep", "kept"),
        default=["prompts", "crowd", "load"],
        help="phases to run: prompts, crowd, load, sleep, kept (default the first three)",
    )
    equality.add_argument(
        "--at-once",
        type=whole(1, 16),
        default=3,
        help="number of engines that share the GPU (default 3)",
    )
    add_model(equality)
    add_sizes(equality, blocks=2000, host_gib=16)
    return equality


def main(argv: Sequence[str] | None = None) -> int:
    """Compare tokens and pages. Return 1 if the check fails, or 2 if it cannot run."""
    args, screen = parser().parse_args(argv), console()
    if not can_run("equality"):
        return 2
    results = run(
        setups=args.setups,
        phases=args.phases,
        options=options(
            num_blocks=args.blocks,
            host_bytes=args.host_gib << 30,
            shape=options_of(args.model, args.layers),
        ),
        log_dir=Path(args.logs),
        at_once=args.at_once,
        timeout_s=args.timeout,
        progress=lambda text: screen.print(text, style="dim"),
    )
    screen.print(table_of(table(results)))
    write(args.json, summary(results))
    return verdict(problems(results))


if __name__ == "__main__":
    raise SystemExit(main())
