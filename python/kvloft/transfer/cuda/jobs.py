"""Records of CudaMover's copies in progress. Must not depend on streams."""

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
"""Time to prepare and send one of the first pieces, and for each of its chunks, on the host of an
H200 with cold caches. For a load it includes the launch of the kernel of the piece before.
"""
LINK_BYTES_A_US = 55_000.0
SMALL_LAST = 4
"""The last piece of a load is this much smaller: the link idles while it is scattered."""
SORTED_PIECES = 4
"""Number of pieces of a load whose chunks are sorted at once."""


def ramp(chunks_per_piece: int, part_bytes: int, prepare_us: float) -> tuple[int, ...]:
    """Return the numbers of chunks of the first pieces on an idle link; later pieces are full.

    The link waits for the first piece, so it is small. The transfer of each piece lasts as long as
    the preparation of the next one.
    """
    link_us = part_bytes / LINK_BYTES_A_US
    spare_us = link_us - PREPARE_CHUNK_US
    # The next piece has a few more.
    size = chunks_per_piece if spare_us <= 0 else math.ceil(1.2 * prepare_us / spare_us)
    sizes: list[int] = []
    while size < chunks_per_piece:
        sizes.append(size)
        size = max(size + 1, int((size * link_us - prepare_us) / PREPARE_CHUNK_US))
    return tuple(sizes)


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the compute stream that jobs wait for. Its event is reused."""

    event: driver.Event
    spare: list[driver.Event]

    def __del__(self) -> None:
        self.spare.append(self.event)


@dataclass(slots=True, eq=False)
class Load:
    """A LoadPlan in progress; ``num_missing`` of its chunks are not loaded yet."""

    plan: LoadPlan
    num_missing: int
    bad: list[tuple[ChunkKey, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Waiting:
    """Chunks of a load for pages of one ``kind``; the first ``num_sent`` are sent."""

    load: Load
    kind: int
    chunks: ChunkBatch
    after: Mark | None
    num_sent: int = 0
    window: ChunkBatch | tuple[()] = ()
    """Chunks that are sorted already; the first ``used`` of them are sent."""
    used: int = 0

    @property
    def num_left(self) -> int:
        """Return the number of chunks that are not sent."""
        return len(self.chunks) - self.num_sent

    def take(self, count: int, *, per_piece: int, is_last: bool) -> ChunkBatch:
        """Return at most ``count`` chunks, in the order of their frames. The last piece of an idle
        link is smaller.

        After the first piece, chunks of several pieces are sorted at once: the link then has enough
        work for that time.
        """
        chunks, begin, left = self.chunks, self.num_sent, self.num_left
        last = per_piece // SMALL_LAST
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
            more = chunks[self.num_sent - num_more : self.num_sent]
            taken = _core.ChunkBatch.concat([taken, more]).by_frame()
        return taken


@dataclass(slots=True, eq=False)
class Job:
    """Chunks of one kind that finish together: the chunks of one piece, or one chunk of many
    pieces.

    No chunk is accessed before ``after``, which is None once the last piece is ordered after it.
    ``tags`` are the sums of the kernels so far, and ``used`` are the sizes of encoded records in
    units of 16 bytes. For loads, ``wanted_tags`` are the tags in the trailers, ``problems`` are
    chunks that failed their check, and ``owners`` are the loads with their numbers of chunks, in
    order.
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
    is_all_registered: bool = True
    """True if every piece's frames were registered when sent; otherwise a save fails."""
