"""Provides the copy benchmark's rig: paged KV with one page size, registered frames and a mover.

The rig times copies with GPU events on the mover's streams, and verifies the copied bytes.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from kvloft import _core
from kvloft.bench.link import FORWARD_CYCLES, Ceiling, HostFrames, occupy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.kernels import Kernels
from kvloft.transfer.cuda.lanes import Tuning
from kvloft.transfer.cuda.mover import CudaMover
from kvloft.transfer.frames import part_bytes_for
from kvloft.transfer.layout import PagedLayout, Plane
from kvloft.transfer.mover import Finished

NUM_RUNS = 21
GATE_CYCLES = 60_000_000
"""Number of clock cycles (about 30 ms) of the kernel that runs while copies in both directions are
being queued.
"""


FRAME_ORDERS: dict[str, Callable[[int], tuple[int, int]]] = {
    "ascending": lambda frame: (0, frame),
    "descending": lambda frame: (0, -frame),
    "random": lambda frame: (frame * 7919 % 10007, 0),
    "in pairs": lambda frame: (frame // 2 * 7919 % 10007, frame),
}
"""Frame orders to measure. Each value is a function that returns a frame's sort key."""


class Rate(NamedTuple):
    """One direction's rates in a single run, or their medians over several runs.

    ``share`` is the bandwidth as a fraction of the ceiling.
    """

    gbps: float
    host_us_per_mib: float
    ceiling_gbps: float
    share: float


