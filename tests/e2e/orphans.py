"""Kills EngineCore, but not its workers, during a long step:
`python -m tests.e2e.orphans --rounds 10 --step-s 15`.

In each round, a worker writes to its frames long after its scheduler has died, while another engine
fills and reads the same memory. The script prints how long the frames remained reserved after the
last worker exited. The exit status is 1 if a token is wrong, a check fails, or frames are free
while a worker can still write to them.
"""

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import tiny
from .cache_server import PACE, CacheServer, until
from .client import Engine, EngineError, Req, Zygote, engine_kwargs, random_ids
from .conftest import Truth
from .report import finish

HOST_SIZE = "4MiB"
"""Host memory size. It is too small for the prompts below, so frames are reused."""
NUM_DOOMED, NUM_ASKED = 6, 24


@dataclass
class Scene:
    """A server, and a function that starts engines with the same KV on this server.

    ``hold`` is the directory through which forward passes are held (see zoo/held.py).
    """

    start: Callable[..., Engine]
    server: CacheServer
    truth: Truth
    hold: Path
    ranks: int
    asked: list[Req]

    def engine(self, **more: Any) -> Engine:
        extra = {"server": f"unix:{self.server.socket}", "server_timeout": f"{10 * PACE}s"}
        transfer = {
            "kv_connector": "KVLoftConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        env = {"KV_HOLD": str(self.hold)} | (
            {"VLLM_CPU_OMP_THREADS_BIND": "0|0"} if self.ranks > 1 else {}
        )
        return self.start(
            kv_transfer_config=transfer,
            num_blocks=120,
            tensor_parallel_size=self.ranks,
            distributed_executor_backend="mp",
            env=env,
            **more,
        )

    def num_wrong(self, engine: Engine) -> int:
        """Run all requests and return the number of wrong outputs."""
        results = engine.ask(*[request.again() for request in self.asked])
        right = [self.truth.tokens(request) for request in self.asked]
        return sum(result.tokens != tokens for result, tokens in zip(results, right, strict=True))

    def quarantined(self) -> int:
        return int(self.server.status()["stats"]["quarantined_reservations"])


def model_of(folder: Path, ranks: int) -> Path:
    return (
        tiny.write_model(folder, num_heads=4, num_kv_heads=2)
        if ranks > 1
        else tiny.write_model(folder)
    )


@contextlib.contextmanager
def scene(zygote: Zygote, folder: Path, ranks: int) -> Iterator[Scene]:
    """Yield a server, the model, its reference outputs, and a function that starts engines."""
    model = model_of(folder / f"model{ranks}", ranks)
    with contextlib.ExitStack() as stack:
        truth = Truth(lambda: zygote.engine(engine_kwargs(model, num_blocks=600)))
        stack.callback(truth.close)
        asked = [
            truth.pick(lambda seed, n=n: Req(random_ids(seed, 150 + n), max_tokens=8), 8000 + n)
            for n in range(NUM_ASKED)
        ]  # type: ignore[misc]
        server = CacheServer().start(host_size=HOST_SIZE)
        stack.callback(server.close)

        def start(*, env: dict[str, str], prepare: str = "", **kwargs: Any) -> Engine:
            engine = zygote.engine(engine_kwargs(model, **kwargs), env=env, prepare=prepare)
            stack.callback(engine.kill)
            return engine

        hold = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-hold-")))
        stack.callback(
            lambda: (hold / "hold").unlink(missing_ok=True)
        )  # otherwise, a waiting worker would never exit
        yield Scene(start, server, truth, hold, ranks, asked)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def begin_to_die(engine: Engine) -> threading.Thread:
    """Start the engine's next step, which never completes."""

    def step() -> None:
        with contextlib.suppress(EngineError, ValueError, OSError):
            engine.step()

    thread = threading.Thread(target=step)
    thread.start()
    return thread


