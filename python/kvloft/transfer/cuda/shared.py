"""Defines the state shared by CudaMover's saves and loads, and their base class `Direction`."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvloft import _core
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.plan import LAYOUT, LoadPlan, SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.jobs import Job, Load, Mark
from kvloft.transfer.cuda.lanes import MAX_PIECES, Lane, Sent
from kvloft.transfer.cuda.pieces import ChunkTable, Piece, PieceLimits, split
from kvloft.transfer.cuda.registration import RegisteredRange
from kvloft.transfer.cuda.trailers import Trailers
from kvloft.transfer.frames import FrameMemory
from kvloft.transfer.mover import Finished

logger = logging.getLogger(__name__)

_WaitingItem = TypeVar("_WaitingItem")

NUM_MARKS = 8
"""Number of events created at startup. More events are created only if copies from more steps are
waiting, which is rare.
"""


class PageKind(NamedTuple):
    """Pages that share a layout and a frame size. Multiple KV cache groups can share a page kind.

    ``saves`` and ``loads`` hold the limits for pieces. ``unregistered`` holds the limits for pieces
    loaded from frames that are not registered yet.
    """

    saves: PieceLimits
    loads: PieceLimits
    unregistered: PieceLimits
    trailers: Trailers
    memory: FrameMemory
    fits: bool = True
    """False if the frames are for compressed chunks but the kernels do not support compression."""

    def with_slots(self, save_bytes: int, load_bytes: int) -> Self:
        """Return a copy of this page kind with the given staging slot sizes."""
        return self._replace(
            saves=replace(self.saves, slot_bytes=save_bytes),
            loads=replace(self.loads, slot_bytes=load_bytes),
            unregistered=replace(self.unregistered, slot_bytes=load_bytes),
        )


@dataclass(slots=True, eq=False)
class Shared:
    """State shared by saves and loads.

    Attributes:
        kind_of: the page kind for each KV cache group and size class.
        num_blocks: the number of blocks. A block id refers to the same memory in all groups.
        compute: returns the forward pass's stream.
        fail: called with the reason after a CUDA error.
        broken: the reason why the mover fails all copies, or None while the mover works.
    """

    kinds: Sequence[PageKind]
    kind_of: Mapping[tuple[int, int], int]
    num_blocks: int
    bytes_ahead: int
    """A direction submits no pieces while it has more bytes than this on the GPU."""
    compute: Callable[[], driver.Stream]
    fail: Callable[[str], None]
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Guards all state, which submitters and the registration thread also modify."""
    done: Finished = field(default_factory=Finished)
    broken: str | None = None
    registered: RegisteredRange = field(init=False)
    """The host memory, set by CudaMover before the first copy is submitted."""
    spare_marks: list[driver.Event] = field(
        default_factory=lambda: [driver.Event() for _ in range(NUM_MARKS)]
    )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Fail all copies if the guarded block raises an exception, and suppress the exception so
        that submitter threads survive.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, driver.CudaError):
                logger.exception("kvloft: unexpected error while copying KV")
            self.fail(str(error))

    @property
    def chunks_per_save(self) -> int:
        return max(1, min(kind.saves.chunks_per_piece for kind in self.kinds))

    @property
    def chunks_per_load(self) -> int:
        return max(1, min(kind.loads.chunks_per_piece for kind in self.kinds))

    def by_kind(self, plans: Sequence[SavePlan | LoadPlan]) -> list[tuple[int, ChunkBatch]]:
        """Return all chunks in ``plans`` as one batch per page kind."""
        found: dict[int, list[ChunkBatch]] = {}
        for plan in plans:
            for group, size_class, chunks in plan.chunks.by_size() if plan.chunks else ():
                found.setdefault(self.kind_of[group, size_class], []).append(chunks)
        return [
            (kind, some[0] if len(some) == 1 else _core.ChunkBatch.concat(some))
            for kind, some in found.items()
        ]

    def take_done(self) -> Finished:
        done, self.done = self.done, Finished()
        return done

    def mark(self) -> Mark:
        """Record a mark in the compute stream and return it. Raises CudaError."""
        event = self.spare_marks.pop() if self.spare_marks else driver.Event()
        mark = Mark(event, self.spare_marks)
        event.record(self.compute())
        return mark

    def problem_of(self, kind: int, chunks: ChunkBatch) -> str | None:
        """Return why ``chunks`` cannot be copied, or None if they can.

        A copy must stay within the bounds of the arena, the chunk's frame and the paged KV.
        """
        limits, memory = self.kinds[kind].loads, self.kinds[kind].memory
        if not self.kinds[kind].fits:
            return LAYOUT  # another engine may be able to load these chunks
        try:
            chunks.check(
                num_frames=memory.num_frames,
                num_blocks=self.num_blocks,
                blocks_per_chunk=limits.blocks_per_chunk,
            )
        except ValueError as error:
            return f"copy: {error}"
        return None

    def new_job(
        self,
        kind: int,
        chunks: ChunkBatch,
        after: Mark | None,
        owners: Sequence[tuple[Load, int]] = (),
    ) -> Job:
        """Return a job for ``chunks``, which `problem_of` has checked.

        The job is a load if ``owners`` is given, and a save otherwise.
        """
        table, pages = ChunkTable.of(chunks), self.kinds[kind]
        limits, is_raw = pages.saves, None
        if owners:
            is_registered = self.are_registered(kind, table.frames)
            limits = pages.loads if is_registered else pages.unregistered
            if limits.encoding is not None:
                is_raw = pages.trailers.are_raw(table.frames)
        pieces = tuple(split(table, limits, is_raw))
        tags: npt.NDArray[np.uint64] = np.zeros(len(chunks), np.uint64)
        record_units = tags.copy()
        return Job(kind, chunks, table, pieces, tags, record_units, after, owners)

    def trailers_of(self, job: Job) -> Trailers:
        return self.kinds[job.kind].trailers

    def are_registered(self, kind: int, frames: Sequence[int]) -> bool:
        if self.registered.is_complete:
            return True
        memory = self.kinds[kind].memory
        end = memory.start(max(frames)) + memory.frame_bytes
        return end <= self.registered.num_registered_bytes