@dataclass(frozen=True, slots=True)
class Case:
    """A paged KV layout whose blocks have ``num_planes`` pages of ``page_bytes`` bytes."""

    page_bytes: int
    num_planes: int

    @classmethod
    def of(cls, page_bytes: int) -> Self:
        """Return a case with 1 to 64 planes, as in real models, and blocks of about 2 MiB."""
        return cls(page_bytes, max(1, min(64, (2 << 20) // page_bytes)))

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.num_planes


class Rig:
    """Paged KV on the GPU, and a mover.

    Half of the blocks are saved, and the other half are load targets. Each half holds
    ``payload_bytes``.
    """

    def __init__(
        self,
        case: Case,
        host: HostFrames,
        payload_bytes: int,
        tuning: Tuning,
        *,
        macros: tuple[tuple[str, str], ...] = (),
        frame_order: str = "ascending",
        encodes: bool = False,
    ) -> None:
        """Create the pages, frames and mover. ``frame_order`` is a key of FRAME_ORDERS.

        With ``encodes``, frames are compressed, and pages hold normally distributed bf16 values,
        similar to real KV.
        """
        self.case = case
        self.num_chunks = payload_bytes // case.block_bytes
        num_blocks = 2 * self.num_chunks + 1
        self.buffer = torch.empty(
            case.num_planes * num_blocks * case.page_bytes, dtype=torch.uint8, device="cuda"
        )
        if encodes:
            self.buffer.view(torch.bfloat16).normal_()
        else:
            self.buffer.random_(0, 256)
        self.pages = self.buffer.view(case.num_planes, num_blocks, case.page_bytes)
        storage = self.buffer.untyped_storage()
        step = num_blocks * case.page_bytes
        planes = tuple(
            Plane(storage, i * step, case.page_bytes, case.page_bytes, num_blocks, encodes)
            for i in range(case.num_planes)
        )
        layout = PagedLayout(planes, num_blocks, bytes(32))
        kernels = Kernels(layout, self.buffer.device, macros=macros, encodes=encodes)
        part = part_bytes_for(
            case.block_bytes, kernels.block_tiles.tiles_per_block if encodes else 0
        )
        memory = host.memory(part, 2 * self.num_chunks)
        self.mover = CudaMover([(layout, kernels)], [memory], blocks_per_chunk=[1], tuning=tuning)
        self.mover.wait_registered()
        order = list(
            map(BlockId, random.Random(1).sample(range(1, num_blocks), 2 * self.num_chunks))
        )
        self._from, self._to = order[: self.num_chunks], order[self.num_chunks :]
        self._frames = sorted(range(self.num_chunks), key=FRAME_ORDERS[frame_order])
        self.num_bytes = self.num_chunks * case.block_bytes
        self._begin = driver.Event(timing=True)
        gc.collect()
        # Like vLLM at startup, exempt existing objects from garbage collection.
        gc.freeze()

    def save_plan(self, *, elsewhere: bool = False) -> SavePlan:
        """Return a plan that saves all chunks. If ``elsewhere`` is True, the plan uses frames that
        no load reads.
        """
        first = self.num_chunks if elsewhere else 0
        frames = [first + frame for frame in self._frames]
        return SavePlan(ReqId("bench"), _batch(frames, self._from, range(self.num_chunks)))

    def load_plan(self) -> LoadPlan:
        return LoadPlan(ReqId("bench"), 0, _batch(self._frames, self._to))

    def start_save(self, plan: SavePlan | None = None) -> None:
        self.mover.submit_saves([plan or self.save_plan()])

    def start_load(self, plan: LoadPlan | None = None) -> None:
        self.mover.submit_loads([plan or self.load_plan()])

    def wait_sent(self) -> None:
        """Wait until the mover has submitted all copies. The mover submits only a few pieces at a
        time.
        """
        while self.mover.is_behind:
            time.sleep(1e-4)

    def verify(self) -> None:
        """Overwrite the target blocks, save all chunks, and load them into the target blocks.

        Raises RuntimeError if any byte differs.
        """
        self.pages[:, torch.tensor(self._to, device="cuda")] = 0xA5
        torch.cuda.synchronize()
        self.mover.begin_step(())
        self.start_save()
        done = self.mover.drain()
        self.start_load()
        loaded = self.mover.drain()
        self.check(done, saves=True, loads=False)
        self.check(loaded, saves=False, loads=True)
        for begin in range(0, self.num_chunks, 64):
            source, target = (
                torch.tensor(ids[begin : begin + 64], device="cuda")
                for ids in (self._from, self._to)
            )
            if not torch.equal(self.pages[:, source], self.pages[:, target]):
                raise RuntimeError("loaded pages differ from the saved pages")

    def seconds(self, what: str) -> tuple[float, float]:
        """Return one copy's GPU time and the host time needed to submit it, in seconds.

        'save' is submitted while a kernel simulates a forward pass, and is timed from the end of
        the kernel. 'save_idle' and 'load' are timed from submission on an idle GPU. 'both' is timed
        from the end of a kernel that runs while one thread submits both directions in sequence.
        """
        mover = self.mover
        saves, loads = mover.save_lane, mover.load_lane
        save_plan, load_plan = self.save_plan(elsewhere=what == "both"), self.load_plan()
        mover.begin_step((), has_loads=what in ("load", "both"))
        driver.synchronize()
        if what in ("save", "both"):
            occupy(self._begin, FORWARD_CYCLES if what == "save" else GATE_CYCLES)
        else:
            self._begin.record((loads if what == "load" else saves).copy_streams[0])
        for stream in (*saves.kernel_streams, *loads.copy_streams):
            stream.wait(self._begin)
        queued = time.perf_counter()
        if what != "load":
            self.start_save(save_plan)
        if what in ("load", "both"):
            self.start_load(load_plan)
        queued = time.perf_counter() - queued
        self.wait_sent()
        ends = []
        for names, lane in ((("save", "save_idle", "both"), saves), (("load", "both"), loads)):
            streams = (*lane.copy_streams, *lane.kernel_streams)
            for stream in streams if what in names else ():
                ends.append(driver.Event(timing=True))
                ends[-1].record(stream)
        driver.synchronize()
        self.check(mover.drain(), saves=what != "load", loads=what in ("load", "both"))
        return max(end.seconds_since(self._begin) for end in ends), queued

    def check(self, done: Finished, *, saves: bool, loads: bool, num_rounds: int = 1) -> None:
        """Raise RuntimeError if any copy in the ``num_rounds`` rounds failed or is missing."""
        expected = (num_rounds * self.num_chunks * saves, num_rounds * loads)
        if (len(done.saved), len(done.loads)) != expected or done.failed or done.bad_blocks:
            raise RuntimeError(
                f"invalid measurement: {len(done.saved)} of {expected[0]} chunks were saved, "
                f"and {len(done.failed)} saves failed; {len(done.loads)} of {expected[1]} loads "
                f"completed, with {len(done.bad_blocks)} bad blocks"
            )

    def median(self, what: str, ceiling: Ceiling | None = None) -> Rate:
        """Return the medians over `NUM_RUNS` runs.

        Measures ``ceiling`` before each run, so that other load on the host affects both.
        """
        self.seconds(what)
        runs: list[Rate] = []
        for _ in range(NUM_RUNS):
            limit = ceiling.gbps(what) if ceiling is not None else math.inf
            seconds, queued = self.seconds(what)
            gbps = self.num_bytes / seconds / 1e9
            runs.append(Rate(gbps, queued * 1e6 / (self.num_bytes / 2**20), limit, gbps / limit))
        return Rate(*map(statistics.median, zip(*runs, strict=True)))

    def close(self) -> None:
        gc.unfreeze()
        self.mover.close()


def _batch(
    frames: Sequence[int], blocks: Sequence[BlockId], tickets: Sequence[int] = ()
) -> _core.ChunkBatch:
    """Return a batch of one-block chunks."""
    keys = b"".join(frame.to_bytes(32, "little") for frame in frames)
    part = (0, np.array(frames, "<u4").tobytes(), keys, np.array(blocks, "<i4").tobytes())
    return _core.ChunkBatch([part], np.array(tickets, "<u8").tobytes())
