"""`python -m benches.gpu.engine`: compares plain vLLM, OffloadingConnector and kvloft on one GPU.

Each engine runs in a separate process (`engine_child`), and the engines alternate. Decode steps are
always measured with only one engine on the GPU. If the engines do not fit on the GPU together, all
phases run with one engine at a time. This module does not import vLLM, so an engine that fails to
start does not stop the others from being measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benches.gpu.child import CHILD_ENV, errors_of, result_of, start, verdict
from benches.gpu.options import STATUS, add_model, add_sizes, some_of, table_of
from benches.gpu.peers import NAMES as PEERS
from benches.gpu.peers import SERVED, daemons, env_of, is_installed, kvloft_server
from benches.gpu.shapes import options_of
from benches.gpu.turns import leave
from kvloft.bench.command import console, gpu_bytes, whole, write
from kvloft.errors import UnsupportedError

ALONE = ("decode", "attached", "startup")
"""Phases that run with one engine on the GPU at a time.

Idle engines on the same GPU, which do not occur in production, would make plain vLLM's decode steps
up to 4% shorter. "attached" and "startup" do not compare engines.
"""
EMBEDDING_BYTES, LAYER_BYTES = 4 * 128256 * 4096, 2 * 218_112_000
"""Bytes in the Llama shape's embeddings and in each of its layers. Other shapes are smaller."""
OTHER_BYTES = 5 << 30
"""An engine's memory in bytes, excluding weights and paged KV: activations for 8,192 tokens, CUDA
graphs, kvloft's staging buffers and the CUDA context.
"""
POLL_S = 0.2
COUNT_NAMES = {
    "saved_bytes": "saved bytes",
    "loaded_bytes": "loaded bytes",
    "bad_chunks": "loaded chunks with a wrong tag",
}
COLD_PARTS = {
    "before_ms": "until the first forward pass",
    "gpu_ms": "first to last forward pass",
    "between_ms": "gaps between the forward passes",
    "after_ms": "until the token is available",
    "collected_ms": "Python's garbage collection in total",
}


