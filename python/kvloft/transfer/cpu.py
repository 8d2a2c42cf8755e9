"""The CPU mover copies synchronously. Tests of the CUDA kernels use this mover as their reference.

A failed copy is reported as a failed ticket or a failed load, never as an exception.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.frames import GroupFrames, PrivatePart
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished


class CpuMover:
    """Gathers pages into frames and scatters frames into pages, on the calling thread."""

    usable_bytes = None

    def __init__(self, layouts: Sequence[PagedLayout], frames: Sequence[GroupFrames]) -> None:
        """Create the mover. ``layouts`` and ``frames`` have one entry per KV cache group.

        This mover does not support compressed chunks.
        """
        windows = [group.raw for group in frames]
        parts = {id(window): PrivatePart(window) for window in windows}
        self._parts = [parts[id(window)] for window in windows]
        self._on_cpu = all(
            plane.storage.device.type == "cpu" for layout in layouts for plane in layout.planes
        )
        self._groups = [
            (layout, [self._as_bytes(plane) for plane in _planes_of(layout)]) for layout in layouts
        ]
        self._done = Finished()

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """Do nothing, because no copy is in flight between calls."""

    def wait_for_saves(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing, because no copy is in flight between calls."""

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        begin = time.perf_counter()
        for group, copy in (each for plan in plans for each in _copies(plan)):
            try:
                self._gather(group, copy)
            except (RuntimeError, ValueError, IndexError):
                self._done.failed.append(copy.ticket)
            else:
                self._done.saved.append(copy.ticket)
                self._done.num_bytes_saved += copy.num_blocks * self._groups[group][0].block_bytes
        self._done.seconds_saving += time.perf_counter() - begin

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        begin = time.perf_counter()
        for plan in plans:
            bad: list[tuple[ChunkKey, str]] = []
            self._done.bad_blocks.update(plan.lost)
            for group, copy in _copies(plan):
                if (problem := self._load(group, copy)) is not None:
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
        """Do nothing, because no copy is in flight between calls."""

    def _load(self, group: int, copy: ChunkCopy) -> str | None:
        """Verify and scatter one chunk. Return why the load failed, or None if it succeeded."""
        layout, _ = self._groups[group]
        try:
            problem = self._parts[group].fetch(copy, layout.digest, layout.page_bytes)
            if problem is None:
                self._scatter(group, copy)
                self._done.num_bytes_loaded += len(copy.blocks) * layout.block_bytes
        except (RuntimeError, ValueError, IndexError) as error:
            problem = f"copy: {error}"
        return problem

    def _gather(self, group: int, copy: ChunkCopy) -> None:
        for saved, page in self._pages(group, copy, first=0):
            saved[:] = page
        layout, _ = self._groups[group]
        self._parts[group].store(copy, layout.digest, layout.page_bytes)

    def _scatter(self, group: int, copy: ChunkCopy) -> None:
        for saved, page in self._pages(group, copy, first=copy.first_block):
            page[:] = saved

    def _pages(self, group: int, copy: ChunkCopy, first: int) -> Iterator[tuple[Any, Any]]:
        """Yield each page in the private part together with the matching page in paged KV.

        Block ``first`` of the part matches the first block of ``copy``.
        """
        layout, planes = self._groups[group]
        sized = tuple(zip(planes, layout.page_bytes, strict=True))
        part, begin = self._as_bytes(self._parts[group].bytes), first * layout.block_bytes
        for block in copy.blocks:
            for plane, size in sized:
                yield part[begin : begin + size], plane[block]
                begin += size

    def _as_bytes(self, memory: torch.Tensor) -> Any:
        """Return ``memory``, converted to a NumPy array if the KV is on the CPU.

        NumPy slices and copies small pages faster than torch, and never waits for other threads.
        """
        return memory.numpy() if self._on_cpu else memory


def _copies(plan: SavePlan | LoadPlan) -> Iterator[tuple[int, ChunkCopy]]:
    """Yield each chunk of ``plan`` with its KV cache group."""
    groups = plan.chunks.by_group() if plan.chunks else ()
    return ((group, copy) for group, batch in groups for copy in batch)


def _planes_of(layout: PagedLayout) -> list[torch.Tensor]:
    """Return each plane as a uint8 tensor of shape [num_blocks, page_bytes]."""
    return [
        torch.empty(0, dtype=torch.uint8, device=plane.storage.device).set_(
            plane.storage,
            plane.offset,
            (plane.num_blocks, plane.page_bytes),
            (plane.block_stride, 1),
        )
        for plane in layout.planes
    ]
