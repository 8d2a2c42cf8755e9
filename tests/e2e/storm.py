"""Kills and freezes a server at random moments under load: `python -m tests.e2e.storm --rounds 20`.

A real engine runs the same prompts repeatedly, with the default `server_timeout`. The script prints
how long the engine's steps spend in kvloft, with and without faults, and compares every token with
vLLM's output without any cache. The exit status is 1 if a token differs, a request fails, or full
hits do not return after a fault. On a busy machine, other load dominates the times.
"""

import argparse
import contextlib
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import tiny
from .cache_server import PACE, CacheServer
from .client import Engine, Req, Zygote, engine_kwargs, full_blocks, random_ids
from .conftest import Truth
from .report import finish

KINDS = ("kill -9", "freeze")


def prompts(truth: Truth) -> list[Req]:
    return [
        truth.pick(lambda seed, n=n: Req(random_ids(seed, 150 + 7 * n), max_tokens=12), 7000 + n)
        for n in range(6)
    ]  # type: ignore[misc]


@contextlib.contextmanager
def fault(server: CacheServer, kind: str, after_s: float, lasts_s: float) -> Iterator[None]:
    """Inject a fault ``after_s`` seconds into the block. The fault lasts ``lasts_s`` seconds."""

    def strike() -> None:
        time.sleep(after_s)
        server.end() if kind == "kill -9" else server.freeze()
        time.sleep(lasts_s)
        server.start() if kind == "kill -9" else server.send(signal.SIGCONT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def storm(
    engine: Engine,
    server: CacheServer,
    truth: Truth,
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Inject ``rounds`` faults at random times. After each fault, run all prompts without a fault.

    Returns the time in seconds that each step spent in kvloft, and the problems.
    """
    pick, asked = random.Random(seed), prompts(truth)
    found, hooks_s, problems = 0, dict[str, list[float]](), list[str]()

    def ask(kind: str) -> int:
        nonlocal problems
        engine.hooks_s()
        results = engine.ask(*[p.again() for p in asked for _ in range(2)])
        hooks_s.setdefault(kind, []).extend(engine.hooks_s())
        right = [truth.tokens(p) for p in asked for _ in range(2)]
        problems += [
            f"{kind}: a wrong output"
            for result, tokens in zip(results, right, strict=True)
            if result.tokens != tokens
        ]
        return sum(result.num_external for result in results)

    full = 2 * sum(full_blocks(p.num_prompt_tokens) for p in asked)
    engine.time_hooks()
    for nth in range(rounds):
        kind = KINDS[nth % len(KINDS)]
        with fault(server, kind, pick.uniform(0, 0.3), pick.uniform(0.02, 0.4)):
            ask(kind)
        deadline = time.monotonic() + 120 * PACE
        while (found := ask("none")) < full and time.monotonic() < deadline:
            time.sleep(0.05)
        if found < full:
            problems.append(f"hits did not return after {kind}: {found} of {full} tokens")
        progress(f"{nth + 1} of {rounds} faults, {len(problems)} problems")
    return {"rounds": rounds, "seed": seed, "hooks_s": hooks_s, "problems": problems}


def settings(server: CacheServer, **more: Any) -> dict[str, Any]:
    """Return the kv_transfer_config of the engine."""
    return {
        "kv_connector": "KVLoftConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"server": f"unix:{server.socket}", **more},
    }


def run(rounds: int, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvloft-storm-")))
        model = tiny.write_model(folder / "model")
        zygote = Zygote(folder)
        stack.callback(zygote.close)
        truth = Truth(lambda: zygote.engine(engine_kwargs(model, num_blocks=600)))
        stack.callback(truth.close)
        server = CacheServer().start()
        stack.callback(server.close)
        engine = zygote.engine(
            engine_kwargs(model, num_blocks=120, kv_transfer_config=settings(server))
        )
        stack.callback(engine.kill)
        result = storm(engine, server, truth, rounds=rounds, seed=seed, progress=progress)
        engine.assert_at_rest()
        server.assert_at_rest()
        return result


def row(kind: str, seconds: Sequence[float]) -> tuple[str, ...]:
    ms = [1e3 * s for s in seconds]
    p99 = statistics.quantiles(ms, n=100)[98] if len(ms) > 1 else ms[0]
    return kind, str(len(ms)), f"{statistics.median(ms):.2f}", f"{p99:.2f}", f"{max(ms):.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="number of faults (default 20)")
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="seed for the times of the faults (default: the current time)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all counts to FILE")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.status("starting") as status:
        result = run(args.rounds, args.seed, status.update)
    table = Table(
        "fault",
        "steps",
        "median ms",
        "p99 ms",
        "longest ms",
        title="Time that each step spends in kvloft (server_timeout: 5 ms)",
    )
    for kind, seconds in sorted(result["hooks_s"].items()):
        table.add_row(*row(kind, seconds))
    console.print(table)
    return finish(console, result, args.json)


if __name__ == "__main__":
    raise SystemExit(main())
