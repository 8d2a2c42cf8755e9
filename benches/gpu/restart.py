"""`python -m benches.gpu.restart`: kills an engine and restarts it with the same cache.

The cache is in `kvloft serve` or in a disk directory. Prints the second engine's time to first
token for a prompt that the first engine computed. This module does not import vLLM.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.gpu.child import can_run, result_of, start, verdict
from benches.gpu.engine import shared_gpu
from benches.gpu.options import STATUS, add_model, add_sizes, table_of
from benches.gpu.peers import SERVED, kvloft_server
from benches.gpu.shapes import options_of
from kvloft.bench.command import console, whole, write

LIVES = 2
POLL_S = 0.1


def run(*, options: dict[str, Any], log_dir: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Run the engine LIVES times, and kill it with SIGKILL after each run.

    Return each run's results, or {"error": ...}.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    lives: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=options.get("disk")) as disk,
        kvloft_server([options["name"]], options["host_bytes"], log_dir / "server.log") as socket,
    ):
        asked = {**options, "socket": socket, "model_dir": f"{folder}/model"}
        if options.get("disk"):
            asked["extra"] = {
                "disk_path": disk,
                "disk_size": options["host_bytes"],
                "disk_threads": options["disk_threads"],
            }
        for life in range(LIVES):
            log = log_dir / f"restart_{life}.log"
            lives.append(_live({**asked, "life": life, "begin_s": time.monotonic()}, log, deadline))
            if "error" in lives[-1]:
                break
    return lives


def _live(options: dict[str, Any], log: Path, deadline: float) -> dict[str, Any]:
    child = start(log, "restart_child", json.dumps(options))
    try:
        while (
            child.poll() is None
            and time.monotonic() < deadline
            and "\nRESULT " not in log.read_text(errors="replace")
        ):
            time.sleep(POLL_S)
        said = "\nRESULT " in log.read_text(errors="replace")
        status: int | str | None = (
            0 if said else "timeout" if child.poll() is None else child.returncode
        )
    finally:
        child.kill()
        child.wait()
    return result_of(log, status)


def problems(lives: Sequence[dict[str, Any]], context: int, block_tokens: int = 16) -> list[str]:
    """Return the reasons why the check fails, or an empty list if it passes."""
    failed = [
        f"engine {nth + 1} {life['error']}" for nth, life in enumerate(lives) if "error" in life
    ]
    if failed:
        return failed
    before, after = lives[0], lives[-1]
    found = []
    if after["cached"] < context - block_tokens:
        found.append(f"only {after['cached']} of {context} tokens were cached after the restart")
    answers = [before["first_loaded"], after["first"], after["first_loaded"]]
    if any(answer != answers[0] for answer in answers):
        found.append(f"first tokens or their logprobs differ: {answers}")
    return found


def table(lives: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the header and one row per figure."""
    rows = [("", *(f"engine {nth + 1}" for nth in range(len(lives))))]
    for key, label in {
        "started_s": "time until ready, s",
        "answered_s": "time until first token, s",
        "cached": "cached tokens",
        "ttft_ms": "TTFT, ms",
        "hbm_ms": "TTFT from HBM, ms",
        "loaded_ms": "TTFT from host memory, ms",
    }.items():
        shown = (
            f"{life[key]:,.2f}" if key != "cached" and key in life else str(life.get(key, "-"))
            for life in lives
        )
        rows.append((label, *shown))
    return rows


def parser() -> argparse.ArgumentParser:
    restart = argparse.ArgumentParser(
        prog="restart",
        description=(
            f"Kill an engine and restart it, with its cache in `kvloft serve` or on disk. {STATUS}"
        ),
    )
    restart.add_argument(
        "--disk",
        metavar="DIR",
        help="use a disk tier in a temporary directory under DIR instead of a server",
    )
    restart.add_argument(
        "--disk-threads", type=whole(1, 64), default=8, help="disk I/O threads (default 8)"
    )
    restart.add_argument(
        "--raw", action="store_true", help="turn compression off (only with --disk)"
    )
    restart.add_argument(
        "--context",
        type=whole(2048, 40000),
        default=32768,
        help="number of prompt tokens (default 32768)",
    )
    add_model(restart)
    add_sizes(restart, blocks=4700, host_gib=24)
    return restart


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 1 if it fails, or 2 if it cannot run.

    The benchmark fails if the restarted engine misses the prompt or returns a different token.
    """
    args, screen = parser().parse_args(argv), console()
    if not can_run("restart"):
        return 2
    shape = options_of(args.model, args.layers)
    options = {
        "num_blocks": args.blocks,
        "host_bytes": args.host_gib << 30,
        "context": args.context,
        "name": ("raw" if args.raw else "kvloft") if args.disk else SERVED[0],
        "disk": args.disk,
        "disk_threads": args.disk_threads,
        **shape,
        "llm": {**shared_gpu(args.blocks, shape), **shape["llm"]},
    }
    lives = run(options=options, log_dir=Path(args.logs), timeout_s=args.timeout)
    screen.print(table_of(table(lives)))
    found = problems(lives, args.context)
    write(args.json, {"lives": lives, "problems": found})
    return verdict(found)


if __name__ == "__main__":
    raise SystemExit(main())
