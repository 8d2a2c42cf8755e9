"""Chooses the mover of a layout: torch on the CPU, kernels on a GPU. A slow mover on a GPU is
logged.

Imports CUDA packages only if the KV is on a GPU. Must not depend on engines.
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
"""Makes a mover for one layout and the frames of each KV cache group."""


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """Settings of copies (see `kvloft.config.table`), and properties of the engine."""

    gpu_copies: Literal["kernels", "torch"] = "kernels"
    staging_bytes: int = 80 << 20
    gathers_first: bool = False
    """True if the engine zeroes new blocks before it announces them."""
    encodes: bool = False
    """Encode parts of frames if their pages allow it."""


def choose_mover(
    layouts: Sequence[PagedLayout], blocks_per_chunk: Sequence[int], settings: MoverSettings
) -> Callable[[Sequence[GroupFrames]], Mover]:
    """Return the function that makes the mover for ``layouts``, one per KV cache group.

    ``blocks_per_chunk``: the number of blocks in a frame, for each group. Raises UnsupportedError
    if the KV is on a GPU and the kernels are not available, unless the settings allow torch's
    copies.
    """
    device = next(layout.planes[0].storage.device for layout in layouts if layout.planes)
    if device.type == "cpu":
        return partial(CpuMover, layouts)
    if device.type != "cuda":
        raise UnsupportedError(
            f"kvloft serves KV on CPUs and CUDA GPUs, and this engine's is on {device.type!r}; run "
            "it without kvloft"
        )
    if settings.gpu_copies == "torch":
        logger.warning(
            "kvloft: gpu_copies=torch: KV is copied page by page and each step waits for it; this "
            "is slow"
        )
        return partial(CpuMover, layouts)
    from kvloft.transfer.cuda.mover import prepare

    try:
        return prepare(layouts, blocks_per_chunk, settings)
    except (UnsupportedError, RuntimeError, ValueError) as error:
        raise UnsupportedError(
            f'{error}. To run with slow copies instead, set gpu_copies="torch"'
        ) from error
