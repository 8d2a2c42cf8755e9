"""What CudaMover keeps of copies under way: loads, jobs that finish together, what waits to be sent. It must not know streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.pieces import ChunkTable, Piece
from kvloft.types import ChunkCopy, ChunkKey, LoadPlan

SMALL_FIRST_SAVE, SMALL_FIRST_LOAD, SMALL_LAST_LOAD = 4, 2, 4
"""Where the link waits for the host or for a kernel, a piece is so many times smaller than others. The first must take the link
as long as it takes to prepare the second: 165 to 175 us on an H200's host, and 10 MiB take 190."""

FRAME = itemgetter(ChunkCopy._fields.index("frame"))
"""Chunks are sent in the order of their frames, so that neighbours, in whichever order a store gave them out, are one copy."""


@dataclass(slots=True, eq=False)
class Load:
    """A LoadPlan under way: how many of its chunks are not in yet, and which were bad."""

    plan: LoadPlan
    num_left: int
    bad: list[tuple[ChunkKey, str]]


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the compute stream for queued jobs to start after. While there are ``users``, it is not recorded again."""

    event: driver.Event
    users: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """Chunks that finish together: as many as one piece takes, or one that takes many pieces. None is touched before ``after``.

    ``tags`` are what the kernels found so far; for loads, ``wanted_tags`` is what the trailers say, ``problems`` is what they
    lack, and ``owners`` are the loads and how many of the chunks, in order, are theirs.
    """

    copies: Sequence[ChunkCopy]
    table: ChunkTable
    pieces: Sequence[Piece]
    tags: npt.NDArray[np.uint64]
    after: Mark
    wanted_tags: npt.NDArray[np.uint64] | None = None
    problems: dict[int, str] = field(default_factory=dict)
    owners: Sequence[tuple[Load, int]] = ()


@dataclass(slots=True)
class InFlight:
    """A piece that is on the GPU since ``submitted``."""

    job: Job
    piece: Piece
    ticket: int
    submitted: float


@dataclass(slots=True)
class QueuedLoad:
    """Chunks of a load that are not sent yet: those from ``sent`` on."""

    load: Load
    copies: list[ChunkCopy]
    after: Mark
    sent: int = 0
    is_sorted: bool = False

    @property
    def num_left(self) -> int:
        return len(self.copies) - self.sent

    def take(self, count: int, *, is_first: bool, is_last: bool) -> list[ChunkCopy]:
        """The next ``count`` chunks at most; fewer where the link has nothing else to do before (``is_first``) or after them.

        What follows the first two pieces is sorted as a whole: by then the link has work for longer than that takes.
        """
        begin, left, few = self.sent, self.num_left, count // SMALL_LAST_LOAD
        if begin >= count and not self.is_sorted:
            self.copies[begin:] = sorted(self.copies[begin:], key=FRAME)
            self.is_sorted = True
        if is_first and left > count:
            count = max(1, count // SMALL_FIRST_LOAD)
        elif is_last and begin and few < left <= count:
            count = left - few
        self.sent = min(begin + count, len(self.copies))
        return sorted(self.copies[begin : self.sent], key=FRAME)
