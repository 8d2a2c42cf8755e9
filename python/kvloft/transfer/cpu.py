"""The CPU mover: plain torch copies, done when submitted. Also the reference that CUDA kernels are tested against.

It must not know engines. A failed copy is a failed ticket or a failed load, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.frames import FrameWindow, PrivatePart
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished


class CpuMover:
    """Gathers into and scatters out of frames with torch on the calling thread."""

    usable_frames = None

    def __init__(self, layout: PagedLayout, frames: FrameWindow) -> None:
        self._layout = layout
        self._part = PrivatePart(frames)
        self._planes = [
            torch.empty(0, dtype=torch.uint8, device=plane.storage.device).set_(
                plane.storage, plane.offset, (plane.num_blocks, plane.page_bytes), (plane.block_stride, 1)
            )
            for plane in layout.planes
        ]
        """[num_blocks, page_bytes] each."""
        self._done = Finished()

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """Copies are done when submitted: nothing is ever in flight."""

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        begin = time.perf_counter()
        for plan in plans:
            for copy in plan.chunks:
                try:
                    self._gather(copy)
                except (RuntimeError, ValueError, IndexError):
                    self._done.failed.append(copy.ticket)
                else:
                    self._done.saved.append(copy.ticket)
                    self._done.num_bytes_saved += copy.num_blocks * self._layout.block_bytes
        self._done.seconds_saving += time.perf_counter() - begin

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        begin = time.perf_counter()
        for plan in plans:
            bad: list[tuple[ChunkKey, str]] = []
            self._done.bad_blocks.update(plan.lost)
            for copy in plan.chunks:
                try:
                    problem = self._part.fetch(copy, self._layout.digest, self._layout.page_bytes)
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
        self._done.seconds_loading += time.perf_counter() - begin

    def poll(self) -> Finished:
        done, self._done = self._done, Finished()
        return done

    def drain(self) -> Finished:
        return self.poll()

    def close(self) -> None:
        """Nothing was taken."""

    def _gather(self, copy: ChunkCopy) -> None:
        for saved, page in self._pages(copy, first=0):
            saved.copy_(page)
        self._part.store(copy, self._layout.digest, self._layout.page_bytes)

    def _scatter(self, copy: ChunkCopy) -> None:
        for saved, page in self._pages(copy, first=copy.first_block):
            page.copy_(saved)

    def _pages(self, copy: ChunkCopy, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each page of the copy's blocks, the first of which is number ``first`` of its chunk: in the part, and in paged KV."""
        block_bytes = self._layout.block_bytes
        payload = self._part.bytes[first * block_bytes : (first + len(copy.blocks)) * block_bytes]
        saved = payload.split(list(self._layout.page_bytes * len(copy.blocks)))
        return zip(saved, (plane[block] for block in copy.blocks for plane in self._planes), strict=True)
