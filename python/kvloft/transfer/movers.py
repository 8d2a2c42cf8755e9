"""Selects the mover: torch for KV on the CPU, kernels for KV on a GPU.

CUDA packages are imported only if the KV is on a GPU.
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
"""Creates a mover. Both arguments have one entry per KV cache group."""


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """Mover settings (see `kvloft.config.table`) and engine properties."""

    gpu_copies: Literal["kernels", "torch"] = "kernels"
    staging_bytes: int = 80 << 20
    gathers_first: bool = False
    """True if the engine writes to new blocks before passing them to `begin_step`."""
    encodes: bool = False
    """True if parts are encoded when the layout and the device support it."""


def choose_mover(
    layouts: Sequence[PagedLayout], blocks_per_chunk: Sequence[int], settings: MoverSettings
) -> Callable[[Sequence[GroupFrames]], Mover]:
    """Return a function that creates the mover. ``layouts`` has one entry per KV cache group.

    ``blocks_per_chunk`` lists the number of blocks per frame for each group. Raises
    UnsupportedError if the device is unsupported or the kernels are unavailable.
    """
    device = next(layout.planes[0].storage.device for layout in layouts if layout.planes)
    if device.type == "cpu":
        return partial(CpuMover, layouts)
    if device.type != "cuda":
        raise UnsupportedError(
            f"kvloft supports KV on CPUs and CUDA GPUs only, not on {device.type!r} devices; run "
            "this engine without kvloft"
        )
    if settings.gpu_copies == "torch":
        logger.warning(
            "kvloft: gpu_copies=torch is slow: it copies pages one at a time, and each step waits "
            "for all copies"
        )
        return partial(CpuMover, layouts)
    from kvloft.transfer.cuda.mover import prepare

    try:
        return prepare(layouts, blocks_per_chunk, settings)
    except (UnsupportedError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f'{error}. To fall back to slow copies, set gpu_copies="torch"'
        ) from error
