"""The save half of CudaMover: what is queued, what is sent when, and what becomes of tickets.

A piece is sent when its frames are pinned, and at the latest when its blocks may be written again (I2); one whose frames are not
pinned by then fails. It must not know loads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.plan import SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.jobs import Job, Mark, by_frame, tickets_of
from kvloft.transfer.cuda.lanes import MAX_PIECES, SaveLane
from kvloft.transfer.cuda.pieces import NOT_WANTED, Piece
from kvloft.transfer.cuda.shared import Flights, Shared

logger = logging.getLogger(__name__)


class Saves:
    """Gathers and copies out, in the order in which they were submitted."""

    def __init__(
        self, shared: Shared, lane: SaveLane, *, few_first: tuple[int, ...], bytes_ahead: int, gathers_first: bool
    ) -> None:
        """``few_first``: chunks of the first pieces that an idle link takes."""
        self._shared, self._lane = shared, lane
        self._few_first, self._gathers_first = few_first, gathers_first
        self.flights = Flights(lane, bytes_ahead, shared)
        self._open: dict[Job, None] = {}
        self._num_pieces = 0
        """So far, sent or queued; each one's number is its ticket once it is sent."""
        self._last_gather: npt.NDArray[np.int64] = np.full(shared.layout.num_blocks, -1, dtype=np.int64)
        self.waits_for_pins = True
        """Off while everything must be sent: a save whose frames are not pinned then fails."""
        self.num_dropped = 0

    @property
    def is_behind(self) -> bool:
        return bool(self.flights.queued)

    def submit(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers behind the forward just launched, and send the first; what cannot be taken is dropped."""
        every = plans[0].chunks if len(plans) == 1 else list(chain.from_iterable(plan.chunks for plan in plans))
        copies = self._without_hopeless(every)
        if not copies:
            return
        done, per_job = 0, self._shared.chunks_per_job
        try:
            mark = self._shared.mark()
            is_long = len(copies) > per_job
            sizes = chain(self._few_first if is_long and not self.flights.flying else (), repeat(per_job))
            while done < len(copies) and self._shared.broken is None:
                batch = copies[done : done + next(sizes)]
                first_number = self._num_pieces
                if (pieces := self._queue(by_frame(batch), mark)) is None:
                    break
                done += len(batch)
                self.feed()  # the link is at work while the rest is prepared
                for number, piece in enumerate(pieces, first_number):
                    self._last_gather[piece.block_ids] = number
                    if self._gathers_first:
                        self.order_after_gathers(self._shared.compute(), piece.block_ids)
            self._shared.release(mark)
        except driver.CudaError as error:
            self._shared.fail(str(error))
        self.drop(copies[done:])

    def awaited(self) -> driver.Event | None:
        """What must pass before more can be sent; None if nothing waits to be."""
        return self.flights.first_event() if self.is_behind else None

    def feed(self) -> None:
        """Take in what is done and send what there is room for."""
        if self._shared.broken is not None:
            return
        with self._shared.guarded():
            self._land()
            flights = self.flights
            while flights.queued and flights.has_room() and not self._must_wait():
                self._fly(*flights.queued.popleft())

    def order_after_gathers(self, stream: driver.Stream, blocks: npt.NDArray[np.integer[Any]]) -> None:
        """Let ``stream`` go on when no save reads ``blocks`` any more; those not sent yet are sent now, for they come first."""
        queued = self.flights.queued
        if self.flights.flying or queued:
            number = int(self._last_gather[blocks[blocks != NOT_WANTED]].max(initial=-1))
            for _ in range(number - (self._num_pieces - len(queued)) + 1):
                self._fly(*queued.popleft())
            self._lane.order_after_gather(stream, number)

    def drop(self, copies: Sequence[ChunkCopy]) -> None:
        self.num_dropped += len(copies)
        self._shared.done.failed += tickets_of(copies)

    def stop(self) -> None:
        """Everything under way fails; waits until nothing runs."""
        self.flights.stop()
        for job in self._open:
            self.drop(job.copies)
        self._open.clear()

    def _without_hopeless(self, copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
        """All but those that can never be made, which are dropped: to frames that could not be pinned, or any after an error."""
        shared = self._shared
        if shared.broken is None and (shared.is_all_pinned or shared.is_pinning):
            return copies
        num_usable = shared.num_pinned if shared.broken is None else 0
        self.drop([copy for copy in copies if copy.frame >= num_usable])
        return [copy for copy in copies if copy.frame < num_usable]

    def _queue(self, copies: Sequence[ChunkCopy], after: Mark) -> Sequence[Piece] | None:
        """The pieces that were queued; None: there is no room for so many."""
        try:
            job = self._shared.new_job(copies, after)
        except ValueError as error:
            logger.error("kvloft: saves that cannot be made: %s", error)
            self.drop(copies)
            return ()
        queued = self.flights.queued
        if len(self.flights.flying) + len(queued) + len(job.pieces) > MAX_PIECES:
            self._shared.release(after)
            return None
        self._open[job] = None
        queued.extend((job, piece) for piece in job.pieces)
        self._num_pieces += len(job.pieces)
        return job.pieces

    def _must_wait(self) -> bool:
        """Whether the next piece has frames that are still to be pinned. Both the store and pinning begin with the lowest."""
        job = self.flights.queued[0][0]
        return self.waits_for_pins and not self._shared.is_pinned(job) and self._shared.is_pinning

    def _fly(self, job: Job, piece: Piece) -> None:
        self.flights.begin(job, piece)
        if self._shared.is_pinned(job):
            ticket = self._lane.submit(piece)
        else:
            job.is_dropped, ticket = True, self._lane.skip()
        self.flights.add(job, piece, ticket)

    def _land(self) -> None:
        done = self._shared.done
        for job, piece, seconds in self.flights.landed():
            done.seconds_saving += seconds
            if not job.is_dropped:
                done.num_bytes_saved += piece.num_bytes
            if piece is job.pieces[-1]:
                self._finish(job)

    def _finish(self, job: Job) -> None:
        if job.is_dropped:
            self.drop(job.copies)
        else:
            self._shared.trailers.seal(job.table.frames, job.table.keys, job.tags, job.table.num_blocks)
            self._shared.done.saved += tickets_of(job.copies)
        del self._open[job]
