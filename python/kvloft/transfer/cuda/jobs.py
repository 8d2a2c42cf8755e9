"""What CudaMover keeps of copies under way: loads, jobs that finish together, what waits to be sent. It must not know streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvloft import _core
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.ids import ChunkKey
from kvloft.seam.plan import LoadPlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.pieces import ChunkTable, Piece

SAVE_PREPARE_US, LOAD_PREPARE_US, PREPARE_CHUNK_US = 100.0, 150.0, 1.5
"""To prepare and send one of the first pieces takes so long (of a load, its predecessor's kernel is launched before it), and so
much longer for each of its chunks: seen on an H200's host, whose caches hold other things by then."""
LINK_BYTES_A_US = 55_000.0
SMALL_LAST = 4
"""The last piece of a load is so many times smaller than others: the link waits while it is scattered."""
SORTED_PIECES = 4
"""Of a load: as many pieces' chunks are sorted at once."""


def ramp(chunks_per_piece: int, part_bytes: int, prepare_us: float) -> tuple[int, ...]:
    """Chunks of the first pieces that a link takes which is idle before them; those after are full.

    The link waits for the first, so it has few; each keeps the link at work for as long as it takes to prepare the next.
    """
    link_us = part_bytes / LINK_BYTES_A_US
    spare_us = link_us - PREPARE_CHUNK_US
    size = chunks_per_piece if spare_us <= 0 else math.ceil(1.2 * prepare_us / spare_us)  # the next has a few more than it
    sizes: list[int] = []
    while size < chunks_per_piece:
        sizes.append(size)
        size = max(size + 1, int((size * link_us - prepare_us) / PREPARE_CHUNK_US))
    return tuple(sizes)


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the compute stream for queued jobs to start after. Its event is reused once nothing refers to it."""

    event: driver.Event
    spare: list[driver.Event]

    def __del__(self) -> None:
        self.spare.append(self.event)


@dataclass(slots=True, eq=False)
class Load:
    """A LoadPlan under way, ``num_missing`` of whose chunks are not in yet."""

    plan: LoadPlan
    num_missing: int
    bad: list[tuple[ChunkKey, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Waiting:
    """Chunks of a load that go to pages of one ``kind`` (see `shared`). Those from ``num_sent`` on are not sent yet."""

    load: Load
    kind: int
    chunks: ChunkBatch
    after: Mark | None
    num_sent: int = 0
    window: ChunkBatch | tuple[()] = ()
    """Some that are sorted already; those from ``used`` on are not sent yet."""
    used: int = 0

    @property
    def num_left(self) -> int:
        """To be sent."""
        return len(self.chunks) - self.num_sent

    def take(self, count: int, *, per_piece: int, is_last: bool) -> ChunkBatch:
        """The next ``count`` chunks at most, in the order of their frames; not all of them where the link has nothing to do after.

        What follows the first piece's worth is sorted some pieces at a time: by then the link has work for longer than that takes.
        """
        chunks, begin, left, last = self.chunks, self.num_sent, self.num_left, per_piece // SMALL_LAST
        if is_last and begin and last < left <= count:
            count = left - last
        count = min(count, left)
        if self.used == len(self.window) and begin > per_piece:
            self.window, self.used = chunks[begin : begin + SORTED_PIECES * per_piece].by_frame(), 0
        self.num_sent += count
        if not self.window or self.used == len(self.window):
            return chunks[begin : self.num_sent].by_frame()
        taken = self.window[self.used : self.used + count]
        self.used += len(taken)
        if num_more := count - len(taken):
            taken = _core.ChunkBatch.concat([taken, chunks[self.num_sent - num_more : self.num_sent]]).by_frame()
        return taken


@dataclass(slots=True, eq=False)
class Job:
    """Chunks of one kind that finish together: as many as one piece takes, or one that takes many pieces.

    None is touched before ``after``, which is forgotten once the first piece is behind it on the GPU.
    ``tags`` are what the kernels found so far, and ``used`` what an encoded chunk's records take, in 16 bytes. For loads,
    ``wanted_tags`` is what the trailers say, ``problems`` is what they lack, and ``owners`` are the loads and how many of the
    chunks, in order, are theirs.
    """

    kind: int
    chunks: ChunkBatch
    table: ChunkTable
    pieces: Sequence[Piece]
    tags: npt.NDArray[np.uint64]
    used: npt.NDArray[np.uint64]
    after: Mark | None
    owners: Sequence[tuple[Load, int]] = ()
    wanted_tags: npt.NDArray[np.uint64] | None = None
    problems: dict[int, str] = field(default_factory=dict)
    is_all_pinned: bool = True
    """Whether the frames of every piece were pinned when it was sent; where not, a save was not made."""
