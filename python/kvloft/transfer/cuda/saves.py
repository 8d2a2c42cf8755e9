"""Implements CudaMover's saves: queues pieces, orders them, and reports ticket results.

A piece is submitted once its frames are registered, or when its blocks may be overwritten (I2),
whichever comes first. A save submitted before its frames are registered fails. Pieces are prepared
just before submission, mostly by the submitter thread, because preparing a step's thousands of
chunks takes several milliseconds.
"""

import logging
import math
from collections.abc import Sequence
from itertools import chain, repeat, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloft.seam.batch import ChunkBatch
from kvloft.seam.plan import SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.jobs import Job, WaitingSave
from kvloft.transfer.cuda.lanes import MAX_PIECES, Lane
from kvloft.transfer.cuda.pieces import NOT_WANTED, Piece, block_ids_of
from kvloft.transfer.cuda.shared import Direction, Shared

logger = logging.getLogger(__name__)


class Saves(Direction[WaitingSave]):
    """Gathers chunks and copies them to the host in order of arrival."""

    def __init__(
        self, shared: Shared, lane: Lane, ramp_sizes: tuple[int, ...], *, gathers_first: bool
    ) -> None:
        super().__init__(shared, lane, ramp_sizes)
        self._gathers_first = gathers_first
        self._open: dict[Job, None] = {}
        self._num_jobs = 0
        """Number of jobs queued since startup."""
        self._last_gather: npt.NDArray[np.int64] = np.full(shared.num_blocks, -1, dtype=np.int64)
        """For each block, the number of the last job that reads it, or -1 if no job does."""
        self._is_full = False
        """True if the last saves exceeded MAX_PIECES."""
        self.waits_for_registration = True
        """If False, saves to unregistered frames are submitted anyway, and fail."""

    @property
    def num_pieces(self) -> int:
        """Return an upper bound on the number of pieces that are waiting or on the GPU."""
        waiting = sum(each.max_pieces for each in self.waiting)
        return waiting + len(self.queued) + len(self.in_flight)

    def submit(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers that run after the last launched forward pass, and submit as many as
        possible.

        Saves that exceed MAX_PIECES are dropped.
        """
        for kind, chunks in self._shared.by_kind(plans):
            if self._shared.kinds[kind].fits:
                self._queue(kind, chunks)
            else:
                self._shared.done.misfits += chunks.tickets()
                self._drop(chunks)

    def _queue(self, kind: int, chunks: ChunkBatch) -> None:
        if not chunks or self._shared.broken is not None:
            self._drop(chunks)
            return
        num_taken = 0
        with self._shared.guarded():
            self._collect_done()
            num_taken = self._divide(kind, chunks)
            self.feed()
            if self._gathers_first:
                for event in self._submit_gathers_until(self._num_jobs - 1):
                    self._shared.compute().wait(event)
        is_full = num_taken < len(chunks)
        if is_full:
            if not self._is_full:
                logger.warning(
                    "kvloft: the save queue is full; %d chunks were not saved",
                    len(chunks) - num_taken,
                )
            self._drop(chunks[num_taken:])
        self._is_full = is_full

    def _divide(self, kind: int, chunks: ChunkBatch) -> int:
        """Divide ``chunks`` into jobs until MAX_PIECES is reached. Return the number of chunks in
        these jobs, including jobs dropped because they contain an invalid chunk.
        """
        block_ids = block_ids_of(chunks).reshape(len(chunks), -1)
        mark, begin, per_job = self._shared.mark(), 0, self._shared.chunks_per_save
        num_pieces = self._shared.kinds[kind].saves.max_pieces(per_job)
        capacity = MAX_PIECES - self.num_pieces
        starts_idle = len(chunks) > per_job and not self.in_flight
        sizes = chain(self._ramp_sizes if starts_idle else (), repeat(per_job))
        while begin < len(chunks) and capacity >= num_pieces:
            end = min(begin + next(sizes), len(chunks))
            batch, number = chunks[begin:end], self._num_jobs
            if (problem := self._shared.problem_of(kind, batch)) is not None:
                logger.error("kvloft: dropped invalid saves: %s", problem)
                self._drop(batch)
            else:
                self.waiting.append(WaitingSave(kind, batch, mark, num_pieces, number))
                self._last_gather[block_ids[begin:end]] = number
                self._num_jobs += 1
                capacity -= num_pieces
            begin = end
        return begin

    def order_after_gathers(
        self, stream: driver.Stream, blocks: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Make ``stream`` wait until no save reads ``blocks``."""
        for event in self.submit_gathers_of(blocks):
            stream.wait(event)

    def submit_gathers_of(self, blocks: npt.NDArray[np.integer[Any]]) -> list[driver.Event]:
        """Submit all queued saves of ``blocks``, and return the events after which no save reads
        these blocks.
        """
        if not (self.in_flight or self.is_behind):
            return []
        last = self._last_gather[blocks[blocks != NOT_WANTED]].max(initial=-1)
        return self._submit_gathers_until(int(last))

    def _submit_gathers_until(self, number: int) -> list[driver.Event]:
        """Submit the pieces of all jobs up to ``number``, and return the events after which none of
        these jobs reads its blocks.
        """
        while self._next_number() <= number and self._first_queued() is not None:
            self._submit_piece(*self.queued.popleft())
        # Pieces use the slots in turn, and pieces in the same slot run in order, so it is
        # sufficient to wait for the last piece in each slot.
        reading = list(takewhile(lambda each: each.job.number <= number, self.in_flight))
        return [each.sent.read for each in reading[-self.lane.num_slots :]]

    def _next_number(self) -> float:
        """Return the job number of the next piece, or infinity if no pieces are waiting."""
        if self.queued:
            return self.queued[0][0].number
        return self.waiting[0].number if self.waiting else math.inf

    def stop(self) -> None:
        dropped = [each.chunks for each in self._open] + [each.chunks for each in self.waiting]
        super().stop()
        for chunks in dropped:
            self._drop(chunks)
        self._open.clear()

    def _drop(self, chunks: ChunkBatch) -> None:
        self._shared.done.failed += chunks.tickets()

    def _prepare(self) -> Job:
        first = self.waiting[0]
        job = self._shared.new_job(first.kind, first.chunks.by_frame(), first.after)
        job.number = first.number
        self.waiting.popleft()  # after `new_job`, so that `stop` drops the chunks if it fails
        self._open[job] = None
        return job

    def _submit_queued(self) -> None:
        while self._has_capacity() and (following := self._first_queued()) is not None:
            if self._must_wait(following[0]):
                return
            self._submit_piece(*self.queued.popleft())

    def _must_wait(self, job: Job) -> bool:
        """Return True if ``job`` must wait until its frames are registered.

        Frames are registered in ascending order, and the store allocates the lowest free frames
        first.
        """
        shared = self._shared
        return (
            self.waits_for_registration
            and not shared.are_registered(job.kind, job.table.frames)
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