def orphan(scene: Scene, other: Engine, seed: int, step_s: float) -> dict[str, Any]:
    """Kill the scheduler of an engine during a step that takes at least ``step_s``, and return the
    effects on ``other`` and on the server.
    """
    hold = scene.hold / "hold"
    for file in scene.hold.iterdir():
        file.unlink()
    doomed = scene.engine(prepare="held_forwards")
    hold.touch()
    doomed.add(*[Req(random_ids(seed + n, 150), max_tokens=8) for n in range(NUM_DOOMED)])
    stepping, begin = begin_to_die(doomed), time.monotonic()
    until(lambda: len(list(scene.hold.glob("*.held"))) == scene.ranks, "no forward pass starts")
    workers = [int(file.stem) for file in scene.hold.glob("*.held")]
    os.kill(doomed.pid, signal.SIGKILL)
    until(lambda: scene.quarantined() > 0, "the engine's frames are not quarantined")
    reserved, problems, num_wrong = scene.quarantined(), list[str](), 0
    while time.monotonic() < begin + step_s:
        num_wrong += scene.num_wrong(other)
        if scene.quarantined() != reserved:
            problems.append(
                f"only {scene.quarantined()} of {reserved} frames are still reserved, but a worker "
                "can write to all of them"
            )
    assert all(map(is_running, workers)), "the workers exited with their scheduler"
    hold.unlink()
    back_s: list[float] = []
    watching = threading.Thread(target=lambda: back_s.append(seconds_until_back(scene, workers)))
    watching.start()
    while watching.is_alive():
        num_wrong += scene.num_wrong(other)
    stepping.join()
    num_stored = sum(len(file.read_text()) for file in scene.hold.glob("*.stored"))
    if num_wrong:
        problems.append(f"{num_wrong} wrong outputs")
    return {"reserved": reserved, "stored": num_stored, "back_s": back_s[0], "problems": problems}


def seconds_until_back(scene: Scene, workers: list[int]) -> float:
    """Return how long the frames remained reserved after the last worker exited, in seconds."""
    until(lambda: not any(map(is_running, workers)), "a worker does not exit")
    ended = time.monotonic()
    until(lambda: scene.quarantined() == 0, "the frames stay reserved")
    return time.monotonic() - ended


def run(ranks: int, rounds: int, step_s: float, progress: Callable[[str], None]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvloft-orphans-")))
        zygote = Zygote(folder)
        stack.callback(zygote.close)
        found = stack.enter_context(scene(zygote, folder, ranks))
        other = found.engine()
        results = []
        for nth in range(rounds):
            results.append(orphan(found, other, 20_000 + 100 * nth, step_s))
            progress(
                f"{ranks} ranks: {nth + 1} of {rounds} engines killed, "
                f"{sum(len(r['problems']) for r in results)} problems"
            )
        failed = int(other.metrics()["vllm:kvloft_verify_failures_total"])
        problems = [problem for result in results for problem in result["problems"]] + (
            [f"{failed} failed checks"] if failed else []
        )
        other.assert_at_rest()
        return {"ranks": ranks, "rounds": results, "failed_checks": failed, "problems": problems}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help="number of engines to kill for each number of ranks (default 10)",
    )
    parser.add_argument(
        "--step-s",
        type=float,
        default=15.0,
        help="minimum duration of the interrupted step in seconds (default 15)",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="tensor parallel sizes (default 1 2)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write all counts to FILE")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.status("starting") as status:
        results = [run(ranks, args.rounds, args.step_s, status.update) for ranks in args.ranks]
    table = Table(
        "ranks",
        "killed",
        "frames held",
        "stored by orphans",
        "failed checks",
        "seconds until freed (median, longest)",
    )
    for result in results:
        rounds, back = result["rounds"], [each["back_s"] for each in result["rounds"]]
        sums = [str(sum(each[name] for each in rounds)) for name in ("reserved", "stored")]
        times = f"{statistics.median(back):.2f}, {max(back):.2f}"
        table.add_row(
            str(result["ranks"]), str(len(rounds)), *sums, str(result["failed_checks"]), times
        )
    console.print(table)
    return finish(
        console,
        {"runs": results, "problems": [text for result in results for text in result["problems"]]},
        args.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())
