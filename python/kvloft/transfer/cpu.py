"""The CPU mover: plain torch copies, done when submitted. Also the reference that CUDA kernels are tested against.

It must not know engines. A failed copy is a failed ticket or a failed load, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.frames import FrameWindow
from kvloft.transfer.layout import PagedLayout, Plane
from kvloft.transfer.mover import Finished

_Run = tuple[torch.Tensor, int, int]
"""(view [planes, blocks, page_bytes] of equally spaced planes, byte offset of the first in a block, bytes of all)."""


class CpuMover:
    """Gathers into and scatters out of frames with torch on the calling thread."""

    usable_frames = None

    def __init__(self, layout: PagedLayout, frames: FrameWindow, clock: Callable[[], float] = time.perf_counter) -> None:
        self._layout = layout
        self._frames = frames
        self._clock = clock
        self._runs = _plane_runs(layout.planes)
        self._done = Finished()

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """Copies are done when submitted: nothing is ever in flight."""

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        begin = self._clock()
        for plan in plans:
            for copy in plan.chunks:
                try:
                    self._gather(copy)
                except (RuntimeError, ValueError, IndexError):
                    self._done.failed.append(copy.ticket)
                else:
                    self._done.saved.append(copy.ticket)
                    self._done.num_bytes_saved += copy.num_blocks * self._layout.block_bytes
        self._done.seconds_saving += self._clock() - begin

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        begin = self._clock()
        for plan in plans:
            bad: list[tuple[ChunkKey, str]] = []
            self._done.bad_blocks.update(plan.lost)
            for copy in plan.chunks:
                try:
                    problem = self._frames.check(copy, self._layout.digest, self._layout.page_bytes)
                    if problem is None:
                        self._scatter(copy)
                except (RuntimeError, ValueError, IndexError) as error:
                    problem = f"copy: {error}"
                if problem is None:
                    self._done.num_bytes_loaded += len(copy.blocks) * self._layout.block_bytes
                else:
                    bad.append((copy.key, problem))
                    self._done.bad_blocks.update(copy.blocks)
            self._done.loads.append(LoadResult(plan.req_id, plan.load_id, tuple(bad)))
        self._done.seconds_loading += self._clock() - begin

    def poll(self) -> Finished:
        done, self._done = self._done, Finished()
        return done

    def drain(self) -> Finished:
        return self.poll()

    def close(self) -> None:
        """Nothing was taken."""

    def _gather(self, copy: ChunkCopy) -> None:
        for rows, run, block in self._pairs(copy, first=0):
            rows.copy_(run[:, block])
        self._frames.seal(copy, self._layout.digest, self._layout.page_bytes)

    def _scatter(self, copy: ChunkCopy) -> None:
        for rows, run, block in self._pairs(copy, first=copy.first_block):
            run[:, block].copy_(rows)

    def _pairs(self, copy: ChunkCopy, first: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """(pages in the frame, planes of paged KV, block id) for each run of planes of each block."""
        block_bytes = self._layout.block_bytes
        payload = self._frames.payload(copy.frame, (first + len(copy.blocks)) * block_bytes)
        pairs: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        for i, block in enumerate(copy.blocks, start=first):
            for run, offset, num_bytes in self._runs:
                rows = payload[i * block_bytes + offset : i * block_bytes + offset + num_bytes]
                pairs.append((rows.view(run.shape[0], run.shape[2]), run, int(block)))
        return pairs


def _plane_runs(planes: Sequence[Plane]) -> list[_Run]:
    """Group neighbouring planes of equal size and spacing, so that one torch copy moves a block of all of them."""
    runs: list[_Run] = []
    begin, offset = 0, 0
    while begin < len(planes):
        end = begin + 1
        step = planes[end].offset - planes[begin].offset if end < len(planes) else 0
        while end < len(planes) and step > 0 and _continues(planes[begin], planes[end], (end - begin) * step):
            end += 1
        head, count = planes[begin], end - begin
        flat = torch.empty(0, dtype=torch.uint8, device=head.storage.device)
        view = flat.set_(head.storage, head.offset, (count, head.num_blocks, head.page_bytes), (max(step, 1), head.block_stride, 1))
        runs.append((view, offset, count * head.page_bytes))
        offset += count * head.page_bytes
        begin = end
    return runs


def _continues(head: Plane, plane: Plane, distance: int) -> bool:
    return (
        plane.storage.data_ptr() == head.storage.data_ptr()
        and plane.offset - head.offset == distance
        and (plane.block_stride, plane.page_bytes) == (head.block_stride, head.page_bytes)
    )
