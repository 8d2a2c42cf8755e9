"""Measures how fast cached prompts load from a throttled disk while other requests generate tokens:
`python -m tests.e2e.slow_disk`.

The script uses real engines on a loop-mounted ext4 file system whose block device the kernel
throttles (with cgroup blkio or io.max, which requires root). For each speed, it reports the time
until all requests have finished, compared with vLLM without kvloft, and the fraction of the chunks
saved by the generating requests that a new engine finds on disk. Speeds are in MiB/s or multiples
of the engine's prefill rate (``2x``).
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import tiny
from .client import (
    BLOCK,
    Engine,
    Req,
    Result,
    Zygote,
    engine_kwargs,
    full_blocks,
    kvloft,
    random_ids,
)
from .ext4 import mounted, throttled
from .report import finish

NUM_HEADS = 8
"""Number of query heads and of KV heads, which determines ``TOKEN_BYTES``."""
TOKEN_BYTES = 2 * tiny.NUM_LAYERS * NUM_HEADS * tiny.HEAD_DIM * 4
FILL_BATCH = 20
NUM_GENERATING, GENERATED_TOKENS = 8, 96
WARM_UP = [Req(random_ids(90_000 + i, 300), max_tokens=2, skip_reading=True) for i in range(8)]
"""Uncached prompts for measuring the engine's prefill rate."""


