"""Tracks CudaMover's in-progress loads and jobs, and computes the sizes of the first pieces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvloft import _core
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.ids import ChunkKey
from kvloft.seam.plan import LoadPlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.pieces import ChunkTable, Piece

SAVE_PREPARE_US, LOAD_PREPARE_US, PREPARE_CHUNK_US = 100.0, 150.0, 1.5
"""Time to prepare and submit one of the first pieces, and the additional time per chunk.

The times were measured on the host of an H200 with cold caches. The time for a load includes
launching the kernel of the previous piece.
"""
LINK_BYTES_PER_US = 55_000.0
LAST_PIECE_DIVISOR = 4
"""A load's last piece is smaller than its other pieces by this factor, because the link is idle
while the last piece is scattered.
"""
SORTED_PIECES = 4
"""Number of consecutive pieces of a load whose chunks are sorted together."""


def ramp(chunks_per_piece: int, part_bytes: int, prepare_us: float) -> tuple[int, ...]:
    """Return the sizes, in chunks, of the first pieces on an idle link. Later pieces are full-size.

    The first piece is small, because the link is idle until the piece is submitted. Each piece
    takes as long to transfer as the next piece takes to prepare.
    """
    link_us = part_bytes / LINK_BYTES_PER_US
    spare_us = link_us - PREPARE_CHUNK_US
    # The factor is 1.2 because the second piece is larger and takes longer to prepare.
    size = chunks_per_piece if spare_us <= 0 else math.ceil(1.2 * prepare_us / spare_us)
    sizes: list[int] = []
    while size < chunks_per_piece:
        sizes.append(size)
        size = max(size + 1, int((size * link_us - prepare_us) / PREPARE_CHUNK_US))
    return tuple(sizes)


@dataclass(slots=True, eq=False)
class Mark:
    """A point in the compute stream that jobs wait for. The event is reused for later marks."""

    event: driver.Event
    spare: list[driver.Event]

    def __del__(self) -> None:
        self.spare.append(self.event)


@dataclass(slots=True, eq=False)
class Load:
    """An in-progress LoadPlan. ``num_missing`` is the number of chunks without a result."""

    plan: LoadPlan
    num_missing: int
    bad: list[tuple[ChunkKey, str]] = field(default_factory=list)


class WaitingSave(NamedTuple):
    """Chunks of a job that has not been prepared yet.

    ``max_pieces`` is an upper bound on the job's number of pieces. ``number`` is the number of jobs
    queued before it since startup.
    """

    kind: int
    chunks: ChunkBatch
    after: Mark
    max_pieces: int
    number: int


@dataclass(slots=True, eq=False)
class WaitingLoad:
    """Chunks of one load and one page kind. The first ``num_sent`` chunks have been taken."""

    load: Load
    kind: int
    chunks: ChunkBatch
    after: Mark | None
    num_sent: int = 0
    window: ChunkBatch | tuple[()] = ()
    """Chunks sorted by frame. The first ``num_window_sent`` chunks have been taken."""
    num_window_sent: int = 0

    @property
    def num_left(self) -> int:
        return len(self.chunks) - self.num_sent

    def take(self, count: int, *, per_piece: int, is_last: bool) -> ChunkBatch:
        """Take at most ``count`` chunks, sorted by frame.

        The last piece is small if no other load is queued (``is_last``). After the first pieces,
        the link is busy long enough to sort the chunks of `SORTED_PIECES` pieces together.
        """
        chunks, begin, left = self.chunks, self.num_sent, self.num_left
        last = per_piece // LAST_PIECE_DIVISOR
        if is_last and begin and last < left <= count:
            count = left - last
        count = min(count, left)
        if self.num_window_sent == len(self.window) and begin > per_piece:
            self.window = chunks[begin : begin + SORTED_PIECES * per_piece].by_frame()
            self.num_window_sent = 0
        self.num_sent += count
        if not self.window or self.num_window_sent == len(self.window):
            return chunks[begin : self.num_sent].by_frame()
        taken = self.window[self.num_window_sent : self.num_window_sent + count]
        self.num_window_sent += len(taken)
        if num_more := count - len(taken):
            more = chunks[self.num_sent - num_more : self.num_sent]
            taken = _core.ChunkBatch.concat([taken, more]).by_frame()
        return taken


@dataclass(slots=True, eq=False)
class Job:
    """Chunks of one page kind that finish together: all chunks of a piece, or one chunk in many
    pieces.

    Attributes:
        tags: each chunk's sum so far, as computed by the kernels.
        record_units: the size of each chunk's encoded records, in units of 16 bytes.
        after: the mark that the copies wait for. None once the last piece has been submitted.
        owners: for loads, each load and its number of chunks, in the order of ``chunks``.
        wanted_tags: for loads, the tags in the trailers.
        problems: for loads, why a chunk failed verification, by index in ``chunks``.
    """

    kind: int
    chunks: ChunkBatch
    table: ChunkTable
    pieces: Sequence[Piece]
    tags: npt.NDArray[np.uint64]
    record_units: npt.NDArray[np.uint64]
    after: Mark | None
    owners: Sequence[tuple[Load, int]] = ()
    wanted_tags: npt.NDArray[np.uint64] | None = None
    problems: dict[int, str] = field(default_factory=dict)
    number: int = 0
    """For saves, the number of jobs queued before this one since startup."""
    is_all_registered: bool = True
    """False if a piece was submitted before its frames were registered. Such a save fails."""
