"""Implements CudaMover's saves: queued pieces, their order, and the results of tickets.

A piece is submitted once its frames are registered, or when its blocks may be overwritten (I2),
whichever is earlier. A save fails if its frames are not registered when it is submitted.
"""

import logging
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloft.seam.batch import ChunkBatch
from kvloft.seam.plan import SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.jobs import Job, Mark
from kvloft.transfer.cuda.lanes import MAX_PIECES, Lane
from kvloft.transfer.cuda.pieces import NOT_WANTED, Piece
from kvloft.transfer.cuda.shared import Direction, Shared

logger = logging.getLogger(__name__)


class Saves(Direction):
    """Gathers chunks and copies them to the host in order of arrival."""

    def __init__(
        self, shared: Shared, lane: Lane, ramp_sizes: tuple[int, ...], *, gathers_first: bool
    ) -> None:
        super().__init__(shared, lane, ramp_sizes)
        self._gathers_first = gathers_first
        self._open: dict[Job, None] = {}
        self._num_pieces = 0
        """Number of pieces queued so far, including pieces that have been submitted or are done."""
        self._last_gather: npt.NDArray[np.int64] = np.full(shared.num_blocks, -1, dtype=np.int64)
        """For each block, the number of the last piece that reads it, or -1 if there is none."""
        self.waits_for_registration = True
        """If False, saves to frames that are not registered are submitted anyway and fail."""

    def submit(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers after the last launched forward pass, and submit as many as possible.

        Saves that exceed MAX_PIECES are dropped.
        """
        for kind, chunks in self._shared.by_kind(plans):
            if self._shared.kinds[kind].fits:
                self._submit(kind, chunks)
            else:
                self._shared.done.misfits += chunks.tickets()
                self._drop(chunks)

    def _submit(self, kind: int, chunks: ChunkBatch) -> None:
        if not chunks or self._shared.broken is not None:
            self._drop(chunks)
            return
        done, per_job = 0, self._shared.chunks_per_save
        with self._shared.guarded():
            mark = self._shared.mark()
            starts_idle = len(chunks) > per_job and not self.in_flight
            sizes = chain(self._ramp_sizes if starts_idle else (), repeat(per_job))
            while done < len(chunks) and self._shared.broken is None:
                batch = chunks[done : done + next(sizes)]
                first_number = self._num_pieces
                if (pieces := self._queue(kind, batch.by_frame(), mark)) is None:
                    break
                done += len(batch)
                self.feed()  # start the transfer before preparing the next batch
                for number, piece in enumerate(pieces, first_number):
                    self._last_gather[piece.block_ids] = number
                    if self._gathers_first:
                        self.order_after_gathers(self._shared.compute(), piece.block_ids)
        self._drop(chunks[done:])

    def order_after_gathers(
        self, stream: driver.Stream, blocks: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Make ``stream`` wait until no save reads ``blocks``.

        Submit all queued saves of these blocks first.
        """
        if not (self.in_flight or self.queued):
            return
        number = int(self._last_gather[blocks[blocks != NOT_WANTED]].max(initial=-1))
        first_in_flight = self._num_pieces - len(self.queued) - len(self.in_flight)
        while number >= first_in_flight + len(self.in_flight):
            self._submit_piece(*self.queued.popleft())
        if (last := number - first_in_flight) >= 0:
            # Pieces use the slots in turn, and pieces in the same slot run in order, so it is
            # sufficient to wait for the last piece in each slot.
            for nth in range(max(0, last + 1 - self.lane.num_slots), last + 1):
                stream.wait(self.in_flight[nth].sent.read)

    def stop(self) -> None:
        super().stop()
        for job in self._open:
            self._drop(job.chunks)
        self._open.clear()

    def _drop(self, chunks: ChunkBatch) -> None:
        self._shared.done.failed += chunks.tickets()

    def _queue(self, kind: int, chunks: ChunkBatch, after: Mark) -> Sequence[Piece] | None:
        """Queue and return the pieces of ``chunks``, or return None if MAX_PIECES is exceeded."""
        if (problem := self._shared.problem_of(kind, chunks)) is not None:
            logger.error("kvloft: saves dropped: %s", problem)
            self._drop(chunks)
            return ()
        job = self._shared.new_job(kind, chunks, after)
        if len(self.in_flight) + len(self.queued) + len(job.pieces) > MAX_PIECES:
            return None
        self._open[job] = None
        self.queued.extend((job, piece) for piece in job.pieces)
        self._num_pieces += len(job.pieces)
        return job.pieces

    def _submit_queued(self) -> None:
        while self.queued and self._has_capacity() and not self._must_wait():
            self._submit_piece(*self.queued.popleft())

    def _must_wait(self) -> bool:
        """Return True if the frames of the next piece are not registered yet.

        Frames are registered in ascending order, and the store allocates the lowest free frames
        first.
        """
        shared = self._shared
        return (
            self.waits_for_registration
            and not shared.are_registered(self.queued[0][0].kind, self.queued[0][0].table.frames)
            and not shared.registered.is_over
        )

    def _on_done(self, job: Job, piece: Piece, seconds: float) -> None:
        done = self._shared.done
        done.seconds_saving += seconds
        if job.is_all_registered:
            done.num_bytes_saved += piece.num_bytes
        if piece is not job.pieces[-1]:
            return
        if job.is_all_registered:
            tickets, table = job.chunks.tickets(), job.table
            too_long = self._shared.trailers_of(job).seal(
                table.frames, table.keys, job.tags, table.num_blocks, job.record_units
            )
            misfits = [tickets[i] for i in too_long]
            done.saved += [ticket for ticket in tickets if ticket not in misfits]
            done.failed += misfits
            done.misfits += misfits
        else:
            self._drop(job.chunks)
        del self._open[job]
