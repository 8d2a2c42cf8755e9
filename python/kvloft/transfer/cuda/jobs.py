"""What CudaMover keeps of copies under way: loads, jobs that finish together, what waits to be sent. It must not know streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.pieces import ChunkTable, Piece
from kvloft.types import ChunkCopy, ChunkKey, LoadPlan

PREPARE_US, PREPARE_CHUNK_US = 150.0, 1.6
"""To prepare and send a piece takes so long, and so much longer for each of its chunks, with something to spare (seen on an
H200's host, once all is warm: 60 to 100 us for 20 chunks, 175 for 79; with a first piece for 110 us, saves lost 0.5 %)."""
LINK_BYTES_A_US = 55_000.0
SMALL_LAST = 4
"""The last piece of a load is so many times smaller than others: the link waits while it is scattered."""
FRAME = itemgetter(ChunkCopy._fields.index("frame"))
"""Chunks are sent in the order of their frames, so that neighbours, in whichever order a store gave them out, are one copy."""


def chunks_of_first(chunks_per_piece: int, part_bytes: int) -> tuple[int, int]:
    """Chunks of the first piece of a save and of a load, before which the link is idle.

    As few as take the link as long as it takes to prepare the second; of a load half a piece at least, for more happens before
    its second (less lost up to 0.8 %).
    """
    enough = (PREPARE_US + PREPARE_CHUNK_US * chunks_per_piece) * LINK_BYTES_A_US / part_bytes
    save = min(chunks_per_piece, math.ceil(enough))
    return save, max(save, chunks_per_piece // 2)


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
    copies: Sequence[ChunkCopy]
    after: Mark
    sent: int = 0
    is_sorted: bool = False
    num_dropped: int = 0
    """Leading copies that were sent and are not in ``copies`` any more."""

    @property
    def num_left(self) -> int:
        return self.num_dropped + len(self.copies) - self.sent

    def take(self, count: int, *, first: int, is_last: bool) -> list[ChunkCopy]:
        """The next ``count`` chunks at most; only ``first``, if not 0, where the link has nothing else to do before them,
        and fewer where it has nothing to do after them.

        What follows the first two pieces is sorted as a whole: by then the link has work for longer than that takes.
        """
        begin, left, few = self.sent, self.num_left, count // SMALL_LAST
        if begin >= count and not self.is_sorted:
            self.copies = sorted(self.copies[begin:], key=FRAME)
            self.is_sorted, self.num_dropped = True, begin
        if first and left > count:
            count = first
        elif is_last and begin and few < left <= count:
            count = left - few
        self.sent += min(count, left)
        return sorted(self.copies[begin - self.num_dropped : self.sent - self.num_dropped], key=FRAME)
