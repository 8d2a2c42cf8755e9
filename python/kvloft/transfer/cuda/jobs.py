"""Copies in progress of CudaMover: loads, jobs, and the sizes of the first pieces."""

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
"""Time to prepare and submit one of the first pieces, and additional time per chunk of the piece.

Measured on the host of an H200 with cold caches. The time for a load includes the launch of the
previous piece's kernel.
"""
LINK_BYTES_PER_US = 55_000.0
LAST_PIECE_DIVISOR = 4
"""The last piece of a load has 1/4 of the usual size, because the link is idle during its scatter.
"""
SORTED_PIECES = 4
"""Number of pieces of a load whose chunks are sorted together."""


def ramp(chunks_per_piece: int, part_bytes: int, prepare_us: float) -> tuple[int, ...]:
    """Return the sizes, in chunks, of the first pieces on an idle link. Later pieces are full.

    The first piece is small, because the link is idle until it is submitted. The transfer of each
    piece takes as long as the preparation of the next piece.
    """
    link_us = part_bytes / LINK_BYTES_PER_US
    spare_us = link_us - PREPARE_CHUNK_US
    # 1.2: the second piece is larger than the first, so it takes longer to prepare.
    size = chunks_per_piece if spare_us <= 0 else math.ceil(1.2 * prepare_us / spare_us)
    sizes: list[int] = []
    while size < chunks_per_piece:
        sizes.append(size)
        size = max(size + 1, int((size * link_us - prepare_us) / PREPARE_CHUNK_US))
    return tuple(sizes)


@dataclass(slots=True, eq=False)
class Mark:
    """Point in the compute stream that jobs wait for. The event is reused for later marks."""

    event: driver.Event
    spare: list[driver.Event]

    def __del__(self) -> None:
        self.spare.append(self.event)


@dataclass(slots=True, eq=False)
class Load:
    """LoadPlan in progress. ``num_missing`` is the number of chunks without a result."""

    plan: LoadPlan
    num_missing: int
    bad: list[tuple[ChunkKey, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Waiting:
    """Chunks of one load with pages of one ``kind``. The first ``num_sent`` are taken already."""

    load: Load
    kind: int
    chunks: ChunkBatch
    after: Mark | None
    num_sent: int = 0
    window: ChunkBatch | tuple[()] = ()
    """Chunks sorted by frame. The first ``num_window_sent`` of them are taken already."""
    num_window_sent: int = 0

    @property
    def num_left(self) -> int:
        """Return the number of chunks that are not taken yet."""
        return len(self.chunks) - self.num_sent

    def take(self, count: int, *, per_piece: int, is_last: bool) -> ChunkBatch:
        """Take at most ``count`` chunks, in the order of their frames.

        The last piece is small if no load is queued behind this one (``is_last``). After the first
        pieces, the link has enough work to sort the chunks of `SORTED_PIECES` pieces together.
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
    """Chunks of one kind that finish together: all chunks of a piece, or a chunk of many pieces.

    Attributes:
        tags: for each chunk, the sum that the kernels have computed so far.
        record_units: for each chunk, the size of its encoded records in units of 16 bytes.
        after: the copies wait for this mark. None once the last piece has been submitted.
        owners: for loads, each load with its number of chunks, in the order of ``chunks``.
        wanted_tags: for loads, the tags in the trailers.
        problems: for loads, why a chunk failed its check, by index in ``chunks``.
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
    is_all_registered: bool = True
    """True if all frames were registered when their pieces were submitted. If not, a save fails."""