class Scene:
    """A model, the cached prompts, the generating requests, and the engines that run them."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, num_prompts: int, num_tokens: int
    ) -> None:
        self._model = tiny.write_model(
            folder / "model", num_heads=NUM_HEADS, num_kv_heads=NUM_HEADS
        )
        self._zygote = Zygote(folder)
        stack.callback(self._zygote.close)
        self.known = [Req(random_ids(i, num_tokens), max_tokens=2) for i in range(num_prompts)]
        self.generating = [
            Req(random_ids(50_000 + i, 40), max_tokens=GENERATED_TOKENS)
            for i in range(NUM_GENERATING)
        ]

    @contextlib.contextmanager
    def engine(self, disk: Path | None) -> Iterator[Engine]:
        more: dict[str, Any] = {}
        if disk is not None:
            settings = {"host_size": "128MiB", "disk_size": "1900MiB", "load_timeout": "30s"}
            more["kv_transfer_config"] = kvloft(disk, **settings)
        engine = self._zygote.engine(
            engine_kwargs(self._model, num_blocks=400, max_num_seqs=16, max_model_len=1024, **more)
        )
        try:
            yield engine
            engine.stop()
        finally:
            engine.kill()

    def fill(self, disk: Path) -> None:
        """Write the cached prompts to disk, a few at a time, because they do not all fit in host
        memory.
        """
        with self.engine(disk) as engine:
            for at in range(0, len(self.known), FILL_BATCH):
                engine.ask(*[prompt.again() for prompt in self.known[at : at + FILL_BATCH]])
                engine.flush()

    def run(self, engine: Engine) -> tuple[float, list[Result]]:
        """Return the time in seconds until all requests have finished, and the results of the
        generating requests.
        """
        engine.ask(*[prompt.again() for prompt in WARM_UP])
        generating = [request.again() for request in self.generating]
        engine.add(*generating)
        engine.step(2)
        begin = time.monotonic()
        engine.add(*[prompt.again() for prompt in self.known])
        results = engine.run()
        return time.monotonic() - begin, [results[request.id] for request in generating]

    def found(self, disk: Path, results: list[Result]) -> float:
        """Return the fraction of the chunks saved by ``self.generating`` that a new engine finds on
        disk.

        The engine may compute chunks instead of waiting for the disk, but it writes only chunks
        that are missing on disk.
        """
        # The KV of the last generated token is never computed.
        prompts = [
            (*request.ids, *result.tokens)[:-1]
            for request, result in zip(self.generating, results, strict=True)
        ]  # type: ignore[misc]
        with self.engine(disk) as engine:
            engine.wait_for_disk()
            engine.ask_each(*[Req(prompt, max_tokens=1) for prompt in prompts])
            engine.flush()
            num_missing = engine.store()["disk_writes"]
        return 1 - num_missing * BLOCK / sum(full_blocks(len(prompt)) for prompt in prompts)


def plain(scene: Scene) -> tuple[float, float]:
    """Return the time in seconds that vLLM without kvloft takes for all requests, and its prefill
    rate in tokens per second.
    """
    with scene.engine(None) as engine:
        seconds, _ = scene.run(engine)
        known = scene.known[:100]
        begin = time.monotonic()
        engine.ask(*[prompt.again(max_tokens=1) for prompt in known])
        return seconds, sum(prompt.num_prompt_tokens for prompt in known) / (
            time.monotonic() - begin
        )


def measure(scene: Scene, folder: Path, speed: str, rounds: int, say: Any) -> dict[str, Any]:
    """Measure kvloft with all cached prompts on a disk of the given speed and none in host memory.

    Runs alternate with runs of plain vLLM, because the machine's load changes. Times are medians.
    """
    pairs, found = [], 0.0
    with mounted(folder / speed, size_mib=2400) as disk:
        path = disk.path / "kvloft"
        scene.fill(path)
        for nth in range(rounds):
            plain_s, tokens_per_s = plain(scene)
            prefill_mib_s = tokens_per_s * TOKEN_BYTES / 2**20
            mib_s = prefill_mib_s * float(speed[:-1]) if speed.endswith("x") else float(speed)
            with scene.engine(path) as engine, throttled(disk, engine.pid, mib_s):
                seconds, results = scene.run(engine)
                engine.flush()
                stats = engine.store()
            if not nth:
                found = scene.found(path, results)
            pairs.append((plain_s, seconds))
            say(
                f"{speed}: {seconds:.1f} s, vLLM alone {plain_s:.1f} s, {stats['disk_reads']} reads"
            )
    plain_s, seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    names = ("disk_reads", "disk_writes", "disk_dropped", "disk_unwritten")
    row = {
        "speed": speed,
        "mib_s": mib_s,
        "prefill_mib_s": prefill_mib_s,
        "found": found,
        "pairs": pairs,
    }
    row |= {"plain_s": plain_s, "seconds": seconds, "ratio": seconds / plain_s}
    return row | {name: stats.get(name) for name in names}


def judge(result: dict[str, Any]) -> list[str]:
    """Return a sentence for each result that misses its target."""
    problems = []
    for row in result["rows"]:
        most = 0.8 if row["mib_s"] >= 1.9 * row["prefill_mib_s"] else 1.1
        if row["ratio"] > most:
            problems.append(
                f"{row['speed']}: takes {row['ratio']:.2f} times as long as vLLM (limit: {most})"
            )
        if row["found"] < 0.9:
            problems.append(
                f"{row['speed']}: only {row['found']:.0%} of the saved tokens are found"
            )
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--prompts", type=int, default=300, help="number of cached prompts (default 300)"
    )
    parser.add_argument(
        "--tokens", type=int, default=300, help="number of tokens per prompt (default 300)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="number of runs with and without kvloft at each speed (default 3)",
    )
    parser.add_argument(
        "--speeds",
        nargs="+",
        default=["32", "2x", "100x"],
        help="speeds in MiB/s or in multiples of the prefill rate",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all measurements to FILE")
    args = parser.parse_args()
    os.environ["KV_DISK_PACING"] = "1"  # see zygote.py
    console = Console(width=None if sys.stdout.isatty() else 120)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvloft-slow-disk-")))
        scene = Scene(stack, folder, args.prompts, args.tokens)
        result: dict[str, Any] = {
            "rows": [
                measure(scene, folder, speed, args.rounds, console.print) for speed in args.speeds
            ]
        }
    table = Table(
        "disk",
        "MiB/s",
        "prefill MiB/s",
        "vLLM s",
        "kvloft s",
        "ratio",
        "saves found",
        "reads",
        "unwritten",
    )
    for row in result["rows"]:
        numbers = [f"{row[name]:.0f}" for name in ("mib_s", "prefill_mib_s")]
        table.add_row(
            row["speed"],
            *numbers,
            f"{row['plain_s']:.1f}",
            f"{row['seconds']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['found']:.0%}",
            str(row["disk_reads"]),
            str(row["disk_unwritten"]),
        )
    console.print(table)
    result["problems"] = judge(result)
    return finish(console, result, args.json)


if __name__ == "__main__":
    raise SystemExit(main())
