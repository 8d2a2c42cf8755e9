"""Tests an arena with compact frames for compressed chunks and large frames for raw chunks.

`test_emulated_compact.py` runs the same tests on the emulated GPU.
"""

import mmap

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

import gpu_support
import torch
from gpu_support import Paged, copies_of, load, save
from test_gpu_e348 import bf16, fill, tiles_of

from kvloft.transfer.cuda.lanes import Tuning
from kvloft.transfer.cuda.mover import CudaMover
from kvloft.transfer.cuda.trailers import TrailerColumn
from kvloft.transfer.frames import RAW, FrameMemory, compact_bytes_for, part_bytes_for

NUM_BLOCKS = 3
COMPACT, LARGE = 0, 1
"""Indices of the size classes."""
FIRST_LARGE = 1 << 28


class TwoSizes:
    """A mover for an arena with a slab of compact frames and a slab of large frames."""

    def __init__(self, paged: Paged, *, encodes: bool = True) -> None:
        payload, num_tiles = paged.block_bytes * NUM_BLOCKS, len(tiles_of(paged, NUM_BLOCKS))
        sizes = (
            compact_bytes_for(payload, payload, num_tiles),
            part_bytes_for(payload, num_tiles),
        )
        assert 0 < sizes[COMPACT] < sizes[LARGE]
        slab_bytes = 12 * sizes[LARGE] + 4096
        self._map = mmap.mmap(-1, 2 * slab_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.memory = [
            FrameMemory(
                self.bytes.ctypes.data, 2 * slab_bytes, slab_bytes, size, 0, size, 0, self._map
            )
            for size in sizes
        ]
        kernels = gpu_support.make_kernels(paged.layout(), encodes=encodes)
        self.mover = CudaMover(
            [(paged.layout(), kernels)] * 2,
            self.memory,
            blocks_per_chunk=[NUM_BLOCKS] * 2,
            tuning=Tuning(2, 300 << 10, 66),
            kind_of={(0, COMPACT): 0, (0, LARGE): 1},
        )
        self.mover.wait_registered()
        self.first_large = FIRST_LARGE + self.memory[LARGE].per_slab


def blocks_of(chunk: int) -> list[int]:
    return [NUM_BLOCKS * chunk + i for i in range(NUM_BLOCKS)]


def make_noise(paged: Paged, blocks: list[int]) -> None:
    for buffer in paged.buffers:
        pages = buffer.view(paged.num_blocks, -1)
        noise = torch.randint(0, 256, (len(blocks), pages.shape[1]), dtype=torch.uint8)
        pages[blocks] = noise.to(pages.device)


def test_chunks_of_both_sizes_are_loaded_together() -> None:
    paged = bf16("pages_of_4k")
    rig = TwoSizes(paged)
    fill(paged, "gaussian")
    noisy = [1, 4]
    for chunk in noisy:
        make_noise(paged, blocks_of(chunk))
    frames = [rig.first_large + i if i in noisy else i for i in range(6)]
    copies = copies_of(frames, [blocks_of(chunk) for chunk in range(6)])
    done = save(rig.mover, copies)
    assert sorted(done.saved) == [copy.ticket for copy in copies] and not done.misfits
    before = [buffer.clone() for buffer in paged.buffers]
    for buffer in paged.buffers:
        buffer.zero_()
    done = load(rig.mover, copies)
    assert not done.bad_blocks and [result.bad_keys for result in done.loads] == [()]
    for buffer, old in zip(paged.buffers, before, strict=True):
        now, then = (each.view(paged.num_blocks, -1)[:18] for each in (buffer, old))
        assert torch.equal(now, then)
    rig.mover.close()


def test_a_chunk_that_does_not_compress_is_a_misfit_and_fits_a_large_frame() -> None:
    paged = bf16("pages_of_4k")
    rig = TwoSizes(paged)
    fill(paged, "gaussian")
    make_noise(paged, blocks_of(1))
    copies = copies_of([0, 1, 2], [blocks_of(chunk) for chunk in range(3)])
    done = save(rig.mover, copies)
    assert done.misfits == done.failed == [copies[1].ticket]
    end = rig.memory[COMPACT].start(3)
    assert not rig.bytes[end:].any(), "bytes after the frames were overwritten"
    (large,) = copies_of([rig.first_large], [blocks_of(1)], first_key=9)
    assert save(rig.mover, [large]).saved == [large.ticket]
    done = load(rig.mover, [*copies, large])
    assert done.bad_blocks == set(copies[1].blocks)
    rig.mover.close()


def test_a_raw_trailer_in_a_compact_frame_is_a_miss() -> None:
    """A raw payload would extend beyond the frame and, in the last frame, beyond the arena."""
    paged = bf16("pages_of_4k")
    rig = TwoSizes(paged)
    fill(paged, "gaussian")
    last = rig.memory[COMPACT].num_frames - 1
    copies = copies_of([0, last], [blocks_of(0), blocks_of(1)])
    assert len(save(rig.mover, copies).saved) == 2
    column = TrailerColumn(rig.memory[COMPACT])
    rows = column.pages[column.at([last])]
    rows["encoding"], rows["encoded_bytes"] = RAW, rows["payload_bytes"]
    column.pages[column.at([last])] = rows
    done = load(rig.mover, copies)
    assert done.loads[0].bad_keys == ((copies[1].key, "shape"),)
    rig.mover.close()


def test_without_kernels_that_compress_every_chunk_is_a_misfit() -> None:
    paged = bf16("pages_of_4k")
    rig = TwoSizes(paged, encodes=False)
    fill(paged, "gaussian")
    copies = copies_of([0, rig.first_large], [blocks_of(0), blocks_of(1)])
    done = save(rig.mover, copies)
    assert (done.misfits, done.failed, done.saved) == ([1], [1], [2])
    done = load(rig.mover, copies)
    assert done.bad_blocks == set(copies[0].blocks)
    assert done.loads[0].bad_keys == ((copies[0].key, "layout"),), (
        "the chunk must be kept for engines with a different layout"
    )
    rig.mover.close()
