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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import itemgetter

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

MIN_PUMP_S = 1e-3
PUMP_SHARE = 0.05
"""Host time that one call may spend on sending loads: that, or this share of the time since the last one. The rest goes with the
next call: a long load must not hold up the requests that decode beside it, nor the link starve behind long steps."""
SMALL = 4
"""The first piece of a save and the last of a load are so many times smaller than others: there the link waits for a kernel."""

_FRAME = itemgetter(ChunkCopy._fields.index("frame"))
"""Chunks are sent in the order of their frames, so that neighbours, in whichever order a store gave them out, are one copy."""


@dataclass(slots=True, eq=False)
class _Load:
    """A LoadPlan under way: how many of its chunks are not in yet, and which were bad."""

    plan: LoadPlan
    num_left: int
    bad: list[tuple[ChunkKey, str]]


@dataclass(slots=True, eq=False)
class _Job:
    """Chunks that finish together: as many as one piece takes, or one that takes many pieces.

    ``tags`` are what the kernels found so far; for loads, ``wanted_tags`` is what the trailers say, ``problems`` is what they
    lack, and ``owners`` are the loads and how many of the chunks, in order, are theirs.
    """

    copies: Sequence[ChunkCopy]
    table: ChunkTable
    pieces: Sequence[Piece]
    tags: npt.NDArray[np.uint64]
    wanted_tags: npt.NDArray[np.uint64] | None = None
    problems: dict[int, str] = field(default_factory=dict)
    owners: Sequence[tuple[_Load, int]] = ()


