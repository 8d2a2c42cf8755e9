"""State that saves and loads of CudaMover share, and `Direction`, the base of both: results, marks,
registered memory.

All of it is used under one lock. Must not depend on the differences of saves and loads.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

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

NUM_MARKS = 8
"""Events made at start. More are made if copies of more steps have not started, which is rare."""


class PageKind(NamedTuple):
    """Pages with one layout, in frames of one size: limits of their pieces, and the trailers of
    their frames. KV cache groups can share a kind.

    ``unregistered``: the limits of loads from frames that are not registered yet.
    """

    saves: PieceLimits
    loads: PieceLimits
    unregistered: PieceLimits
    trailers: Trailers
    memory: FrameMemory
    fits: bool = True
    """False if frames are for compressed chunks, and these kernels compress nothing."""

    def with_slots(self, save_bytes: int, load_bytes: int) -> Self:
        """Return this kind with staging slots of these sizes."""
        return self._replace(
            saves=replace(self.saves, slot_bytes=save_bytes),
            loads=replace(self.loads, slot_bytes=load_bytes),
            unregistered=replace(self.unregistered, slot_bytes=load_bytes),
        )


@dataclass(slots=True, eq=False)
class Shared:
    """State that saves and loads share.

    ``kind_of``: the kind of pages of each KV cache group and size class. ``num_blocks``: limit of
    block ids, which name the same memory in all groups. ``compute`` returns the stream of forwards.
    ``fail`` is called after a CUDA error.
    """

    kinds: Sequence[PageKind]
    kind_of: Mapping[tuple[int, int], int]
    num_blocks: int
    bytes_ahead: int
    """Bytes of one direction on the GPU above which no piece is sent."""
    compute: Callable[[], driver.Stream]
    fail: Callable[[str], None]
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Guards all state: submitters and the thread that registers memory change it, too."""
    done: Finished = field(default_factory=Finished)
    broken: str | None = None
    registered: RegisteredRange = field(init=False)
    """Set last; nothing is submitted before."""
    spare_marks: list[driver.Event] = field(
        default_factory=lambda: [driver.Event() for _ in range(NUM_MARKS)]
    )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Break the mover on an error, which is suppressed: the submitter must not end."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, driver.CudaError):
                logger.exception("kvloft: the mover failed")
            self.fail(str(error))

    @property
    def chunks_per_save(self) -> int:
        """Return the number of chunks of a job that saves."""
        return max(1, min(kind.saves.chunks_per_piece for kind in self.kinds))

    @property
    def chunks_per_load(self) -> int:
        """Return the number of chunks of a job that loads."""
        return max(1, min(kind.loads.chunks_per_piece for kind in self.kinds))

    def by_kind(self, plans: Sequence[SavePlan | LoadPlan]) -> list[tuple[int, ChunkBatch]]:
        """Return all chunks of ``plans``, as one batch for each kind of pages."""
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
        """Record a mark in the compute stream. Raises CudaError."""
        event = self.spare_marks.pop() if self.spare_marks else driver.Event()
        mark = Mark(event, self.spare_marks)
        event.record(self.compute())
        return mark

    def problem_of(self, kind: int, chunks: ChunkBatch) -> str | None:
        """Return the problem if a copy would exceed the arena, its frame or the paged KV."""
        limits, memory = self.kinds[kind].loads, self.kinds[kind].memory
        if not self.kinds[kind].fits:
            return LAYOUT  # other engines can read them
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
        """Return a job of ``chunks``, which must have no problem. With ``owners``, it is a load."""
        table, pages = ChunkTable.of(chunks), self.kinds[kind]
        limits, is_raw = pages.saves, None
        if owners:
            is_registered = self.are_registered(kind, table.frames)
            limits = pages.loads if is_registered else pages.unregistered
            if limits.encoding is not None:
                is_raw = pages.trailers.are_raw(table.frames)
        pieces = tuple(split(table, limits, is_raw))
        tags: npt.NDArray[np.uint64] = np.zeros(len(chunks), np.uint64)
        used = tags.copy()
        return Job(kind, chunks, table, pieces, tags, used, after, owners)

    def trailers_of(self, job: Job) -> Trailers:
        return self.kinds[job.kind].trailers

    def are_registered(self, kind: int, frames: Sequence[int]) -> bool:
        """Return True if all of ``frames`` are in registered memory."""
        if self.registered.is_complete:
            return True
        memory = self.kinds[kind].memory
        end = memory.start(max(frames)) + memory.frame_bytes
        return end <= self.registered.num_registered_bytes


class InFlight(NamedTuple):
    """A piece on the GPU, with the time of its submission."""

    job: Job
    piece: Piece
    sent: Sent
    submitted: float


class Direction(ABC):
    """One direction of copies: queued pieces, and a few pieces on the GPU, oldest first."""

    def __init__(self, shared: Shared, lane: Lane, few_first: tuple[int, ...]) -> None:
        """``few_first``: numbers of chunks of the first pieces on an idle link."""
        self._shared, self.lane, self._few_first = shared, lane, few_first
        self.queued: deque[tuple[Job, Piece]] = deque()
        self.flying: deque[InFlight] = deque()
        self.num_bytes = 0
        """Bytes of the pieces on the GPU."""
        self._busy_until = 0.0

    @property
    def is_behind(self) -> bool:
        """Return True if copies wait to be sent."""
        return bool(self.queued)

    def awaited(self) -> driver.Event | None:
        """Return the event after which more can be sent; None if nothing waits to be sent."""
        return self.flying[0].sent.done if self.flying and self.is_behind else None

    def feed(self) -> None:
        """Collect finished pieces, and send queued ones while there is room."""
        if self._shared.broken is None:
            with self._shared.guarded():
                self._land()
                self._send()

    def wait_for_first(self) -> None:
        """Wait on the host for the oldest piece on the GPU."""
        if self.flying:
            self.flying[0].sent.done.synchronize()

    def stop(self) -> None:
        """Fail all copies, and wait until none runs."""
        self.lane.stop()
        self.flying.clear()
        self.queued.clear()
        self.num_bytes = 0

    @abstractmethod
    def _send(self) -> None:
        """Send queued pieces while there is room."""

    @abstractmethod
    def _has_landed(self, job: Job, piece: Piece, seconds: float) -> None:
        """Handle a finished piece, which used the link for ``seconds``."""

    def _has_room(self) -> bool:
        """Return True if another piece can be sent."""
        return self.num_bytes <= self._shared.bytes_ahead and len(self.flying) < MAX_PIECES

    def _fly(self, job: Job, piece: Piece) -> None:
        """Send the piece, ordered after its job's mark."""
        if job.after is not None:
            self.lane.next_kernel_stream(job.kind).wait(job.after.event)
            if piece is job.pieces[-1]:
                job.after = None
        is_registered = self._shared.are_registered(job.kind, job.table.frames)
        job.is_all_registered = job.is_all_registered and is_registered
        sent = self.lane.submit(piece, kind=job.kind, is_registered=is_registered)
        self.num_bytes += piece.link_bytes
        self.flying.append(InFlight(job, piece, sent, time.perf_counter()))

    def _land(self) -> None:
        while self.flying and self.flying[0].sent.done.is_done():
            job, piece, sent, submitted = self.flying.popleft()
            self.num_bytes -= piece.link_bytes
            job.tags[piece.begin : piece.end] += sent.tags[: piece.num_segments]
            job.used[piece.begin : piece.end] = sent.used[: piece.num_segments]
            now = time.perf_counter()
            seconds, self._busy_until = now - max(submitted, self._busy_until), now
            self._has_landed(job, piece, seconds)
