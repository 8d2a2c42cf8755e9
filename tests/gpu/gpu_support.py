"""Helpers for the GPU tests: paged KV in many layouts, frames in ordinary memory, movers between
the two, and the torch reference.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from batches import batch_of

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda.kernels import Kernels
from kvloft.transfer.cuda.lanes import Tuning
from kvloft.transfer.cuda.mover import CudaMover
from kvloft.transfer.cuda.trailers import TRAILER
from kvloft.transfer.frames import FrameMemory
from kvloft.transfer.layout import PagedLayout, Plane
from kvloft.transfer.mover import Finished

POISON = 0xA5
DEVICE = "cuda"
"""The device of paged KV. emulated_gpu.py replaces DEVICE and `make_kernels`."""


def make_kernels(layout: PagedLayout, *, encodes: bool = False) -> Kernels:
    return Kernels(layout, torch.device("cuda", torch.cuda.current_device()), encodes=encodes)


@dataclass
class Paged:
    """Paged KV: byte buffers, and planes that refer to them."""

    buffers: list[torch.Tensor]
    planes: list[tuple[int, int, int, int]]
    """The planes, each as (index of the buffer, offset, block_stride, page_bytes)."""
    num_blocks: int
    digest: bytes = bytes(range(32))
    are_bf16: Sequence[bool] = ()
    """True for each plane that contains bfloat16. Empty if no plane contains bfloat16."""

    def layout(self) -> PagedLayout:
        kinds = self.are_bf16 or [False] * len(self.planes)
        planes = tuple(
            Plane(self.buffers[i].untyped_storage(), offset, stride, size, self.num_blocks, is_bf16)
            for (i, offset, stride, size), is_bf16 in zip(self.planes, kinds, strict=True)
        )
        return PagedLayout(planes, self.num_blocks, self.digest)

    def randomize(self, seed: int = 0) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        for buffer in self.buffers:
            buffer.random_(0, 256, generator=generator)

    def poison(self) -> None:
        for buffer in self.buffers:
            buffer.fill_(POISON)

    def snapshot(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.buffers]

    def payload(
        self, blocks: Sequence[int], buffers: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the payload of ``blocks``, gathered page by page as a reference."""
        buffers = buffers or self.buffers
        pages = [
            buffers[i][o + b * s : o + b * s + n] for b in blocks for i, o, s, n in self.planes
        ]
        return torch.cat(pages) if pages else buffers[0][:0]

    def place(
        self, buffers: list[torch.Tensor], payload: torch.Tensor, blocks: Sequence[int]
    ) -> None:
        """Write ``payload`` to ``blocks`` of ``buffers`` page by page, as a reference."""
        at = 0
        for b in blocks:
            for i, o, s, n in self.planes:
                buffers[i][o + b * s : o + b * s + n] = payload[at : at + n]
                at += n

    @property
    def block_bytes(self) -> int:
        return sum(plane[3] for plane in self.planes)


def per_layer(num_layers: int, num_blocks: int, page: int, offset: int = 0, gap: int = 0) -> Paged:
    """Return one buffer per layer, with the first page at ``offset`` and ``gap`` bytes between
    pages.
    """
    stride = page + gap
    buffers = [
        torch.empty(offset + num_blocks * stride, dtype=torch.uint8, device=DEVICE)
        for _ in range(num_layers)
    ]
    return Paged(buffers, [(i, offset, stride, page) for i in range(num_layers)], num_blocks)


def one_buffer(num_layers: int, num_blocks: int, page: int) -> Paged:
    """Return all layers in one buffer, with the layer as the outermost dimension."""
    buffer = torch.empty(num_layers * num_blocks * page, dtype=torch.uint8, device=DEVICE)
    return Paged(
        [buffer], [(0, i * num_blocks * page, page, page) for i in range(num_layers)], num_blocks
    )


def block_outermost(num_layers: int, num_blocks: int, page: int) -> Paged:
    """Return one buffer in which all layers of a block are adjacent."""
    buffer = torch.empty(num_blocks * num_layers * page, dtype=torch.uint8, device=DEVICE)
    return Paged(
        [buffer], [(0, i * page, num_layers * page, page) for i in range(num_layers)], num_blocks
    )