@dataclass(slots=True)
class _Queued:
    """Chunks of loads not sent yet, and which load each is of; those before ``sent`` are."""

    copies: list[ChunkCopy]
    owners: list[_Load]
    sent: int = 0

    def take(self, count: int) -> tuple[list[ChunkCopy], list[tuple[_Load, int]]]:
        """The next ``count`` chunks at most, and how many of them, in order, are whose.

        The last of many are few: the link waits while they are scattered.
        """
        begin, left = self.sent, len(self.copies) - self.sent
        count = left - count // SMALL if begin and count // SMALL < left <= count else min(count, left)
        self.sent = begin + count
        shares = [(load, len(list(group))) for load, group in groupby(self.owners[begin : self.sent])]
        return self.copies[begin : self.sent], shares


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
        tuning = replace(tuning, ring=tuning.ring.fitted(frames.part_bytes))
        one_part = frames.frame_bytes == frames.part_bytes
        self._shape = Shape(kernels.geometry, tuning.ring.slot_bytes, frames.part_bytes, blocks_per_chunk, one_part, frames_per_pin)
        self._chunks_per_job = max(1, self._shape.chunks_per_piece)
        self.saves = SaveLane(kernels, tuning, frames)
        self.loads = LoadLane(kernels, tuning, frames)
        self._flying: dict[SaveLane | LoadLane, deque[_InFlight]] = {self.saves: deque(), self.loads: deque()}
        self._queued_loads: deque[_Queued] = deque()
        self._queued_pieces: deque[tuple[_Job, Piece]] = deque()
        self._open_saves: dict[_Job, None] = {}
        self._open_loads: dict[_Load, None] = {}
        self._step_begun = driver.Event()
        self._forward_done = driver.Event()
        self._last_gather: npt.NDArray[np.int64] = np.full(layout.num_blocks, -1, dtype=np.int64)
        self._done = Finished()
        self._busy_until = {self.saves: 0.0, self.loads: 0.0}
        self._pumped = clock()
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
            if rewritten and self._flying[self.saves]:
                ticket = int(self._last_gather[np.asarray(rewritten, dtype=np.int64)].max())
                self.saves.order_after_gather(compute, ticket)
            self._step_begun.record(compute)
        except (driver.CudaError, ValueError, IndexError, TypeError) as error:  # unordered, a save could read what is rewritten
            self._break(str(error))

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers behind the forward just launched. What cannot start now is dropped, never waited for."""
        copies = self._drop_unpinned([copy for plan in plans for copy in plan.chunks])
        if not copies:
            return
        sent, flying = 0, self._flying[self.saves]
        try:
            self._forward_done.record(self._compute())
            self.saves.kernel_stream.wait(self._forward_done)
            size = max(1, self._chunks_per_job // SMALL) if len(copies) > self._chunks_per_job else self._chunks_per_job
            while sent < len(copies) and not self.saves.is_full(len(flying)):
                batch, size = copies[sent : sent + size], self._chunks_per_job
                sent += len(batch)
                self._send_saves(sorted(batch, key=_FRAME))
        except driver.CudaError as error:
            self._break(str(error))
        self._drop(copies[sent:])

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Queue loads; those with nothing to copy are reported by the next `poll`."""
        copies: list[ChunkCopy] = []
        owners: list[_Load] = []
        for plan in plans:
            self._done.bad_blocks.update(plan.lost)
            load = _Load(plan, len(plan.chunks), [])
            self._open_loads[load] = None
            if self._broken is not None:
                self._report(load, everything_bad=True)
            elif not plan.chunks:
                self._report(load)
            else:
                copies += sorted(plan.chunks, key=_FRAME)
                owners += [load] * len(plan.chunks)
        if copies and self._broken is None:
            self._queued_loads.append(_Queued(copies, owners))
        try:
            self._pump()
        except driver.CudaError as error:
            self._break(str(error))

    def poll(self) -> Finished:
        if self._broken is None:
            try:
                self._land(self.saves)
                self._land(self.loads)
                self._pump()
            except driver.CudaError as error:
                self._break(str(error))
        done, self._done = self._done, Finished()
        return done

    def drain(self) -> Finished:
        """Waits on the host until nothing is in flight; for sleep and shutdown, not for steps."""
        while self._broken is None and (self.is_behind or any(self._flying.values())):
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
        for lane in self._flying:
            lane.close()
        self._pinned.close()

    @property
    def is_behind(self) -> bool:
        """Whether loads wait to be sent by the next `poll`."""
        return bool(self._queued_loads or self._queued_pieces)

    def wait_pinned(self, timeout_s: float | None = None) -> bool:
        """Until all host memory is pinned (or could not be)."""
        return self._pinned.wait(timeout_s)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _new_job(self, copies: Sequence[ChunkCopy]) -> _Job:
        """Raises ValueError for a copy that would leave the arena, its frame or the paged KV."""
        table = ChunkTable.of(copies)
        table.check(self._memory.num_frames, self._layout.num_blocks, self._shape.blocks_per_chunk)
        return _Job(copies, table, tuple(split(table, self._shape)), np.zeros(len(copies), dtype=np.uint64))

    def _send_saves(self, copies: Sequence[ChunkCopy]) -> None:
        try:
            job = self._new_job(copies)
        except ValueError as error:
            logger.error("kvloft: saves that cannot be made: %s", error)
            self._drop(copies)
            return
        self._open_saves[job] = None
        for piece in job.pieces:
            self._last_gather[piece.block_ids] = self._fly(self.saves, job, piece)

    def _next_load_piece(self) -> tuple[_Job, Piece] | None:
        """The next piece of the queued loads."""
        while not self._queued_pieces and self._queued_loads:
            queued = self._queued_loads[0]
            copies, owners = queued.take(self._chunks_per_job)
            if queued.sent == len(queued.copies):
                self._queued_loads.popleft()
            try:
                job = self._new_job(copies)
            except ValueError as error:
                for load, count in owners:
                    mine, copies = copies[:count], copies[count:]
                    self._finish_load(load, mine, dict.fromkeys(range(count), f"copy: {error}"))
                continue
            job.owners = owners
            self._queued_pieces.extend((job, piece) for piece in job.pieces)
        return self._queued_pieces.popleft() if self._queued_pieces else None

    def _read_trailers(self, job: _Job) -> None:
        rows = self._trailers.read(job.table.frames)
        job.problems = self._trailers.problems(rows, job.table.keys, job.table.num_blocks)
        job.wanted_tags = rows["tag"].astype(np.uint64)

    def _pump(self) -> None:
        """Send queued loads while the lane has room and this call has time."""
        flying, kernel_stream = self._flying[self.loads], self.loads.kernel_stream
        now = self._clock()
        end = now + max(MIN_PUMP_S, PUMP_SHARE * (now - self._pumped))
        while now < end and not self.loads.is_full(len(flying)) and (following := self._next_load_piece()) is not None:
            job, piece = following
            ids = piece.block_ids[piece.block_ids >= 0]
            if len(ids) and self._flying[self.saves]:
                self.saves.order_after_gather(kernel_stream, int(self._last_gather[ids].max()))
            kernel_stream.wait(self._step_begun)
            self._fly(self.loads, job, piece)
            if piece is job.pieces[0]:  # while the link is at work: it need not wait for so many scattered reads
                self._read_trailers(job)
            now = self._clock()
        self._pumped = now

    def _fly(self, lane: SaveLane | LoadLane, job: _Job, piece: Piece) -> int:
        frames = job.table.frames[piece.begin : piece.end]
        if lane is self.loads:
            ticket = self.loads.submit(piece, frames, is_pinned=self._pinned.is_complete)
        else:
            ticket = lane.submit(piece, frames)
        self._flying[lane].append(_InFlight(job, piece, ticket, self._clock()))
        return ticket

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
            is_last = piece is job.pieces[-1]
            if lane is self.saves:
                self._done.seconds_saving += seconds
                self._done.num_bytes_saved += piece.num_bytes
                if is_last:
                    self._finish_saves(job)
            else:
                self._done.seconds_loading += seconds
                self._done.num_bytes_loaded += piece.num_bytes
                if is_last:
                    self._finish_loads(job)

    def _finish_saves(self, job: _Job) -> None:
        self._trailers.seal(job.table.frames, job.table.keys, job.tags, job.table.num_blocks)
        self._done.saved += [copy.ticket for copy in job.copies]
        del self._open_saves[job]

    def _finish_loads(self, job: _Job) -> None:
        for chunk in np.flatnonzero(job.tags != job.wanted_tags).tolist():
            job.problems.setdefault(chunk, "tag")
        begin = 0
        for load, count in job.owners:
            problems = {i - begin: problem for i, problem in job.problems.items() if begin <= i < begin + count}
            self._finish_load(load, job.copies[begin : begin + count], problems)
            begin += count

    def _finish_load(self, load: _Load, copies: Sequence[ChunkCopy], problems: dict[int, str]) -> None:
        """These chunks of ``load`` are in, or bad; with its last, it is reported."""
        for i, problem in problems.items():
            load.bad.append((copies[i].key, problem))
            self._done.bad_blocks.update(copies[i].blocks)
        load.num_left -= len(copies)
        if not load.num_left:
            self._report(load)

    def _report(self, load: _Load, *, everything_bad: bool = False) -> None:
        if load.bad:
            logger.warning("kvloft: %d chunks failed their check (%s); they are misses", len(load.bad), load.bad[0][1])
        if everything_bad:
            self._done.bad_blocks.update(chain.from_iterable(copy.blocks for copy in load.plan.chunks))
        self._done.loads.append(LoadResult(load.plan.req_id, load.plan.load_id, tuple(load.bad)))
        del self._open_loads[load]

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

    def _break(self, reason: str) -> None:
        """After a CUDA error: everything in flight failed, and everything to come does. Waits until no copy runs."""
        logger.error("kvloft: this worker stops moving pages, so nothing is cached any more: %s", reason)
        self._broken = reason
        for lane, flying in self._flying.items():
            lane.stop()
            flying.clear()
        for job in self._open_saves:
            self._drop(job.copies)
        for load in list(self._open_loads):
            self._report(load, everything_bad=True)
        self._open_saves.clear()
        self._queued_loads.clear()
        self._queued_pieces.clear()

    def _compute(self) -> driver.Stream:
        return driver.Stream.view(torch.cuda.current_stream(self._device).cuda_stream)


def _pci_bus_id(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, number = (int(getattr(properties, name, 0)) for name in names)
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"
