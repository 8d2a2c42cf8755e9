"""What the halves of CudaMover share: what is done, marks in the compute stream, what is pinned; and `Flights`, a half's pieces.

Everything here is used under one lock. It must not know what is saved or loaded.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvloft.seam.batch import ChunkCopy
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.frame_memory import FrameMemory, Trailers
from kvloft.transfer.cuda.jobs import InFlight, Job, Mark
from kvloft.transfer.cuda.lanes import LoadLane, SaveLane
from kvloft.transfer.cuda.pieces import ChunkTable, Piece, Shape, split
from kvloft.transfer.cuda.pinning import PinnedRange
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished

logger = logging.getLogger(__name__)

NUM_MARKS = 8
"""Made at start; more steps with copies that have not started are rare, and then more are made."""


@dataclass(slots=True, eq=False)
class Shared:
    """``fail`` is what a half calls after a CUDA error; ``compute`` is the stream that forwards are launched on."""

    layout: PagedLayout
    memory: FrameMemory
    trailers: Trailers
    shape: Shape
    compute: Callable[[], driver.Stream]
    fail: Callable[[str], None]
    clock: Callable[[], float]
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Of everything, for feeders and the thread that pins change it too."""
    done: Finished = field(default_factory=Finished)
    broken: str | None = None
    pinned: PinnedRange | None = None
    """None until pinning starts, and nothing is submitted before."""
    spare_marks: list[Mark] = field(default_factory=lambda: [Mark(driver.Event()) for _ in range(NUM_MARKS)])

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An error inside breaks the mover and goes no further: a feeder that ends would leave requests waiting."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, driver.CudaError):
                logger.exception("kvloft: the mover failed")
            self.fail(str(error))

    @property
    def chunks_per_job(self) -> int:
        return max(1, self.shape.chunks_per_piece)

    def take_done(self) -> Finished:
        done, self.done = self.done, Finished()
        return done

    def mark(self) -> Mark:
        """A point in the compute stream, now; whoever asks uses it until `release`. Raises CudaError."""
        mark = self.spare_marks.pop() if self.spare_marks else Mark(driver.Event())
        mark.event.record(self.compute())
        mark.users = 1
        return mark

    def release(self, mark: Mark) -> None:
        mark.users -= 1
        if not mark.users:
            self.spare_marks.append(mark)

    def new_job(self, copies: Sequence[ChunkCopy], after: Mark) -> Job:
        """Raises ValueError for a copy that would leave the arena, its frame or the paged KV."""
        table = ChunkTable.of(copies)
        table.check(self.memory.num_frames, self.layout.num_blocks, self.shape.blocks_per_chunk)
        job = Job(copies, table, tuple(split(table, self.shape)), np.zeros(len(copies), dtype=np.uint64), after)
        after.users += 1
        return job

    @property
    def is_all_pinned(self) -> bool:
        return self.pinned is not None and self.pinned.is_complete

    @property
    def is_pinning(self) -> bool:
        return self.pinned is None or not (self.pinned.is_complete or self.pinned.is_over)

    @property
    def num_pinned(self) -> int:
        """Frames from the first on that copies can use directly."""
        return self.pinned.num_pinned_bytes // self.memory.frame_bytes if self.pinned is not None else 0

    def is_pinned(self, job: Job) -> bool:
        return self.is_all_pinned or max(job.table.frames) < self.num_pinned


class Flights:
    """Pieces of one direction, oldest first: queued here, or on the GPU, a few at a time."""

    def __init__(self, lane: SaveLane | LoadLane, bytes_ahead: int, shared: Shared) -> None:
        self.lane, self._bytes_ahead, self._shared = lane, bytes_ahead, shared
        self.queued: deque[tuple[Job, Piece]] = deque()
        self.flying: deque[InFlight] = deque()
        self.num_bytes = 0
        """On the GPU."""
        self._busy_until = 0.0

    def has_room(self) -> bool:
        """Whether the link may have one more."""
        return self.num_bytes <= self._bytes_ahead and not self.lane.is_full(len(self.flying))

    def begin(self, job: Job, piece: Piece) -> None:
        """Order ``piece`` after what its job comes after; it is submitted next."""
        if piece is job.pieces[0]:
            self.lane.kernel_stream.wait(job.after.event)
            self._shared.release(job.after)

    def add(self, job: Job, piece: Piece, ticket: int) -> None:
        """It is on the GPU now."""
        self.num_bytes += piece.num_bytes
        self.flying.append(InFlight(job, piece, ticket, self._shared.clock()))

    def landed(self) -> Iterator[tuple[Job, Piece, float]]:
        """What is done since the last call, with the seconds it kept the link; its tags are the job's then."""
        while self.flying and self.lane.is_done(self.flying[0].ticket):
            flight = self.flying.popleft()
            job, piece = flight.job, flight.piece
            self.num_bytes -= piece.num_bytes
            job.tags[piece.begin : piece.end] += self.lane.take_tags(flight.ticket, piece.num_segments)
            now = self._shared.clock()
            seconds = now - max(flight.submitted, self._busy_until)
            self._busy_until = now
            yield job, piece, seconds

    def first_event(self) -> driver.Event | None:
        """Passes when the oldest piece on the GPU is done."""
        return self.lane.done_event(self.flying[0].ticket) if self.flying else None

    def wait_for_first(self) -> None:
        """On the host, until the oldest piece on the GPU is done."""
        if self.flying:
            self.lane.wait_for(self.flying[0].ticket)

    def stop(self) -> None:
        """Forget everything, once nothing of it runs any more."""
        self.lane.stop()
        self.flying.clear()
        self.queued.clear()
        self.num_bytes = 0
