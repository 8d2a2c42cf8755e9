"""Implements CudaMover's loads: queued loads, their pieces, and their results.

Chunks are split into pieces just before submission. Each load is reported once, together with all
chunks that failed verification. A scatter waits for saves that still read its blocks.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloft import _core
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.plan import LoadPlan, LoadResult
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.jobs import Job, Load, Mark, WaitingLoad
from kvloft.transfer.cuda.lanes import Lane
from kvloft.transfer.cuda.pieces import Piece
from kvloft.transfer.cuda.shared import Direction, Shared

logger = logging.getLogger(__name__)


class Loads(Direction[WaitingLoad]):
    """Copies chunks to the GPU and verifies and scatters them, in order of arrival."""

    def __init__(
        self,
        shared: Shared,
        lane: Lane,
        ramp_sizes: tuple[int, ...],
        *,
        order_after_saves: Callable[[driver.Stream, npt.NDArray[np.integer[Any]]], None],
    ) -> None:
        super().__init__(shared, lane, ramp_sizes)
        self._order_after_saves = order_after_saves
        self._num_since_idle = 0
        self._open: dict[Load, None] = {}
        self._before: Mark | None = None
        """Mark after all work launched before this step, or None in steps without loads."""

    def begin_step(self, *, has_loads: bool) -> None:
        self._before = None
        if has_loads:
            self._mark_before()

    def submit(self, plans: Sequence[LoadPlan]) -> None:
        """Queue loads. Loads with no chunks are reported immediately."""
        after = self._mark_before()
        self._before = None  # a later step whose `begin_step` fails must not use this mark
        for plan in plans:
            self._shared.done.bad_blocks.update(plan.lost)
            load = Load(plan, len(plan.chunks))
            self._open[load] = None
            if after is None:
                self._report(load, everything_bad=True)
            elif not plan.chunks:
                self._report(load)
            else:
                for kind, chunks in self._shared.by_kind([plan]):
                    if (problem := self._shared.problem_of(kind, chunks)) is not None:
                        self._finish_load(load, chunks, dict.fromkeys(range(len(chunks)), problem))
                    else:
                        self.waiting.append(WaitingLoad(load, kind, chunks, after))

    def _submit_queued(self) -> None:
        started: list[Job] = []
        while self._has_capacity() and (following := self._first_queued()) is not None:
            job, piece = following
            self.queued.popleft()
            self._order_after_saves(self.lane.next_kernel_stream(job.kind), piece.block_ids)
            self._submit_piece(job, piece)
            if piece is job.pieces[0]:
                started.append(job)
        for job in started:
            # Reading trailers is slow, so overlap the reads with the transfers.
            job.wanted_tags, job.problems = self._shared.trailers_of(job).read(
                job.table.frames, job.table.keys, job.table.num_blocks
            )

    def stop(self) -> None:
        super().stop()
        for load in list(self._open):
            self._report(load, everything_bad=True)

    def _mark_before(self) -> Mark | None:
        """Return the mark after which this step's loads start, or None after a CUDA error."""
        if self._before is None and self._shared.broken is None:
            with self._shared.guarded():
                self._before = self._shared.mark()
        return self._before if self._shared.broken is None else None

    def _prepare(self) -> Job:
        return self._shared.new_job(*self._take())

    def _take(self) -> tuple[int, ChunkBatch, Mark | None, list[tuple[Load, int]]]:
        """Take chunks from one or more loads for the next job.

        Returns the kind, the chunks, the mark, and each load with its number of chunks.
        """
        queue, per_job = self.waiting, self._shared.chunks_per_load
        capacity, after, kind = per_job, queue[0].after, queue[0].kind
        chunks: list[ChunkBatch] = []
        owners: list[tuple[Load, int]] = []
        nth = self._num_since_idle = self._num_since_idle + 1 if self.in_flight else 0
        if (
            nth < len(self._ramp_sizes)
            and sum(each.num_left for each in queue if each.after is after) > capacity
        ):
            capacity = self._ramp_sizes[nth]
        while queue and queue[0].after is after and queue[0].kind == kind and capacity:
            first = queue[0]
            chunks.append(first.take(capacity, per_piece=per_job, is_last=len(queue) == 1))
            owners.append((first.load, len(chunks[-1])))
            capacity = 0 if first.num_left else capacity - len(chunks[-1])
            if not first.num_left:
                queue.popleft()
        taken = chunks[0] if len(chunks) == 1 else _core.ChunkBatch.concat(chunks)
        return kind, taken, after, owners

    def _on_done(self, job: Job, piece: Piece, seconds: float) -> None:
        self._shared.done.seconds_loading += seconds
        self._shared.done.num_bytes_loaded += piece.num_bytes
        if piece is job.pieces[-1]:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        for chunk in np.flatnonzero(job.tags != job.wanted_tags).tolist():
            job.problems.setdefault(chunk, "tag")
        begin = 0
        for load, count in job.owners:
            problems = {
                i - begin: problem
                for i, problem in job.problems.items()
                if begin <= i < begin + count
            }
            self._finish_load(load, job.chunks[begin : begin + count], problems)
            begin += count

    def _finish_load(self, load: Load, chunks: ChunkBatch, problems: dict[int, str]) -> None:
        """Record the results of ``chunks``, and report the load once none are missing."""
        for i, problem in problems.items():
            load.bad.append((chunks[i].key, problem))
            self._shared.done.bad_blocks.update(chunks[i].blocks)
        load.num_missing -= len(chunks)
        if not load.num_missing:
            self._report(load)

    def _report(self, load: Load, *, everything_bad: bool = False) -> None:
        done = self._shared.done
        if load.bad:
            logger.warning(
                "kvloft: %d of a request's chunks could not be loaded and %s (%s)",
                len(load.bad),
                "was treated as a miss" if len(load.bad) == 1 else "were treated as misses",
                load.bad[0][1],
            )
        if everything_bad:
            done.bad_blocks.update(load.plan.blocks())
        done.loads.append(
            LoadResult(load.plan.req_id, load.plan.load_id, tuple(load.bad), failed=everything_bad)
        )
        del self._open[load]
