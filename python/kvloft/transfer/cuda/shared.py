"""What the halves of CudaMover share: what is done, marks in the compute stream, what is pinned; and `Half`, which both are.

Everything here is used under one lock. It must not know what is saved or loaded.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvloft import _core
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.jobs import Job, Load, Mark
from kvloft.transfer.cuda.lanes import MAX_PIECES, Lane, Sent
from kvloft.transfer.cuda.pieces import ChunkTable, Piece, Shape, split
from kvloft.transfer.cuda.pinning import PinnedRange
from kvloft.transfer.cuda.trailers import Trailers
from kvloft.transfer.frames import FrameMemory
from kvloft.transfer.mover import Finished

logger = logging.getLogger(__name__)

NUM_MARKS = 8
"""Made at start; more steps with copies that have not started are rare, and then more are made."""


class Kind(NamedTuple):
    """Pages that lie alike: how they are cut into pieces, and the trailers of their frames. KV cache groups may share one.

    ``unpinned_shape``: that of loads from frames that are not pinned yet.
    """

    shape: Shape
    unpinned_shape: Shape
    trailers: Trailers

    def with_slots(self, slot_bytes: int) -> Kind:
        """The same with staging slots of ``slot_bytes``."""
        shape, unpinned = (replace(shape, slot_bytes=slot_bytes) for shape in (self.shape, self.unpinned_shape))
        return Kind(shape, unpinned, self.trailers)


@dataclass(slots=True, eq=False)
class Shared:
    """``fail`` is what a half calls after a CUDA error; ``compute`` is the stream that forwards are launched on.

    ``kind_of`` says of which of ``kinds`` a KV cache group's pages are. All ids of blocks are below ``num_blocks``: whatever group
    has a block, it is the same memory.
    """

    kinds: Sequence[Kind]
    kind_of: Sequence[int]
    memory: FrameMemory
    num_blocks: int
    bytes_ahead: int
    """When so many of one direction are on the GPU, no more are sent."""
    compute: Callable[[], driver.Stream]
    fail: Callable[[str], None]
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Of everything, for feeders and the thread that pins change it too."""
    done: Finished = field(default_factory=Finished)
    broken: str | None = None
    pinned: PinnedRange = field(init=False)
    """Pinning starts last, and nothing is submitted before."""
    spare_marks: list[driver.Event] = field(default_factory=lambda: [driver.Event() for _ in range(NUM_MARKS)])

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
        return max(1, min(kind.shape.chunks_per_piece for kind in self.kinds))

    def by_kind(self, plans: Sequence[SavePlan | LoadPlan]) -> list[tuple[int, ChunkBatch]]:
        """All chunks of ``plans``, a batch for each kind of pages."""
        found: dict[int, list[ChunkBatch]] = {}
        for plan in plans:
            for group, chunks in plan.chunks.by_group() if plan.chunks else ():
                found.setdefault(self.kind_of[group], []).append(chunks)
        return [(kind, some[0] if len(some) == 1 else _core.ChunkBatch.concat(some)) for kind, some in found.items()]

    def take_done(self) -> Finished:
        done, self.done = self.done, Finished()
        return done

    def mark(self) -> Mark:
        """A point in the compute stream, now. Raises CudaError."""
        mark = Mark(self.spare_marks.pop() if self.spare_marks else driver.Event(), self.spare_marks)
        mark.event.record(self.compute())
        return mark

    def problem_of(self, kind: int, chunks: ChunkBatch) -> str | None:
        """Which copy would leave the arena, its frame or the paged KV; None if none does."""
        blocks_per_chunk = self.kinds[kind].shape.blocks_per_chunk
        try:
            chunks.check(num_frames=self.memory.num_frames, num_blocks=self.num_blocks, blocks_per_chunk=blocks_per_chunk)
        except ValueError as error:
            return f"copy: {error}"
        return None

    def new_job(self, kind: int, chunks: ChunkBatch, after: Mark | None, owners: Sequence[tuple[Load, int]] = ()) -> Job:
        """``chunks`` have no problem. With ``owners`` it is a load's."""
        table, pages = ChunkTable.of(chunks), self.kinds[kind]
        shape = pages.unpinned_shape if owners and not self.are_pinned(table.frames) else pages.shape
        pieces = tuple(split(table, shape, pages.trailers.are_raw(table.frames) if owners and shape.encoding is not None else None))
        tags: npt.NDArray[np.uint64] = np.zeros(len(chunks), np.uint64)
        used = tags.copy()
        return Job(kind, chunks, table, pieces, tags, used, after, owners)

    def trailers_of(self, job: Job) -> Trailers:
        return self.kinds[job.kind].trailers

    @property
    def num_pinned(self) -> int:
        """Frames from the first on that copies can use directly."""
        return self.pinned.num_pinned_bytes // self.memory.frame_bytes

    def are_pinned(self, frames: Sequence[int]) -> bool:
        return self.pinned.is_complete or max(frames) < self.num_pinned


class InFlight(NamedTuple):
    """A piece that is on the GPU since ``submitted``."""

    job: Job
    piece: Piece
    sent: Sent
    submitted: float


class Half(ABC):
    """One direction: its pieces, oldest first, queued here, or on the GPU, a few at a time."""

    def __init__(self, shared: Shared, lane: Lane, few_first: tuple[int, ...]) -> None:
        """``few_first``: chunks of the first pieces that an idle link takes."""
        self._shared, self.lane, self._few_first = shared, lane, few_first
        self.queued: deque[tuple[Job, Piece]] = deque()
        self.flying: deque[InFlight] = deque()
        self.num_bytes = 0
        """On the GPU."""
        self._busy_until = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self.queued)

    def awaited(self) -> driver.Event | None:
        """What must pass before more can be sent; None if nothing waits to be."""
        return self.flying[0].sent.done if self.flying and self.is_behind else None

    def feed(self) -> None:
        """Take in what is done and send what there is room for."""
        if self._shared.broken is None:
            with self._shared.guarded():
                self._land()
                self._send()

    def wait_for_first(self) -> None:
        """On the host, until the oldest piece on the GPU is done."""
        if self.flying:
            self.flying[0].sent.done.synchronize()

    def stop(self) -> None:
        """Everything under way fails; waits until nothing runs."""
        self.lane.stop()
        self.flying.clear()
        self.queued.clear()
        self.num_bytes = 0

    @abstractmethod
    def _send(self) -> None:
        """Send what there is room for."""

    @abstractmethod
    def _has_landed(self, job: Job, piece: Piece, seconds: float) -> None:
        """``piece`` is done, and ``seconds`` are how long it kept the link; its tags are the job's now."""

    def _has_room(self) -> bool:
        """Whether the link may have one more."""
        return self.num_bytes <= self._shared.bytes_ahead and len(self.flying) < MAX_PIECES

    def _fly(self, job: Job, piece: Piece) -> None:
        """Send the piece, after what its job comes after."""
        if job.after is not None:
            self.lane.kernel_stream.wait(job.after.event)
            job.after = None
        is_pinned = self._shared.are_pinned(job.table.frames)
        job.is_all_pinned = job.is_all_pinned and is_pinned
        sent = self.lane.submit(piece, kind=job.kind, is_pinned=is_pinned)
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
