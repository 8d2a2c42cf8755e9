"""`python -m benches.gpu.chats`: runs a closed loop of chats with different external caches.

Compares plain vLLM, OffloadingConnector, kvloft, kvloft's server, PegaFlow and LMCache. Engines run
one at a time, each in a separate process (`chats_child`), and alternate for the requested number of
rounds. Results are written after each engine, so that an interrupted run does not lose them. This
module does not import vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benches.gpu.chats_child import Load
from benches.gpu.child import CHILD_ENV, can_run, end_of, errors_of, result_of, start, verdict
from benches.gpu.options import STATUS, add_model, add_sizes, some_of, table_of
from benches.gpu.peers import NAMES as PEERS
from benches.gpu.peers import SERVED, daemons, env_of, is_installed, kvloft_server
from benches.gpu.shapes import options_of
from kvloft.bench.command import console, whole, write

CONNECTORS = ("none", "native", "kvloft", SERVED[0], *PEERS)
KILL_S = 15.0
"""Grace period after a child's time limit, after which the child is killed."""
LEAST_S = 45.0
"""An engine starts only if at least this much time remains."""


def run(
    *,
    connectors: Sequence[str],
    rounds: int,
    options: dict[str, Any],
    log_dir: Path,
    timeout_s: float,
    keep: Callable[[dict[str, Any]], None],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run all engines.

    Return {connector: {"runs": [...], "start_s": ..., "error": ...}}, where "error" is optional.
    After each engine, ``keep`` is called with all results so far.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    results: dict[str, Any] = {name: {"runs": []} for name in connectors}
    order = [(number, name) for number in range(rounds) for name in connectors]
    for nth, (number, name) in enumerate(order):
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            results[name].setdefault("error", "was not started: no time left (--timeout)")
            continue
        progress(f"{name}, round {number + 1}")
        child_s = min(
            options["child_s"], max(LEAST_S, left_s / (len(order) - nth) * 1.5), left_s - KILL_S
        )
        found = _measure(
            name, {**options, "child_s": child_s}, log_dir / f"chats_{name}_{number + 1}.log"
        )
        runs = results[name]["runs"] + found.pop("runs", [])
        results[name] |= {**found, "runs": runs}
        keep(results)
    return results


def _measure(name: str, options: dict[str, Any], log: Path) -> dict[str, Any]:
    """Run one engine and return its results, with the key "error" if it failed."""
    if not is_installed(name):
        return {"error": f"{name} is not installed"}
    host_gib = options["host_bytes"] >> 30
    try:
        server_log = log.with_suffix(".server.log")
        with (
            tempfile.TemporaryDirectory() as folder,
            daemons([name], host_gib, lambda _: server_log) as errors,
            kvloft_server([name], options["host_bytes"], server_log) as socket,
        ):
            if errors:
                return {"error": errors[name]}
            asked = json.dumps({**options, "model_dir": f"{folder}/model", "socket": socket})
            process = start(
                log, "chats_child", name, asked, env={**CHILD_ENV, **env_of(name, host_gib)}
            )
            status = end_of(process, options["child_s"] + KILL_S)
    except (RuntimeError, OSError) as error:
        return {"error": str(error)}
    found = result_of(log, status)
    unfinished = sum(each["unfinished"] for each in found.get("runs", ()))
    if unfinished and "error" not in found:
        found["error"] = f"{unfinished} turns did not finish in time"
    return found


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the header and one row per engine. Medians include only complete runs."""
    rows: list[tuple[str, ...]] = [
        (
            "",
            "makespan, s",
            "all runs, s",
            "cached of repeated tokens",
            "preempted",
            "TTFT by turn, ms",
            "problem",
        )
    ]
    for name, result in results.items():
        runs = [each for each in result["runs"] if not each["unfinished"]]
        problem = str(result.get("error", "")).splitlines()[:1]
        if not runs:
            rows.append((name, "-", "-", "-", "-", "-", *(problem or ["nothing was measured"])))
            continue
        known = sum(each["known_tokens"] for each in runs)
        cached = sum(each["cached_tokens"] for each in runs)
        turns = zip(*(each["ttft_ms"] for each in runs), strict=True)
        rows.append(
            (
                name,
                f"{statistics.median(each['makespan_s'] for each in runs):.1f}",
                ", ".join(f"{each['makespan_s']:.1f}" for each in runs),
                f"{cached:,} of {known:,} ({cached / max(known, 1):.1%})",
                ", ".join(str(each["preemptions"]) for each in runs),
                ", ".join(f"{statistics.median(turn):.0f}" for turn in turns),
                *(problem or [""]),
            )
        )
    return rows


def parser() -> argparse.ArgumentParser:
    load = Load()
    chats = argparse.ArgumentParser(
        prog="chats",
        description=(
            f"Run a closed loop of chats with each external cache and without one. {STATUS}"
        ),
    )
    chats.add_argument(
        "--connectors",
        type=some_of(*CONNECTORS),
        default=list(CONNECTORS),
        help=f"connectors to run: {','.join(CONNECTORS)} (default all)",
    )
    for name, value in asdict(load).items():
        option = "--" + name.removeprefix("num_").replace("_", "-")
        chats.add_argument(
            option, dest=name, type=whole(1, 100_000), default=value, help=f"default {value}"
        )
    chats.add_argument(
        "--seqs",
        type=whole(1, 1024),
        default=32,
        help="maximum number of running sequences (default 32)",
    )
    chats.add_argument(
        "--rounds",
        type=whole(1, 10),
        default=1,
        help="number of processes per engine; engines alternate (default 1)",
    )
    chats.add_argument(
        "--repeats", type=whole(1, 10), default=2, help="number of runs per process (default 2)"
    )
    chats.add_argument(
        "--each",
        type=whole(60, 3600),
        default=180,
        help="time limit of a process including startup, in seconds (default 180)",
    )
    add_model(chats)
    add_sizes(chats, blocks=5625, host_gib=40)
    return chats


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 1 if an engine failed, or 2 if the benchmark cannot run."""
    args, screen = parser().parse_args(argv), console()
    if not can_run("chats"):
        return 2
    load = {name: getattr(args, name) for name in asdict(Load())}
    shape = options_of(args.model, args.layers)
    longest = (
        args.first_tokens
        + (args.num_turns - 1) * args.more_tokens
        + args.num_turns * args.generated_tokens
    )
    options = {
        "num_blocks": args.blocks,
        "host_bytes": args.host_gib << 30,
        "load": load,
        "repeats": args.repeats,
        "child_s": args.each,
        **shape,
        "llm": {**shape["llm"], "max_num_seqs": args.seqs, "max_model_len": longest + 64},
    }
    results = run(
        connectors=args.connectors,
        rounds=args.rounds,
        options=options,
        log_dir=Path(args.logs),
        timeout_s=args.timeout,
        keep=lambda found: write(args.json, found),
        progress=lambda text: screen.print(text, style="dim"),
    )
    screen.print(table_of(table(results)))
    write(args.json, results)
    return verdict(errors_of(results))


if __name__ == "__main__":
    raise SystemExit(main())
