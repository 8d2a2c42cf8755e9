"""Runs two real engines with chats and injected faults for a given time: `python -m tests.e2e.soak
--minutes 30`.

The first engine runs the whole time, and its memory, handles and threads are monitored. The second
engine is repeatedly killed or stopped, and restarted. Disks are real ext4 file systems that freeze
and fill up, or plain directories if mounting is not allowed. Bits are flipped in files and frames.
Every token is compared with vLLM's output without any cache. The exit status is 1 if a token
differs, a pin leaks, or resource usage grows.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import tiny
from .client import Engine, Req, Zygote, engine_kwargs, kvloft, random_ids
from .conftest import Truth
from .ext4 import Ext4, can_mount, mounted
from .report import finish

MAX_GROWTH = {"memory MiB": 48.0, "handles": 4.0, "threads": 2.0}
"""Maximum growth of the median from the second third to the last third of the samples."""


class Subject:
    """An engine with its disk, its faults and its results."""

    def __init__(
        self, name: str, start: Callable[[Path], Engine], folder: Path, disk: Ext4 | None
    ) -> None:
        self.name, self._start, self.folder, self.disk = name, start, folder, disk
        self.engine = start(folder)
        self.samples: list[dict[str, float]] = []
        self.totals: Counter[str] = Counter()
        self._sick_until = 0.0

    def ask(self, requests: list[Req], truth: Truth) -> int:
        """Run a batch and return the number of outputs that differ from the reference."""
        results = self.engine.ask(*[r.again() for r in requests])
        self.totals.update(
            requests=len(results), external_tokens=sum(r.num_external for r in results)
        )
        return sum(
            result.tokens != truth.tokens(request)
            for result, request in zip(results, requests, strict=True)
        )

    def sample(self) -> None:
        """Sample the private memory, open handles and threads of the engine process."""
        proc = Path(f"/proc/{self.engine.pid}")
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        self.samples.append(
            {
                "memory MiB": int(status["RssAnon"].split()[0]) / 1024,
                "handles": len(list((proc / "fd").iterdir())),
                "threads": int(status["Threads"]),
            }
        )

    def hurt(self, pick: random.Random, *, may_restart: bool) -> str:
        """Inject one fault and return its name."""
        kinds = ["bits in files", "bits in frames", "reset", "abort"]
        kinds += ["freeze", "fill"] if self.disk is not None else []
        kinds += ["kill -9", "restart"] if may_restart else []
        kind = pick.choice(kinds)
        match kind:
            case "bits in files":
                self._flip_files(pick)
            case "bits in frames":
                self.engine.flip_frames(keep=pick.randrange(8))
            case "reset":
                self.engine.reset(connector=True)
            case "abort":
                requests = [
                    Req(random_ids(pick.randrange(1 << 20), 200), max_tokens=8) for _ in range(3)
                ]
                self.engine.add(*requests)
                self.engine.step(pick.randrange(3))
                self.engine.abort(*[r.id for r in requests])
                self.engine.run()
            case "freeze" | "fill":
                assert self.disk is not None
                self.heal()  # a frozen file system cannot be filled
                self.disk.freeze() if kind == "freeze" else self.disk.fill()
                self._sick_until = time.monotonic() + pick.uniform(1, 8)
            case _:
                self.heal()
                self.engine.kill() if kind == "kill -9" else self.engine.stop()
                self.engine = self._start(self.folder)
        self.totals[kind] += 1
        return kind

    def _flip_files(self, pick: random.Random) -> None:
        for path in self.folder.glob("*/*.dat"):
            size = path.stat().st_size
            if size and not (self.disk is not None and self._sick_until):
                with path.open("r+b") as file:
                    file.seek(at := pick.randrange(size))
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1 << pick.randrange(8)]))

    def heal(self, *, if_due: bool = False) -> None:
        if self.disk is not None and not (if_due and time.monotonic() < self._sick_until):
            self.disk.thaw()
            self.disk.make_room()
            self._sick_until = 0.0

    def growth(self) -> dict[str, float]:
        """Return the growth of each median from the second to the last third of the samples."""
        third = len(self.samples) // 3
        if not third:
            return {}
        middle, last = self.samples[third : 2 * third], self.samples[2 * third :]
        return {
            name: statistics.median(s[name] for s in last)
            - statistics.median(s[name] for s in middle)
            for name in MAX_GROWTH
        }


def chats(truth: Truth, pick: random.Random) -> Iterator[list[Req]]:
    """Generate batches of chat turns with prompts that grow, share prefixes and recur."""
    known = [random_ids(i, 90 + 13 * i) for i in range(12)]
    while True:
        batch: list[Req] = []
        for _ in range(pick.randrange(1, 6)):
            at = pick.randrange(len(known))
            if len(known[at]) > 480:
                known[at] = known[at][: pick.randrange(40, 200)]
            known[at] = (*known[at], *random_ids(pick.randrange(1 << 10), pick.randrange(5, 60)))
            batch.append(Req(known[at], max_tokens=pick.randrange(2, 8)))
        if clear := truth.clear(batch):
            yield clear


def run(minutes: float, seed: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the soak test for ``minutes`` and return all counts and problems."""
    pick, problems, num_wrong = random.Random(seed), list[str](), 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvloft-soak-")))
        model = tiny.write_model(folder / "model")
        zygote = Zygote(folder)
        stack.callback(zygote.close)
        truth = Truth(lambda: zygote.engine(engine_kwargs(model, num_blocks=600)))

        def start(at: Path) -> Engine:
            settings = kvloft(
                at / "cache",
                policy="recompute",
                host_size="2MiB",
                disk_size="16MiB",
                load_timeout="500ms",
            )
            return zygote.engine(
                engine_kwargs(
                    model, num_blocks=80, kv_transfer_config=settings, enable_prefix_caching=True
                )
            )

        subjects: list[Subject] = []
        for name in ("lives on", "is killed"):
            disk = stack.enter_context(mounted(folder / name, size_mib=48)) if can_mount() else None
            subjects.append(Subject(name, start, disk.path if disk else folder / name, disk))
        end, next_sample, next_fault, begin = (
            time.monotonic() + 60 * minutes,
            0.0,
            0.0,
            time.monotonic(),
        )
        for batch in chats(truth, pick):
            now = time.monotonic()
            if now > end:
                break
            for subject in subjects:
                num_wrong += subject.ask(batch, truth)
                subject.heal(if_due=True)
                if now >= next_fault:
                    subject.hurt(pick, may_restart=subject is subjects[1])
            next_fault = now + 2.0 if now >= next_fault else next_fault
            if now >= next_sample:
                next_sample = now + 60 * minutes / 90
                subjects[0].sample()
            progress(
                f"{(now - begin) / 60:.1f} of {minutes:g} minutes, "
                f"{subjects[0].totals['requests']} requests, {num_wrong} wrong"
            )
        for subject in subjects:
            subject.heal()
            try:
                subject.engine.assert_at_rest()
            except AssertionError as error:
                problems.append(f"{subject.name}: not at rest: {error}")
            subject.engine.stop()
        truth.close()
    growth = subjects[0].growth()
    problems += [f"{name} grew by {by:g}" for name, by in growth.items() if by > MAX_GROWTH[name]]
    problems += [f"{num_wrong} outputs were wrong"] if num_wrong else []
    return {
        "minutes": minutes,
        "seed": seed,
        "num_wrong": num_wrong,
        "problems": problems,
        "growth": growth,
        "samples": subjects[0].samples,
        "totals": {s.name: dict(s.totals) for s in subjects},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="duration in minutes (default 30)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="seed for prompts and faults (default: the current time)",
    )
    parser.add_argument("--json", metavar="FILE", help="also write all counts to FILE")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.status("starting") as status:
        result = run(args.minutes, args.seed, status.update)
    table = Table(
        "", *result["totals"], title=f"Soak of {args.minutes:g} minutes, seed {args.seed}"
    )
    for name in sorted({name for totals in result["totals"].values() for name in totals}):
        table.add_row(name, *[str(totals.get(name, 0)) for totals in result["totals"].values()])
    console.print(table)
    first, last = (result["samples"] or [{}])[0], (result["samples"] or [{}])[-1]
    for name, by in result["growth"].items():
        console.print(
            f"{name}: {first[name]:g} in the first sample, {last[name]:g} in the last sample; "
            f"{by:+g} from the median of the second third to that of the last third"
        )
    return finish(console, result, args.json)


if __name__ == "__main__":
    raise SystemExit(main())
