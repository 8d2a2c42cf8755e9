"""From a layout on a GPU to a mover for it, in two steps: kernels at engine start, rings and pinning when the arena is known.

So an engine whose kernels cannot be had does not start, instead of running slowly. It must not know engines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from kvloft.transfer.cuda.compile import default_cache_dir
from kvloft.transfer.cuda.frame_memory import FrameMemory
from kvloft.transfer.cuda.kernels import Kernels
from kvloft.transfer.cuda.lanes import Tuning
from kvloft.transfer.cuda.mover import CudaMover
from kvloft.transfer.cuda.staging import RingSize
from kvloft.transfer.frames import FrameWindow
from kvloft.transfer.layout import PagedLayout

logger = logging.getLogger(__name__)


def prepare(
    layout: PagedLayout, *, blocks_per_chunk: int, staging_bytes: int, gathers_first: bool = False, cache_dir: Path | None = None
) -> Callable[[PagedLayout, FrameWindow], CudaMover]:
    """Compile for ``layout``; what is returned makes the mover. Raises UnsupportedError or CudaError."""
    device = layout.planes[0].storage.device
    with torch.cuda.device(device):
        kernels = Kernels(layout, device, (cache_dir or default_cache_dir()) / "kernels")
    tuning = Tuning(RingSize.of(staging_bytes), max(1, kernels.num_sms // 2))
    logger.info(
        "kvloft: kernels of %d-byte accesses for %d planes, %d KiB a block, on %s; %d x %d MiB of staging each way",
        kernels.vec_bytes, kernels.num_planes, layout.block_bytes >> 10, torch.cuda.get_device_name(device),
        tuning.ring.num_slots, tuning.ring.slot_bytes >> 20,
    )  # fmt: skip

    def make(same_layout: PagedLayout, window: FrameWindow) -> CudaMover:
        memory = FrameMemory(
            window.address, window.num_frames, window.frame_bytes, window.part_offset, window.part_bytes, window.rank, window,
            window.is_shared,
        )  # fmt: skip
        with torch.cuda.device(device):
            return CudaMover(
                same_layout, memory, kernels, blocks_per_chunk=blocks_per_chunk, tuning=tuning,
                gathers_first=gathers_first,
            )  # fmt: skip

    return make
