"""CudaMover: chunks between paged KV in HBM and pinned host frames, on streams of its own, so that no step waits.

Saves: a kernel gathers a piece into a staging slot as soon as the forward that wrote it is done, the copy engine takes it to
the frames, then the trailer is written. Loads: copied in, checked by tag while a kernel scatters them. Ordering is on the GPU:
`begin_step` makes the next forward wait for gathers that still read a block it may write (I2), and loads wait for what ran
before the step. What is submitted waits here, a few pieces at a time are on the GPU, and a feeder in each direction sends the
next (why: `feeder`). While host memory is being pinned, saves to frames behind the pinned ones wait too, and fail only where their
blocks are written again first. It must not know engines; nothing here allocates GPU memory or waits for the device in a step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.feeder import Feeder
from kvloft.transfer.cuda.frame_memory import FrameMemory, Trailers
from kvloft.transfer.cuda.jobs import (
    LOAD_PREPARE_US,
    SAVE_PREPARE_US,
    InFlight,
    Job,
    Load,
    Mark,
    QueuedLoad,
    by_frame,
    ramp,
    tickets_of,
)
from kvloft.transfer.cuda.kernels import Kernels
from kvloft.transfer.cuda.lanes import MAX_PIECES, LoadLane, SaveLane, Tuning
from kvloft.transfer.cuda.pieces import NOT_WANTED, ChunkTable, Piece, Shape, split
from kvloft.transfer.cuda.pinning import GOOD_PIECE_BYTES, PinnedRange, numa_node_of
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished

logger = logging.getLogger(__name__)

SLOTS_AHEAD = 8
"""As many slots' bytes of one direction are on the GPU at a time: with 40 MiB slots, 6 ms of the link. A feeder may have to wait
for the interpreter, which another thread keeps for up to 5 ms; with 3 slots an engine's loads took 4 to 6 % longer. What an engine
copies does not wait for all of them: see `lanes`."""
NUM_MARKS = 8
"""Made at start; more steps with copies that have not started are rare, and then more are made."""


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
        gathers_first: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocates the staging rings and starts pinning ``frames``. Raises CudaError, or ValueError for a ring too small.

        ``gathers_first``: whatever follows a step's saves on the compute stream waits for their gathers, for an engine that writes
        blocks before `begin_step` names them.
        """
        self._lock = threading.RLock()
        """Of everything here, for the feeders and the thread that pins change it too."""
        self._gathers_first = gathers_first
        self._layout, self._memory, self._kernels, self._clock = layout, frames, kernels, clock
        self._device = kernels.tiles.device
        self._trailers = Trailers(frames, layout=layout.digest, block_bytes=layout.block_bytes)
        frames_per_pin = max(1, GOOD_PIECE_BYTES // frames.frame_bytes)
        tuning = replace(tuning, ring=tuning.ring.fitted(frames.part_bytes))
        self._shape = Shape(kernels.block_tiles, tuning.ring.slot_bytes, frames.part_bytes, blocks_per_chunk, frames_per_pin)
        self._chunks_per_job = max(1, self._shape.chunks_per_piece)
        self._few_saved = ramp(self._chunks_per_job, frames.part_bytes, SAVE_PREPARE_US)
        self._few_loaded = ramp(self._chunks_per_job, frames.part_bytes, LOAD_PREPARE_US)
        self._num_loads_since_idle = 0
        self.saves = SaveLane(kernels, tuning, frames)
        self.loads = LoadLane(kernels, tuning, frames)
        self._flying: dict[SaveLane | LoadLane, deque[InFlight]] = {self.saves: deque(), self.loads: deque()}
        self._bytes_flying: dict[SaveLane | LoadLane, int] = {self.saves: 0, self.loads: 0}
        self._bytes_ahead = (SLOTS_AHEAD - 1) * tuning.ring.slot_bytes
        self._queued_loads: deque[QueuedLoad] = deque()
        self._queued_pieces: dict[SaveLane | LoadLane, deque[tuple[Job, Piece]]] = {self.saves: deque(), self.loads: deque()}
        self._num_saves = 0
        """Pieces of saves so far, sent or queued; each one's number is its ticket once it is sent."""
        self._open_saves: dict[Job, None] = {}
        self._open_loads: dict[Load, None] = {}
        self._spare_marks = [Mark(driver.Event()) for _ in range(NUM_MARKS)]
        self._before_loads: Mark | None = None
        """Behind all that was launched before this step; recorded in steps with loads only, for most have none."""
        self._last_gather: npt.NDArray[np.int64] = np.full(layout.num_blocks, -1, dtype=np.int64)
        self._compute_stream = driver.Stream.view(_current_stream(self._device))
        self._done = Finished()
        self._busy_until = {self.saves: 0.0, self.loads: 0.0}
        self._broken: str | None = None
        self._waits_for_pins = True
        """Off while everything must be sent: a save whose frames are not pinned then fails."""
        self.num_dropped_saves = 0
        context = driver.current_context()
        self._feeders = {
            lane: Feeder(name, self._lock, context, awaited=partial(self._awaited, lane), send=partial(self._feed, lane))
            for name, lane in (("kvloft-saves", self.saves), ("kvloft-loads", self.loads))
        }
        # Ranks on two sockets would each claim all pages for their own: the last one that asks would have them.
        node = None if frames.is_shared else numa_node_of(_pci_bus_id(self._device))
        self._pinned = PinnedRange(
            frames.address, frames.size_bytes, piece_bytes=frames_per_pin * frames.frame_bytes, numa_node=node,
            on_progress=self._feed_saves,
        )  # fmt: skip

    # -- the seam -------------------------------------------------------------------------------------------------

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """Before a forward is launched: ``rewritten`` are blocks it may write that were saved from for another owner."""
        with self._lock:
            if self._broken is not None:
                return
            if (mark := self._before_loads) is not None:
                self._before_loads = None
                if not mark.users:
                    self._spare_marks.append(mark)
            if has_loads:
                self._mark_before_loads()
            if not rewritten or self._broken is not None:
                return
            try:
                self._order_after_gathers(self._compute(), np.asarray(rewritten, dtype=np.int64))
            except (driver.CudaError, ValueError, IndexError, TypeError) as error:  # unordered, a save could read what is rewritten
                self._break(str(error))

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers behind the forward just launched. What cannot be taken now is dropped, never waited for."""
        with self._lock:
            every = plans[0].chunks if len(plans) == 1 else list(chain.from_iterable(plan.chunks for plan in plans))
            copies = self._drop_hopeless(every)
            if not copies:
                return
            done, mark = 0, self._new_mark()
            mark.users += 1
            try:
                mark.event.record(self._compute())
                is_long = len(copies) > self._chunks_per_job
                sizes = chain(self._few_saved if is_long and not self._flying[self.saves] else (), repeat(self._chunks_per_job))
                while done < len(copies) and self._broken is None:
                    batch = copies[done : done + next(sizes)]
                    first_number = self._num_saves
                    if (pieces := self._queue_saves(by_frame(batch), mark)) is None:
                        break
                    done += len(batch)
                    self._feed(self.saves)  # the link is at work while the rest is prepared
                    for number, piece in enumerate(pieces, first_number):
                        self._last_gather[piece.block_ids] = number
                        if self._gathers_first:
                            self._order_after_gathers(self._compute(), piece.block_ids)
            except driver.CudaError as error:
                self._break(str(error))
            self._release(mark)
            self._drop(copies[done:])
            self._feeders[self.saves].wake()

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Queue loads; those with nothing to copy are reported by the next `poll`."""
        with self._lock:
            after = self._mark_before_loads()
            for plan in plans:
                self._done.bad_blocks.update(plan.lost)
                load = Load(plan, len(plan.chunks), [])
                self._open_loads[load] = None
                if after is None:
                    self._report(load, everything_bad=True)
                elif not plan.chunks:
                    self._report(load)
                else:
                    after.users += 1
                    self._queued_loads.append(QueuedLoad(load, plan.chunks, after))
            self._feed(self.loads)
            self._feeders[self.loads].wake()

    def poll(self) -> Finished:
        with self._lock:
            for lane in self._flying:
                self._feed(lane)
            done, self._done = self._done, Finished()
            return done

    def drain(self) -> Finished:
        """Waits on the host until nothing is in flight; for sleep and shutdown, not for steps. What waits to be pinned fails."""
        with self._lock:
            self._waits_for_pins = False
            while self._broken is None and (self.is_behind or any(self._flying.values())):
                try:
                    for lane, flying in self._flying.items():
                        if flying:
                            lane.wait_for(flying[0].ticket)
                except driver.CudaError as error:
                    self._break(str(error))
                for lane in self._flying:
                    self._feed(lane)
            self._waits_for_pins = True
            done, self._done = self._done, Finished()
            return done

    def close(self) -> None:
        """Drain, unpin. The mover is of no use afterwards."""
        self.drain()
        self._broken = self._broken or "closed"
        for feeder in self._feeders.values():
            feeder.close()
        for lane in self._flying:
            lane.close()
        self._pinned.close()

    @property
    def is_behind(self) -> bool:
        """Whether copies wait to be sent to the GPU."""
        with self._lock:  # a feeder may have taken the last piece and not have sent it yet
            return bool(self._queued_loads or any(self._queued_pieces.values()))

    def wait_pinned(self, timeout_s: float | None = None) -> bool:
        """Until all host memory is pinned (or could not be)."""
        return self._pinned.wait(timeout_s)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _new_job(self, copies: Sequence[ChunkCopy], after: Mark) -> Job:
        """Raises ValueError for a copy that would leave the arena, its frame or the paged KV."""
        table = ChunkTable.of(copies)
        table.check(self._memory.num_frames, self._layout.num_blocks, self._shape.blocks_per_chunk)
        job = Job(copies, table, tuple(split(table, self._shape)), np.zeros(len(copies), dtype=np.uint64), after)
        after.users += 1
        return job

    def _queue_saves(self, copies: Sequence[ChunkCopy], after: Mark) -> Sequence[Piece] | None:
        """The pieces that were queued; None: there is no room for so many."""
        try:
            job = self._new_job(copies, after)
        except ValueError as error:
            logger.error("kvloft: saves that cannot be made: %s", error)
            self._drop(copies)
            return ()
        queued = self._queued_pieces[self.saves]
        if len(self._flying[self.saves]) + len(queued) + len(job.pieces) > MAX_PIECES:
            self._release(after)
            return None
        self._open_saves[job] = None
        queued.extend((job, piece) for piece in job.pieces)
        self._num_saves += len(job.pieces)
        return job.pieces

    def _next_piece(self, lane: SaveLane | LoadLane) -> tuple[Job, Piece] | None:
        queued = self._queued_pieces[lane]
        while lane is self.loads and not queued and self._queued_loads:
            num_waiting = len(self._queued_loads)
            copies, owners, after = self._take_loads()
            queued.extend((job, piece) for job in self._load_jobs(copies, owners, after) for piece in job.pieces)
            for _ in range(num_waiting - len(self._queued_loads)):
                self._release(after)
        return queued.popleft() if queued else None

    def _load_jobs(self, copies: Sequence[ChunkCopy], owners: Sequence[tuple[Load, int]], after: Mark) -> list[Job]:
        """One job. A load with a copy that cannot be made fails alone, and its neighbours in the piece get jobs of their own."""
        try:
            job = self._new_job(copies, after)
        except ValueError as error:
            if len(owners) == 1:
                self._finish_load(owners[0][0], copies, dict.fromkeys(range(len(copies)), f"copy: {error}"))
                return []
            jobs: list[Job] = []
            for load, count in owners:
                jobs += self._load_jobs(copies[:count], [(load, count)], after)
                copies = copies[count:]
            return jobs
        job.owners = owners
        return [job]

    def _take_loads(self) -> tuple[Sequence[ChunkCopy], list[tuple[Load, int]], Mark]:
        """Chunks for one piece, of as many loads as it has room for; how many of them, in order, are whose; and after what."""
        queue, room = self._queued_loads, self._chunks_per_job
        copies: Sequence[ChunkCopy] = ()
        owners: list[tuple[Load, int]] = []
        after = queue[0].after
        nth = self._num_loads_since_idle = self._num_loads_since_idle + 1 if self._flying[self.loads] else 0
        if nth < len(self._few_loaded) and sum(waiting.num_left for waiting in queue if waiting.after is after) > room:
            room = self._few_loaded[nth]
        while queue and queue[0].after is after and room:
            waiting = queue[0]
            taken = waiting.take(room, per_piece=self._chunks_per_job, is_last=len(queue) == 1)
            copies = [*copies, *taken] if owners else taken
            owners.append((waiting.load, len(taken)))
            room = 0 if waiting.num_left else room - len(taken)
            if not waiting.num_left:
                queue.popleft()
        return copies, owners, after

    def _new_mark(self) -> Mark:
        return self._spare_marks.pop() if self._spare_marks else Mark(driver.Event())

    def _mark_before_loads(self) -> Mark | None:
        """What this step's loads come after; None when the mover is broken."""
        if self._before_loads is None and self._broken is None:
            mark = self._new_mark()
            try:
                mark.event.record(self._compute())
                self._before_loads = mark
            except driver.CudaError as error:
                self._break(str(error))
        return self._before_loads if self._broken is None else None

    def _release(self, mark: Mark) -> None:
        mark.users -= 1
        if not mark.users and mark is not self._before_loads:
            self._spare_marks.append(mark)

    def _order_after_gathers(self, stream: driver.Stream, blocks: npt.NDArray[np.integer[Any]]) -> None:
        """Let ``stream`` go on when no save reads ``blocks`` any more; those not sent yet are sent now, for they come first."""
        if self._flying[self.saves] or self._queued_pieces[self.saves]:
            number = int(self._last_gather[blocks[blocks != NOT_WANTED]].max(initial=-1))
            num_unsent = number - (self._num_saves - len(self._queued_pieces[self.saves])) + 1
            for _ in range(num_unsent):
                self._fly(self.saves, *self._queued_pieces[self.saves].popleft())
            self.saves.order_after_gather(stream, number)

    def _read_trailers(self, job: Job) -> None:
        rows = self._trailers.read(job.table.frames)
        job.problems = self._trailers.problems(rows, job.table.keys, job.table.num_blocks)
        job.wanted_tags = rows["tag"].astype(np.uint64)

    def _awaited(self, lane: SaveLane | LoadLane) -> driver.Event | None:
        """What must pass before more of ``lane`` can be sent; None if nothing waits to be."""
        if not (self._queued_pieces[lane] or (lane is self.loads and self._queued_loads)) or not self._flying[lane]:
            return None
        return lane.done_event(self._flying[lane][0].ticket)

    def _feed(self, lane: SaveLane | LoadLane) -> None:
        """Take in what is done and send what there is room for; called by the lane's feeder too."""
        if self._broken is None:
            try:
                self._land(lane)
                self._send(lane)
            except Exception as error:  # a feeder that ends would leave requests waiting
                if not isinstance(error, driver.CudaError):
                    logger.exception("kvloft: the mover failed")
                self._break(str(error))

    def _send(self, lane: SaveLane | LoadLane) -> None:
        """Send queued pieces while there is room for one more ahead of the link."""
        started: list[Job] = []
        while self._bytes_flying[lane] <= self._bytes_ahead and not lane.is_full(len(self._flying[lane])):
            if lane is self.saves and self._must_wait_for_pins():
                break
            if (following := self._next_piece(lane)) is None:
                break
            job, piece = following
            if lane is self.loads:
                self._order_after_gathers(lane.kernel_stream, piece.block_ids)
            self._fly(lane, job, piece)
            if lane is self.loads and piece is job.pieces[0]:
                started.append(job)
        for job in started:
            self._read_trailers(job)  # while the link is at work: it need not wait for so many scattered reads

    def _fly(self, lane: SaveLane | LoadLane, job: Job, piece: Piece) -> None:
        if piece is job.pieces[0]:
            lane.kernel_stream.wait(job.after.event)
            self._release(job.after)
        is_pinned = self._is_pinned(job)
        if lane is self.loads:
            ticket = self.loads.submit(piece, is_pinned=is_pinned)
        elif is_pinned:
            ticket = self.saves.submit(piece)
        else:
            job.is_dropped, ticket = True, self.saves.skip()
        self._bytes_flying[lane] += piece.num_bytes
        self._flying[lane].append(InFlight(job, piece, ticket, self._clock()))

    def _land(self, lane: SaveLane | LoadLane) -> None:
        """Take in the pieces that are done, oldest first."""
        flying = self._flying[lane]
        while flying and lane.is_done(flying[0].ticket):
            flight = flying.popleft()
            job, piece = flight.job, flight.piece
            self._bytes_flying[lane] -= piece.num_bytes
            job.tags[piece.begin : piece.end] += lane.take_tags(flight.ticket, piece.num_segments)
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

    def _finish_saves(self, job: Job) -> None:
        if job.is_dropped:
            self._drop(job.copies)
        else:
            self._trailers.seal(job.table.frames, job.table.keys, job.tags, job.table.num_blocks)
            self._done.saved += tickets_of(job.copies)
        del self._open_saves[job]

    def _finish_loads(self, job: Job) -> None:
        for chunk in np.flatnonzero(job.tags != job.wanted_tags).tolist():
            job.problems.setdefault(chunk, "tag")
        begin = 0
        for load, count in job.owners:
            problems = {i - begin: problem for i, problem in job.problems.items() if begin <= i < begin + count}
            self._finish_load(load, job.copies[begin : begin + count], problems)
            begin += count

    def _finish_load(self, load: Load, copies: Sequence[ChunkCopy], problems: dict[int, str]) -> None:
        """These chunks of ``load`` are in, or bad; with its last, it is reported."""
        for i, problem in problems.items():
            load.bad.append((copies[i].key, problem))
            self._done.bad_blocks.update(copies[i].blocks)
        load.num_left -= len(copies)
        if not load.num_left:
            self._report(load)

    def _report(self, load: Load, *, everything_bad: bool = False) -> None:
        if load.bad:
            logger.warning("kvloft: %d chunks failed their check (%s); they are misses", len(load.bad), load.bad[0][1])
        if everything_bad:
            self._done.bad_blocks.update(chain.from_iterable(copy.blocks for copy in load.plan.chunks))
        self._done.loads.append(LoadResult(load.plan.req_id, load.plan.load_id, tuple(load.bad), failed=everything_bad))
        del self._open_loads[load]

    # -- trouble --------------------------------------------------------------------------------------------------

    def _drop_hopeless(self, copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
        """All but those that can never be made: to frames that could not be pinned, or any when the mover is broken."""
        if self._broken is None and (self._pinned.is_complete or not self._pinned.is_over):
            return copies
        num_usable = self._num_pinned if self._broken is None else 0
        self._drop([copy for copy in copies if copy.frame >= num_usable])
        return [copy for copy in copies if copy.frame < num_usable]

    @property
    def _num_pinned(self) -> int:
        """Frames from the first on that copies can use directly."""
        return self._pinned.num_pinned_bytes // self._memory.frame_bytes

    def _is_pinned(self, job: Job) -> bool:
        return self._pinned.is_complete or max(job.table.frames) < self._num_pinned

    def _must_wait_for_pins(self) -> bool:
        """Whether the next save has frames that are still to be pinned. Both the store and pinning begin with the lowest."""
        queued = self._queued_pieces[self.saves]
        return bool(queued) and self._waits_for_pins and not self._is_pinned(queued[0][0]) and not self._pinned.is_over

    def _feed_saves(self) -> None:
        """More frames are pinned, or no more will be."""
        with self._lock:
            self._feed(self.saves)
            self._feeders[self.saves].wake()

    def _drop(self, copies: Sequence[ChunkCopy]) -> None:
        self.num_dropped_saves += len(copies)
        self._done.failed += tickets_of(copies)

    def _break(self, reason: str) -> None:
        """After a CUDA error: everything in flight failed, and everything to come does. Waits until no copy runs."""
        logger.error("kvloft: this worker stops moving pages, so nothing is cached any more: %s", reason)
        self._broken = reason
        for lane, flying in self._flying.items():
            lane.stop()
            flying.clear()
            self._queued_pieces[lane].clear()
            self._bytes_flying[lane] = 0
        for job in self._open_saves:
            self._drop(job.copies)
        for load in list(self._open_loads):
            self._report(load, everything_bad=True)
        self._open_saves.clear()
        self._queued_loads.clear()

    def _compute(self) -> driver.Stream:
        handle = _current_stream(self._device)
        if handle != self._compute_stream.handle:
            self._compute_stream = driver.Stream.view(handle)
        return self._compute_stream


def _current_stream(device: torch.device) -> int:
    """What ``torch.cuda.current_stream(device).cuda_stream`` is, 60 to 90 us sooner where the host's caches hold other things."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))  # noqa: SLF001 (as torch's own compiled code asks)


def _pci_bus_id(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, number = (int(getattr(properties, name, 0)) for name in names)
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"
