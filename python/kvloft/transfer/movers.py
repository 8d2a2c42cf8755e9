"""Chooses the mover: torch for KV on the CPU, kernels for KV on a GPU.

CUDA packages are only imported if the KV is on a GPU.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvloft.errors import UnsupportedError
from kvloft.transfer.cpu import CpuMover
from kvloft.transfer.frames import GroupFrames
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Mover

logger = logging.getLogger(__name__)

MakeMover = Callable[[Sequence[PagedLayout], Sequence[GroupFrames]], Mover]
"""Creates a mover from one layout and one set of frames per KV cache group."""


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """Settings of the mover (see `kvloft.config.table`) and properties of the engine."""

    gpu_copies: Literal["kernels", "torch"] = "kernels"
    staging_bytes: int = 80 << 20
    gathers_first: bool = False
    """True if the engine zeroes new blocks before it passes them to `begin_step`."""
    encodes: bool = False
    """True if parts are encoded where layout and device support it."""


def choose_mover(
    layouts: Sequence[PagedLayout], blocks_per_chunk: Sequence[int], settings: MoverSettings
) -> Callable[[Sequence[GroupFrames]], Mover]:
    """Return a function that creates the mover for ``layouts``, one per KV cache group.

    ``blocks_per_chunk`` has the number of blocks in a frame of each group. Raises UnsupportedError
    if the KV is on a GPU and the kernels are unavailable. With ``gpu_copies="torch"``, kernels are
    not required.
    """
    device = next(layout.planes[0].storage.device for layout in layouts if layout.planes)
    if device.type == "cpu":
        return partial(CpuMover, layouts)
    if device.type != "cuda":
        raise UnsupportedError(
            f"kvloft does not support KV on {device.type!r} devices, only on CPUs and CUDA GPUs; "
            "run this engine without kvloft"
        )
    if settings.gpu_copies == "torch":
        logger.warning(
            "kvloft: copies are slow with gpu_copies=torch: they copy single pages, and each step "
            "waits for them"
        )
        return partial(CpuMover, layouts)
    from kvloft.transfer.cuda.mover import prepare

    try:
        return prepare(layouts, blocks_per_chunk, settings)
    except (UnsupportedError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f'{error}. To run with slow copies instead, set gpu_copies="torch"'
        ) from error