def run(
    *,
    connectors: Sequence[str],
    phases: Sequence[str],
    options: dict[str, Any],
    log_dir: Path,
    timeout_s: float,
    together: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run all phases.

    Return {connector: results of its phases, or {"error": ...}}. With ``together``, engines share
    the GPU and alternate, except in the phases in ALONE. Logs are written to ``log_dir``. Raises
    UnsupportedError if there is nothing to measure.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    results: dict[str, Any] = {name: {} for name in connectors}
    groups = _groups(connectors, phases, together=together)
    if not groups:
        raise UnsupportedError(
            "phase 'attached' compares an engine with and without its connector; add an engine "
            "with a connector to --connectors"
        )
    host_bytes = options.get("host_bytes", 0)
    progress("starting servers")
    with (
        daemons(
            connectors, host_bytes >> 30, lambda name: log_dir / f"{name}.server.log"
        ) as errors,
        kvloft_server(connectors, host_bytes, log_dir / "server.log") as socket,
    ):
        results |= {name: {"error": error} for name, error in errors.items()}
        groups = _groups(
            [name for name in connectors if name not in errors], phases, together=together
        )
        _run_groups(
            groups,
            {**options, "socket": socket},
            results,
            log_dir,
            deadline,
            together=together,
            progress=progress,
        )
    return results


def _run_groups(
    groups: Sequence[tuple[Sequence[str], Sequence[str]]],
    options: Mapping[str, Any],
    results: dict[str, Any],
    log_dir: Path,
    deadline: float,
    *,
    together: bool,
    progress: Callable[[str], None],
) -> None:
    for number, (names, asked_phases) in enumerate(groups):
        with tempfile.TemporaryDirectory() as folder:
            # If one engine must be flooded to empty its cache, flood all engines, so that they do
            # the same work.
            floods = not set(PEERS).isdisjoint(names)
            asked = {
                "turns": folder,
                "names": list(names),
                "phases": list(asked_phases),
                "floods": floods,
                **options,
            }
            asked["llm"] = {**shared_gpu(options["num_blocks"], options), **options.get("llm", {})}
            logs = {
                name: log_dir / f"engine_{name}{'_alone' if number and together else ''}.log"
                for name in names
            }
            model_of = {
                name: f"{folder}/model-{SERVED[0] if name in SERVED else name}" for name in names
            }
            gpu_of = (
                {name: nth % options["gpus"] for nth, name in enumerate(names)}
                if options.get("gpus")
                else {}
            )
            children = {
                name: _start(name, {**asked, "model_dir": model_of[name]}, log, gpu_of.get(name))
                for name, log in logs.items()
            }
            share = (deadline - time.monotonic()) / (len(groups) - number)
            if len(names) > 1:
                share = deadline - time.monotonic()
            for name, found in _wait(
                children, logs, share, partial(_left, Path(folder), asked_phases), progress
            ).items():
                _add(results[name], found)


def _add(result: dict[str, Any], found: dict[str, Any]) -> None:
    """Merge the results of a second process with the same connector into ``result``.

    Totals are added, and an earlier error is kept.
    """
    totals = {
        key: result.get("totals", {}).get(key, 0) + value
        for key, value in found.get("totals", {}).items()
    }
    result |= {**found, **({"totals": totals} if totals else {})}


def _groups(
    connectors: Sequence[str], phases: Sequence[str], *, together: bool
) -> list[tuple[list[str], list[str]]]:
    """Return the groups of engines that run concurrently, each with its phases."""
    phases_of = {
        name: [phase for phase in phases if (name, phase) != ("none", "attached")]
        for name in connectors
    }
    if not together:
        return [([name], phases_of[name]) for name in connectors if phases_of[name]]
    shared = [phase for phase in phases if phase not in ALONE]
    alone = [
        ([name], [phase for phase in phases_of[name] if phase in ALONE]) for name in connectors
    ]
    return [(list(connectors), shared)] * bool(shared) + [group for group in alone if group[1]]


def fit_together(
    num_engines: int, num_blocks: int, model: Mapping[str, Any], total_bytes: int
) -> bool:
    """Return True if ``num_engines`` engines fit on a GPU of ``total_bytes``."""
    weights = EMBEDDING_BYTES + int(model.get("num_hidden_layers", 32)) * LAYER_BYTES
    return num_engines * (weights + OTHER_BYTES + num_blocks * _block_bytes(model)) <= total_bytes


def shared_gpu(num_blocks: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's settings for engines that share a GPU.

    The paged KV size is fixed, so that it does not depend on the free memory at startup.
    """
    model: Mapping[str, Any] = options.get("model", {})
    settings: dict[str, Any] = {
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": num_blocks * _block_bytes(model),
    }
    # KV cache groups and draft models change how many layers share a block, so vLLM computes the
    # number of blocks.
    counts_itself = "layer_types" in model or bool(options.get("drafts"))
    return settings | ({"num_gpu_blocks_override": None} if counts_itself else {})


def _block_bytes(model: Mapping[str, Any]) -> int:
    heads, dim = int(model.get("num_key_value_heads", 8)), int(model.get("head_dim", 128))
    return 16 * 2 * heads * dim * 2 * int(model.get("num_hidden_layers", 32))


def _start(
    name: str, options: dict[str, Any], log: Path, gpu: int | None
) -> subprocess.Popen[bytes]:
    env = {**CHILD_ENV, **env_of(name, options.get("host_bytes", 0) >> 30)}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    return start(log, "engine_child", name, json.dumps(options), env=env)


def _wait(
    children: Mapping[str, subprocess.Popen[bytes]],
    logs: Mapping[str, Path],
    timeout_s: float,
    left: Callable[[str], None],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Wait for all children and return their results in the order of ``children``.

    Calls ``left`` for each child that exits, so that other engines stop waiting for its turns.
    """
    status: dict[str, int | str] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(status) < len(children):
            for name, child in children.items():
                late = time.monotonic() > deadline
                if name not in status and (late or child.poll() is not None):
                    status[name] = "timeout" if late else child.returncode
                    left(name)
            progress(
                ", ".join(
                    f"{name}: {_phase(logs[name])}" for name in children if name not in status
                )
            )
            time.sleep(POLL_S)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return {name: result_of(logs[name], status[name]) for name in children}


def _phase(log: Path) -> str:
    """Return the phase that the child printed last."""
    said = [
        line[6:]
        for line in log.read_text(errors="replace").splitlines()
        if line.startswith("PHASE ")
    ]
    return said[-1] if said else "starting"


def _left(folder: Path, phases: Sequence[str], name: str) -> None:
    for phase in phases:
        leave(folder / phase, name)


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the header and one row per measurement: a label, then one column per connector."""
    names = list(results)
    rows: list[tuple[str, ...]] = [("", *names)]

    def row(label: str, *path: str) -> None:
        values = []
        for name in names:
            value: Any = results[name]
            for key in path:
                value = value.get(key) if isinstance(value, dict) else None
            values.append(
                f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)
            )
        if any(value != "-" for value in values):
            rows.append((label, *values))

    row("TTFT cold, ms", "cold", "cold_ms")
    for part, label in COLD_PARTS.items():
        row(f"  {label}, ms", "cold", part)
    for what in ("warm", "hbm"):
        row(f"TTFT {what}, ms", "ttft", f"{what}_ms")
    row("  link rate, GB/s", "ttft", "link_gbps")
    row("  warm / (link time + hbm)", "ttft", "warm_of_bound")
    row("bytes loaded, last round", "ttft", "loaded_bytes_last_round")
    row("KV cache blocks", "kv_blocks")
    for what, whose in (("own", "its own prompt"), ("other", "the other engine's prompt")):
        row(f"TTFT for {whose}, through the server, ms", "shared", f"{what}_ms")
        row("  cached tokens", "shared", f"{what}_cached")
    for what, name in COUNT_NAMES.items():
        row(f"total {name}", "totals", what)
    row("8 prompts together: cold makespan, ms", "wave", "cold_makespan_ms")
    for part, label in COLD_PARTS.items():
        row(f"  {label}, ms", "wave", "cold_parts", part)
    for what, label in (
        ("prompts", "TTFT cold"),
        ("waves", "8 prompts together: cold makespan"),
    ):
        for kind in ("detached", "attached"):
            row(f"in one process, connector {kind}: {label}, ms", "attached", what, kind, "ms")
            for part, part_label in COLD_PARTS.items():
                row(f"  {part_label}, ms", "attached", what, kind, part)
    for what in ("saved_chunks", "failed_chunks", "pinned_gib"):
        row(f"first 10 s: {what.replace('_', ' ')}", "startup", what)
    row("8 prompts together: warm makespan, ms", "wave", "warm_makespan_ms")
    for mark in ("p50", "p99"):
        row(f"decode step: {mark}, ms", "decode", "plain", f"alone_{mark}_ms")
    for what in ("saving", "loading"):
        for kind, label in (
            ("all", ""),
            ("alone", ", without prefill or load"),
            ("mixed", ", with an arriving prompt"),
        ):
            for mark in ("p50", "p99"):
                row(
                    f"decode steps during {what}{label}: {mark}, ms",
                    "decode",
                    what,
                    f"{kind}_{mark}_ms",
                )
    return rows


def parser() -> argparse.ArgumentParser:
    engine = argparse.ArgumentParser(
        prog="engine",
        description=(
            "Measure time to first token and decode steps of plain vLLM, vLLM with "
            f"OffloadingConnector and vLLM with kvloft on one GPU. {STATUS}"
        ),
    )
    connectors = ("none", "native", "kvloft", "raw", "before", "groups", *SERVED, *PEERS)
    phases = ("cold", "ttft", "wave", "decode", "shared", "attached", "startup")
    engine.add_argument(
        "--connectors",
        type=some_of(*connectors),
        default=list(connectors[:3]),
        help=f"connectors to run: {','.join(connectors)}; raw is kvloft with compression off, "
        "before is the kvloft in $BENCH_BEFORE, groups is kvloft with kv_groups=all, "
        "served and served2 are engines that share one `kvloft serve` (default the first three)",
    )
    engine.add_argument(
        "--phases",
        type=some_of(*phases),
        default=list(phases[:4]),
        help="phases to run: cold (time to first token of new prompts), ttft (of cached prompts), "
        "wave (eight prompts together), decode (steps alone, during saves and during loads), "
        "shared (prompts computed by the server's other engine), attached (new prompts with and "
        "without the connector, in one process), startup (failed saves while host memory is being "
        "registered; must be first); default the first four",
    )
    engine.add_argument(
        "--context",
        type=whole(2048, 40000),
        default=32768,
        help="tokens per long prompt, 2048 to 40000 (default 32768)",
    )
    engine.add_argument(
        "--kv-heads",
        type=int,
        choices=(1, 2, 4, 8, 16, 32),
        default=8,
        help="number of KV heads of the Llama shape (default 8)",
    )
    engine.add_argument(
        "--colds",
        type=whole(1, 1000),
        default=12,
        help="number of new prompts in cold and attached (default 12)",
    )
    engine.add_argument(
        "--rounds",
        type=whole(1, 1000),
        default=4,
        help="number of requests per cached prompt (default 4)",
    )
    engine.add_argument(
        "--trace",
        action="store_true",
        help="include the times of each load's pieces in the --json file",
    )
    engine.add_argument(
        "--gpus",
        type=whole(1, 64),
        default=None,
        help="number of GPUs for the engines (default 1)",
    )
    add_model(engine)
    engine.add_argument(
        "--one-by-one",
        action="store_true",
        help="run one engine at a time, which needs less GPU memory",
    )
    add_sizes(engine, blocks=9000, host_gib=40)
    return engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 1 if an engine failed, or 2 if the benchmark cannot run."""
    args, screen = parser().parse_args(argv), console()
    shape = options_of(args.model, args.layers)
    if args.model == "llama":
        shape["model"]["num_key_value_heads"] = args.kv_heads
    try:
        on_one = -(-len(args.connectors) // (args.gpus or 1))
        room = fit_together(on_one, args.blocks, shape["model"], gpu_bytes())
    except UnsupportedError as error:
        print(f"kvloft: the engine benchmark cannot run on this machine: {error}", file=sys.stderr)
        return 2
    together = room and not args.one_by_one
    if not together:
        screen.print(
            "Running one engine at a time, so changes in the machine's load can distort the "
            "comparison.",
            style="dim",
        )
    options = {
        "num_blocks": args.blocks,
        "host_bytes": args.host_gib << 30,
        "context": args.context,
        "colds": args.colds,
        "rounds": args.rounds,
        "trace": args.trace,
        "gpus": args.gpus,
        **shape,
    }
    missing = [name for name in args.connectors if not is_installed(name)]
    if missing:
        print(
            f"kvloft: these connectors are not installed: {', '.join(missing)}; use --connectors "
            "to select from the others",
            file=sys.stderr,
        )
        return 2
    try:
        with screen.status("starting") as status:
            results = run(
                connectors=args.connectors,
                phases=args.phases,
                options=options,
                log_dir=Path(args.logs),
                timeout_s=args.timeout,
                together=together,
                progress=status.update,
            )
    except UnsupportedError as error:
        print(f"kvloft: nothing to measure: {error}", file=sys.stderr)
        return 2
    screen.print(table_of(table(results)))
    write(args.json, results)
    return verdict(errors_of(results))


if __name__ == "__main__":
    raise SystemExit(main())
