"""Runs the measurements of `kvloft bench copy`:

- Save, load and bidirectional bandwidth by page size. kvloft's copies alternate with a single large
  copy, whose bandwidth is the ceiling. Raw and compressed frames are measured. For compressed
  frames, pages hold normally distributed bf16 values, and rates count uncompressed bytes.
- Slowdown of a matmul and an HBM-bound add during a copy.
- Delay of small copies during a large copy.
- Cost of computing the tag.

Each case is verified bit for bit before it is measured.
"""

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvloft.bench.link import Ceiling, HostFrames, interference, waits
from kvloft.bench.rig import FRAME_ORDERS, Case, Rig
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.lanes import Tuning
from kvloft.transfer.cuda.mover import device_encodes

KIB = 1024
PAGES = tuple(n * KIB for n in (4, 8, 16, 18, 32, 64, 128, 512, 2048))
DIRECTIONS = ("save", "load", "both")
NUM_ROUNDS = 4
"""Number of consecutive copies during a computation."""
NUM_INTERFERENCE_RUNS = 3
"""Number of runs of each measurement with computation. Runs are repeated, because matmul durations
vary.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """Values shared by all measurements."""

    host: HostFrames
    payload_bytes: int
    tuning: Tuning
    ceiling: Ceiling
    encodings: tuple[bool, ...]
    """Contains False for raw frames and, if the GPU supports it, True for compressed frames."""

    def rig(self, case: Case, **options: Any) -> Rig:
        return Rig(case, self.host, self.payload_bytes, self.tuning, **options)


def machine() -> dict[str, Any]:
    """Return a description of the GPU, and the driver and torch versions."""
    properties = torch.cuda.get_device_properties(0)
    version = driver.driver_version()
    return {
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        "driver": _driver_release(),
        "torch": torch.__version__,
        "host": platform.machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _driver_release() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        words = []
    return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")


def run(
    *,
    payload_bytes: int,
    tuning: Tuning,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run all measurements and return the results.

    Sizes are in bytes and rates in GB/s (1e9 bytes per second). Rates count each copied byte once,
    not as a read and a write.
    """
    ceiling = Ceiling(HostFrames(2 * payload_bytes), payload_bytes)
    host = HostFrames(2 * payload_bytes + (64 << 20) + 2 * payload_bytes // 8)
    encodings = (False, True) if device_encodes(torch.device("cuda")) else (False,)
    bench = Bench(host, payload_bytes, tuning, ceiling, encodings)
    result: dict[str, Any] = {"machine": machine(), "tuning": dataclasses.asdict(tuning)}
    result["pages"] = list(_by_page(bench, progress))
    result["ceiling"] = {
        what: statistics.median(row[f"{what}_ceiling"] for row in result["pages"])
        for what in DIRECTIONS
    }
    progress("frames out of order")
    result["frames"] = list(_by_frame_order(bench))
    progress("copies during computation")
    result["interference"] = list(_interference(bench))
    progress("delay of small copies")
    result["waits"] = list(_waits(bench))
    progress("cost of the tag")
    result["tag"] = _tag_price(bench)
    ceiling.close()
    return result


def _by_page(bench: Bench, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for page_bytes in PAGES:
        progress(f"pages of {page_bytes // KIB} KiB")
        case = Case.of(page_bytes)
        yield {"page_bytes": page_bytes, "num_planes": case.num_planes, **_rows_of(bench, case)}


def _rows_of(bench: Bench, case: Case, **options: Any) -> dict[str, Any]:
    """Verify and measure raw frames. If the GPU supports compression, do the same for compressed
    frames, and return the results under the key "compressed".
    """
    rows: list[dict[str, Any]] = []
    for encodes in bench.encodings:
        rig = bench.rig(case, encodes=encodes, **options)
        rig.verify()
        rows.append(_row_of(rig, bench.ceiling))
        rig.close()
        del rig  # free these pages before the next rig allocates its pages
    raw, *compressed = rows
    return {**raw, "compressed": compressed[0]} if compressed else raw


def _row_of(rig: Rig, ceiling: Ceiling) -> dict[str, float]:
    """Return each direction's bandwidth and ceiling in GB/s, and the host time per MiB.

    kvloft's copies alternate with a single large copy, because rates drift over time.
    """
    row: dict[str, float] = {}
    for what in (*DIRECTIONS, "save_idle"):
        rate = rig.median(what, ceiling)
        row |= {what: rate.gbps, f"{what}_host_us_per_mib": rate.host_us_per_mib}
        row |= {f"{what}_ceiling": rate.ceiling_gbps, f"{what}_share": rate.share}
    return row


def _by_frame_order(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measure copies of consecutive chunks in frames that are not contiguous, as happens after
    evictions.
    """
    for order in [name for name in FRAME_ORDERS if name != "ascending"]:
        yield {"order": order, **_rows_of(bench, Case.of(64 * KIB), frame_order=order)}


def workloads() -> dict[str, Callable[[], object]]:
    """Return one compute-bound and one HBM-bound computation, each taking about a millisecond."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    x, y = (torch.randn(1 << 28, device="cuda", dtype=torch.float32) for _ in range(2))
    z = torch.empty_like(x)
    return {"matmul": lambda: torch.mm(a, b, out=c), "add": lambda: torch.add(x, y, out=z)}


def _interference(bench: Bench) -> Iterator[dict[str, Any]]:
    works, ceiling = workloads(), bench.ceiling
    for name, work in works.items():
        for what in ("save", "load"):

            def engine(what: str = what) -> None:
                for _ in range(NUM_ROUNDS):
                    ceiling.start(what)

            found = [
                interference(work, engine, lambda: None, ceiling.streams, 60)
                for _ in range(NUM_INTERFERENCE_RUNS)
            ]
            yield _row("copy engine", name, what, NUM_ROUNDS * bench.payload_bytes, found)
    for encodes in bench.encodings:
        by = "kvloft, compressed" if encodes else "kvloft"
        rig = bench.rig(Case.of(64 * KIB), encodes=encodes)
        rig.verify()
        for name, work in works.items():
            for what in ("save", "load"):
                found = [rig_interference(rig, work, what) for _ in range(NUM_INTERFERENCE_RUNS)]
                yield _row(by, name, what, NUM_ROUNDS * rig.num_bytes, found)
        rig.close()
        del rig


def rig_interference(rig: Rig, work: Callable[[], object], what: str) -> tuple[float, float, float]:
    """Run `interference` while the rig makes `NUM_ROUNDS` consecutive copies.

    Raises RuntimeError if a chunk was not copied.
    """
    start = rig.start_save if what == "save" else rig.start_load
    mover = rig.mover
    streams = mover.save_lane.copy_streams if what == "save" else mover.load_lane.kernel_streams
    rig.mover.begin_step((), has_loads=what == "load")

    def rounds() -> None:
        for _ in range(NUM_ROUNDS):
            start()

    found = interference(work, rounds, rig.wait_sent, list(streams), 60)
    rig.check(rig.mover.drain(), saves=what == "save", loads=what == "load", num_rounds=NUM_ROUNDS)
    return found


def _waits(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measure how long 128 KiB copies take during one large copy and during kvloft's copies."""
    ceiling = bench.ceiling
    for what in DIRECTIONS[:2]:
        ceiling.start(what)
        driver.synchronize()
        end = driver.Event()

        def start(what: str = what, end: driver.Event = end) -> None:
            ceiling.start(what)
            end.record(ceiling.streams[DIRECTIONS.index(what)])

        yield _wait_row("one queue", what, waits(start, end.is_done, what))
    rig = bench.rig(Case.of(64 * KIB))
    rig.verify()
    for what in DIRECTIONS[:2]:
        rig.mover.begin_step(())
        start_copy = rig.start_save if what == "save" else rig.start_load
        found = waits(start_copy, lambda: not rig.mover.is_behind, what)
        rig.mover.drain()
        yield _wait_row("kvloft", what, found)
    rig.close()


def _wait_row(by: str, what: str, found: list[float]) -> dict[str, Any]:
    median_ms, max_ms = statistics.median_high(found) * 1e3, max(found) * 1e3
    return {"by": by, "copy": what, "median_ms": median_ms, "max_ms": max_ms}


def _row(
    by: str, work: str, what: str, num_bytes: int, found: list[tuple[float, float, float]]
) -> dict[str, Any]:
    """Return the medians over several `interference` runs."""
    slowdowns = sorted(during / alone for alone, during, _ in found)
    return {
        "by": by,
        "work": work,
        "copy": what,
        "slowdown": statistics.median(slowdowns),
        "slowdowns": slowdowns,
        "alone_ms": statistics.median(alone for alone, _, _ in found) * 1e3,
        "gbps": statistics.median(num_bytes / copy / 1e9 for _, _, copy in found),
    }


def _tag_price(bench: Bench) -> dict[str, float]:
    price: dict[str, float] = {}
    for with_tag in (False, True):
        macros = () if with_tag else (("KVLOFT_BENCH_WITHOUT_TAG", "1"),)
        rig = bench.rig(Case.of(64 * KIB), macros=macros)
        for what in ("save", "load"):
            if with_tag:
                rig.verify()
            elif what == "load":
                rig.start_save()
                rig.mover.drain()
            price[f"{what}_{'with' if with_tag else 'without'}"] = rig.median(what).gbps
        rig.close()
    return price