class InFlight(NamedTuple):
    """A piece on the GPU, and the time when it was submitted."""

    job: Job
    piece: Piece
    sent: Sent
    submitted: float


class Direction(ABC, Generic[_WaitingItem]):
    """Copies in one direction: chunks not yet split into pieces, queued pieces, and pieces on the
    GPU, all in order.
    """

    def __init__(self, shared: Shared, lane: Lane, ramp_sizes: tuple[int, ...]) -> None:
        """Create an idle direction. ``ramp_sizes`` holds the sizes, in chunks, of the first pieces
        on an idle link.
        """
        self._shared, self.lane, self._ramp_sizes = shared, lane, ramp_sizes
        self.waiting: deque[_WaitingItem] = deque()
        self.queued: deque[tuple[Job, Piece]] = deque()
        self.in_flight: deque[InFlight] = deque()
        self.num_bytes = 0
        """Size of all pieces on the GPU, in bytes."""
        self._busy_until = 0.0

    @property
    def is_behind(self) -> bool:
        """Return True if copies are waiting to be submitted."""
        return bool(self.waiting or self.queued)

    def awaited(self) -> driver.Event | None:
        """Return the event after which waiting copies can be submitted, or None if no copies are
        waiting.
        """
        return self.in_flight[0].sent.done if self.in_flight and self.is_behind else None

    def feed(self) -> None:
        """Collect finished pieces and submit queued pieces up to the limit."""
        if self._shared.broken is None:
            with self._shared.guarded():
                self._collect_done()
                self._submit_queued()

    def wait_for_first(self) -> None:
        """Block until the oldest piece on the GPU is done."""
        if self.in_flight:
            self.in_flight[0].sent.done.synchronize()

    def stop(self) -> None:
        """Wait until no copies are running, then discard all pending work."""
        self.lane.stop()
        self.in_flight.clear()
        self.waiting.clear()
        self.queued.clear()
        self.num_bytes = 0

    @abstractmethod
    def _prepare(self) -> Job:
        """Remove chunks from ``waiting`` and return a job that copies them."""

    @abstractmethod
    def _submit_queued(self) -> None:
        """Submit queued pieces up to the limit."""

    @abstractmethod
    def _on_done(self, job: Job, piece: Piece, seconds: float) -> None:
        """Process a finished piece that took ``seconds`` to copy."""

    def _first_queued(self) -> tuple[Job, Piece] | None:
        """Return the next piece to submit without removing it from the queue."""
        if not self.queued and self.waiting:
            job = self._prepare()
            self.queued.extend((job, piece) for piece in job.pieces)
        return self.queued[0] if self.queued else None

    def _has_capacity(self) -> bool:
        return self.num_bytes <= self._shared.bytes_ahead and len(self.in_flight) < MAX_PIECES

    def _submit_piece(self, job: Job, piece: Piece) -> None:
        """Submit a piece to run after its job's mark."""
        if job.after is not None:
            self.lane.next_kernel_stream(job.kind).wait(job.after.event)
            if piece is job.pieces[-1]:
                job.after = None
        is_registered = self._shared.are_registered(job.kind, job.table.frames)
        job.is_all_registered = job.is_all_registered and is_registered
        sent = self.lane.submit(piece, kind=job.kind, is_registered=is_registered)
        self.num_bytes += piece.link_bytes
        self.in_flight.append(InFlight(job, piece, sent, time.perf_counter()))

    def _collect_done(self) -> None:
        while self.in_flight and self.in_flight[0].sent.done.is_done():
            job, piece, sent, submitted = self.in_flight.popleft()
            self.num_bytes -= piece.link_bytes
            job.tags[piece.begin : piece.end] += sent.tags[: piece.num_segments]
            job.record_units[piece.begin : piece.end] = sent.record_units[: piece.num_segments]
            now = time.perf_counter()
            seconds, self._busy_until = now - max(submitted, self._busy_until), now
            self._on_done(job, piece, seconds)
