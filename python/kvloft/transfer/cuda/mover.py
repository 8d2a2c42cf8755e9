"""CudaMover: chunks between paged KV in HBM and pinned host frames, on streams of its own, so that no step waits.

Saves: a kernel gathers a piece into a staging slot as soon as the forward that wrote it is done, the copy engine takes it to
the frames, then the trailer is written. Loads: copied in, checked by tag while a kernel scatters them. Ordering is on the GPU:
`begin_step` makes the next forward wait for gathers that still read a block it may write (I2), and loads wait for what ran
before the step. It must not know engines; nothing here allocates GPU memory or waits for the device in a step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.frame_memory import FrameMemory, Trailers
from kvloft.transfer.cuda.kernels import Kernels
from kvloft.transfer.cuda.lanes import LoadLane, SaveLane, Tuning
from kvloft.transfer.cuda.pieces import ChunkTable, Piece, Shape, split
from kvloft.transfer.cuda.pinning import GOOD_PIECE_BYTES, PinnedRange, numa_node_of
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished
from kvloft.types import BlockId, ChunkCopy, ChunkKey, LoadPlan, LoadResult, SavePlan

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    """The chunks of one submit call: chunks [0, num_done) are reported, or, for a load, are in.

    ``tags`` are what the kernels found so far, ``problems`` what is wrong with which chunk, ``plans`` the loads not yet reported
    as (plan, first chunk, one past its last).
    """

    table: ChunkTable
    copies: Sequence[ChunkCopy]
    tags: npt.NDArray[np.uint64]
    wanted_tags: npt.NDArray[np.uint64]
    problems: dict[int, str]
    plans: deque[tuple[LoadPlan, int, int]]
    num_done: int = 0


@dataclass(slots=True)
class _InFlight:
    job: _Job
    piece: Piece
    ticket: int
    submitted: float


class CudaMover:
    """Moves chunks for one GPU."""

    def __init__(
        self,
        layout: PagedLayout,
        frames: FrameMemory,
        kernels: Kernels,
        *,
        blocks_per_chunk: int,
        tuning: Tuning,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocates the staging rings and starts pinning ``frames``. Raises CudaError, or ValueError for a ring too small."""
        self._layout, self._memory, self._kernels, self._clock = layout, frames, kernels, clock
        self._device = kernels.tiles.device
        self._trailers = Trailers(frames, layout=layout.digest, block_bytes=layout.block_bytes)
        frames_per_pin = max(1, GOOD_PIECE_BYTES // frames.frame_bytes)
        self._shape = Shape(
            kernels.geometry, tuning.ring.slot_bytes, frames.part_bytes, blocks_per_chunk, frames.frame_bytes == frames.part_bytes,
            frames_per_pin,
        )  # fmt: skip
        self._tuning = tuning
        self._saves = SaveLane(kernels, tuning, frames)
        self._loads = LoadLane(kernels, tuning, frames)
        self._flying: dict[SaveLane | LoadLane, deque[_InFlight]] = {self._saves: deque(), self._loads: deque()}
        self._queued_loads: deque[tuple[_Job, Iterator[Piece]]] = deque()
        self._step_begun = driver.Event()
        self._forward_done = driver.Event()
        self._last_gather = np.full(layout.num_blocks, -1, dtype=np.int64)
        self._done = Finished()
        self._busy_until = {self._saves: 0.0, self._loads: 0.0}
        self._broken: str | None = None
        self.num_dropped_saves = 0
        node = numa_node_of(_pci_bus_id(self._device))
        self._pinned = PinnedRange(
            frames.address, frames.size_bytes, piece_bytes=frames_per_pin * frames.frame_bytes, numa_node=node
        )
        self._step_begun.record(self._compute())

    # -- the seam -------------------------------------------------------------------------------------------------

    def begin_step(self, rewritten: Sequence[BlockId]) -> None:
        """Before a forward is launched: ``rewritten`` are blocks it may write that were saved from for another owner."""
        if self._broken is not None:
            return
        try:
            compute = self._compute()
            if rewritten and self._flying[self._saves]:
                ticket = int(self._last_gather[np.asarray(rewritten, dtype=np.int64)].max())
                self._saves.order_after_gather(compute, ticket)
            self._step_begun.record(compute)
        except driver.CudaError as error:
            self._break(str(error))

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers behind the forward just launched. What cannot start now is dropped, never waited for."""
        copies = self._drop_unpinned([copy for plan in plans for copy in plan.chunks])
        if not copies:
            return
        try:
            job = self._new_job(copies)
        except ValueError as error:
            logger.error("kvloft: saves that cannot be made: %s", error)
            self._drop(copies)
            return
        try:
            self._forward_done.record(self._compute())
            self._saves.kernel_stream.wait(self._forward_done)
            for piece in split(job.table, self._shape):
                if self._saves.is_full(len(self._flying[self._saves])) and not piece.is_rest_of_chunk:
                    self._drop(copies[piece.begin :])
                    job.copies = copies[: piece.begin]
                    break
                self._last_gather[piece.block_ids] = self._fly(self._saves, job, piece)
        except (driver.CudaError, ValueError) as error:
            self._break(str(error), job)

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Queue loads; those with nothing to copy are reported by the next `poll`."""
        plans_of = deque[tuple[LoadPlan, int, int]]()
        copies: list[ChunkCopy] = []
        for plan in plans:
            self._done.bad_blocks.update(plan.lost)
            plans_of.append((plan, len(copies), len(copies) + len(plan.chunks)))
            copies += plan.chunks
        if self._broken is not None:
            self._fail_loads(plans_of)
            return
        try:
            job = self._new_job(copies)
        except ValueError as error:
            logger.error("kvloft: loads that cannot be made: %s", error)
            self._fail_loads(plans_of)
            return
        job.plans = plans_of
        rows = self._trailers.read(job.table.frames)
        job.problems = self._trailers.problems(rows, job.table.keys, job.table.num_blocks)
        job.wanted_tags = rows["tag"].astype(np.uint64)
        self._queued_loads.append((job, split(job.table, self._shape)))
        self._finish_plans(job)
        try:
            self._pump()
        except (driver.CudaError, ValueError) as error:
            self._break(str(error))

    def poll(self) -> Finished:
        if self._broken is None:
            try:
                self._land(self._saves)
                self._land(self._loads)
                self._pump()
            except driver.CudaError as error:
                self._break(str(error))
        done, self._done = self._done, Finished()
        return done

    def drain(self) -> Finished:
        """Waits on the host until nothing is in flight; for sleep and shutdown, not for steps."""
        while self._broken is None and (self._queued_loads or any(self._flying.values())):
            try:
                for lane, flying in self._flying.items():
                    if flying:
                        lane.wait_for(flying[0].ticket)
                    self._land(lane)
                self._pump()
            except driver.CudaError as error:
                self._break(str(error))
        done, self._done = self._done, Finished()
        return done

    def close(self) -> None:
        """Drain, unpin. The mover is of no use afterwards."""
        self.drain()
        self._broken = self._broken or "closed"
        self._pinned.close()

    def wait_pinned(self, timeout_s: float | None = None) -> bool:
        """Until all host memory is pinned (or could not be)."""
        return self._pinned.wait(timeout_s)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _new_job(self, copies: Sequence[ChunkCopy]) -> _Job:
        """Raises ValueError for a copy that would leave the arena, its frame or the paged KV."""
        table = ChunkTable.of(copies)
        table.check(self._memory.num_frames, self._layout.num_blocks, self._shape.blocks_per_chunk)
        zeros = np.zeros(len(copies), dtype=np.uint64)
        return _Job(table, copies, zeros, zeros, {}, deque())

    def _fly(self, lane: SaveLane | LoadLane, job: _Job, piece: Piece) -> int:
        frames = job.table.frames[piece.begin : piece.end]
        if lane is self._loads:
            ticket = self._loads.submit(piece, frames, is_pinned=self._pinned.is_complete)
        else:
            ticket = lane.submit(piece, frames)
        self._flying[lane].append(_InFlight(job, piece, ticket, self._clock()))
        return ticket

    def _pump(self) -> None:
        """Send queued loads while the lane has room."""
        flying = self._flying[self._loads]
        while self._queued_loads and not self._loads.is_full(len(flying)):
            job, pieces = self._queued_loads[0]
            piece = next(pieces, None)
            if piece is None:
                self._queued_loads.popleft()
                continue
            ids = piece.block_ids[piece.block_ids >= 0]
            if len(ids) and self._flying[self._saves]:
                self._saves.order_after_gather(self._loads.kernel_stream, int(self._last_gather[ids].max()))
            if piece.begin == 0:
                self._loads.kernel_stream.wait(self._step_begun)
            self._fly(self._loads, job, piece)

    def _land(self, lane: SaveLane | LoadLane) -> None:
        """Take in the pieces that are done, oldest first."""
        flying = self._flying[lane]
        while flying and lane.is_done(flying[0].ticket):
            flight = flying.popleft()
            job, piece = flight.job, flight.piece
            job.tags[piece.begin : piece.end] += lane.take_tags(flight.ticket, len(piece.segments))
            now = self._clock()
            seconds = now - max(flight.submitted, self._busy_until[lane])
            self._busy_until[lane] = now
            if lane is self._saves:
                self._done.seconds_saving += seconds
                self._land_save(job, piece)
            else:
                self._done.seconds_loading += seconds
                self._land_load(job, piece)

    def _land_save(self, job: _Job, piece: Piece) -> None:
        self._done.num_bytes_saved += piece.num_bytes
        done = slice(piece.begin, piece.done_end)
        if piece.done_end > piece.begin:
            table = job.table
            self._trailers.seal(table.frames[done], table.keys[done], job.tags[done], table.num_blocks[done])
            self._done.saved += [copy.ticket for copy in job.copies[done]]
            job.num_done = piece.done_end

    def _land_load(self, job: _Job, piece: Piece) -> None:
        self._done.num_bytes_loaded += piece.num_bytes
        for chunk in np.flatnonzero(job.tags[piece.begin : piece.done_end] != job.wanted_tags[piece.begin : piece.done_end]):
            job.problems.setdefault(piece.begin + int(chunk), "tag")
        job.num_done = max(job.num_done, piece.done_end)
        self._finish_plans(job)

    def _finish_plans(self, job: _Job) -> None:
        """Report the loads whose last chunk is in."""
        while job.plans and job.plans[0][2] <= job.num_done:
            plan, begin, end = job.plans.popleft()
            bad: list[tuple[ChunkKey, str]] = []
            for chunk in range(begin, end) if job.problems else ():
                if (problem := job.problems.get(chunk)) is not None:
                    bad.append((job.copies[chunk].key, problem))
                    self._done.bad_blocks.update(job.copies[chunk].blocks)
            if bad:
                logger.warning("kvloft: %d chunks failed their check (%s); they are misses", len(bad), bad[0][1])
            self._done.loads.append(LoadResult(plan.req_id, plan.load_id, tuple(bad)))

    # -- trouble --------------------------------------------------------------------------------------------------

    def _drop_unpinned(self, copies: list[ChunkCopy]) -> list[ChunkCopy]:
        """Copies to frames that are pinned; the others are dropped, as all are when the mover is broken."""
        if self._broken is not None:
            self._drop(copies)
            return []
        if self._pinned.is_complete:
            return copies
        num_pinned = self._pinned.num_pinned_bytes // self._memory.frame_bytes
        self._drop([copy for copy in copies if copy.frame >= num_pinned])
        return [copy for copy in copies if copy.frame < num_pinned]

    def _drop(self, copies: Sequence[ChunkCopy]) -> None:
        self.num_dropped_saves += len(copies)
        self._done.failed += [copy.ticket for copy in copies]

    def _fail_loads(self, plans: deque[tuple[LoadPlan, int, int]]) -> None:
        """Loads that bring nothing."""
        for plan, _, _ in plans:
            self._done.bad_blocks.update(chain.from_iterable(copy.blocks for copy in plan.chunks))
            self._done.loads.append(LoadResult(plan.req_id, plan.load_id))
        plans.clear()

    def _break(self, reason: str, unsent: _Job | None = None) -> None:
        """After a CUDA error: everything in flight failed, and everything to come does. Waits until no copy runs."""
        logger.error("kvloft: this worker stops moving pages, so nothing is cached any more: %s", reason)
        self._broken = reason
        for lane in self._flying:
            lane.stop()
        saves = [flight.job for flight in self._flying[self._saves]] + ([unsent] if unsent is not None else [])
        for job in dict.fromkeys(saves):
            self._drop(job.copies[job.num_done :])
        loads = [flight.job for flight in self._flying[self._loads]] + [job for job, _ in self._queued_loads]
        for job in dict.fromkeys(loads):
            self._fail_loads(job.plans)
        for flying in self._flying.values():
            flying.clear()
        self._queued_loads.clear()

    def _compute(self) -> driver.Stream:
        return driver.Stream.view(torch.cuda.current_stream(self._device).cuda_stream)


def _pci_bus_id(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, number = (int(getattr(properties, name, 0)) for name in names)
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"