def mixed(num_blocks: int, pages: Sequence[int]) -> Paged:
    """Return layers with different page sizes, as in MLA with an indexer."""
    buffers = [torch.empty(num_blocks * page, dtype=torch.uint8, device=DEVICE) for page in pages]
    return Paged(buffers, [(i, 0, page, page) for i, page in enumerate(pages)], num_blocks)


def turned(paged: Paged) -> Paged:
    """Return the pages of two layers in an order that a state-space layer can use: the second
    layer's pages, split in two, and then the first layer's pages.
    """
    first, (buffer, offset, stride, size) = paged.planes
    cut = size // 3
    planes = [(buffer, offset, stride, cut), (buffer, offset + cut, stride, size - cut), first]
    return Paged(paged.buffers, planes, paged.num_blocks, digest=bytes(32))


class Frames:
    """Frames in anonymous memory, filled with poison."""

    def __init__(self, num_frames: int, part_bytes: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._map = mmap.mmap(-1, num_frames * part_bytes * num_ranks)
        self.raw = np.frombuffer(self._map, np.uint8).reshape(num_frames, num_ranks, part_bytes)
        self.parts = self.raw[:, rank]
        self.raw[:] = POISON
        self.memory = FrameMemory(
            self.raw.ctypes.data,
            self.raw.nbytes,
            part_bytes * num_ranks,
            part_bytes * num_ranks,
            rank * part_bytes,
            part_bytes,
            rank,
            self._map,
            is_shared=num_ranks > 1,
        )


def trailers_of(memory: FrameMemory) -> np.ndarray:
    """Return the trailers of dense frames as a `TRAILER` array of shape [num_frames]."""
    assert memory.is_dense
    raw = (ctypes.c_uint8 * memory.size_bytes).from_address(memory.address)
    offset = memory.part_offset + memory.part_bytes - TRAILER.itemsize
    return np.ndarray((memory.num_frames,), TRAILER, raw, offset, (memory.frame_bytes,))


def part_bytes_for(payload: int) -> int:
    return -(-(payload + 128) // 4096) * 4096


def make_mover(
    paged: Paged,
    frames: Frames,
    blocks_per_chunk: int | Sequence[int],
    *,
    gathers_first: bool = False,
    ring: tuple[int, int] = (2, 1 << 20),
    num_ctas: int = 66,
    others: Sequence[Paged] = (),
    kind_of: Sequence[int] = (0,),
    encodes: bool = False,
) -> CudaMover:
    """Return a mover whose host memory is registered.

    ``blocks_per_chunk`` is one value for all kinds or one value per kind. ``ring`` is the number of
    staging slots and the size of a slot in bytes. ``others`` contains other kinds of pages, and
    ``kind_of`` maps each group to its kind.
    """
    layouts = [each.layout() for each in (paged, *others)]
    mover = CudaMover(
        [(layout, make_kernels(layout, encodes=encodes)) for layout in layouts],
        [frames.memory] * len(layouts),
        blocks_per_chunk=[blocks_per_chunk] * len(layouts)
        if isinstance(blocks_per_chunk, int)
        else blocks_per_chunk,
        tuning=Tuning(*ring, num_ctas),
        kind_of={(group, 0): kind for group, kind in enumerate(kind_of)},
        gathers_first=gathers_first,
    )
    mover.wait_registered()
    return mover


def key_of(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def copies_of(
    frames: Sequence[int], blocks: Sequence[Sequence[int]], first_key: int = 1
) -> tuple[ChunkCopy, ...]:
    return tuple(
        ChunkCopy(
            frame,
            key_of(first_key + i),
            len(ids),
            0,
            tuple(map(BlockId, ids)),
            Ticket(first_key + i),
        )
        for i, (frame, ids) in enumerate(zip(frames, blocks, strict=True))
    )


def save(mover: CudaMover, copies: Sequence[ChunkCopy]) -> Finished:
    mover.begin_step(())
    mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
    return mover.drain()


def load(mover: CudaMover, copies: Sequence[ChunkCopy]) -> Finished:
    mover.begin_step(())
    mover.submit_loads([LoadPlan(ReqId("r"), 1, batch_of(copies))])
    return mover.drain()
