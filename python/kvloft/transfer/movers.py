"""Which mover serves a layout: torch on the CPU, kernels on a GPU, and never a slow one in silence.

It must not know engines. CUDA packages are imported only where the KV is on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvloft.errors import UnsupportedError
from kvloft.transfer.cpu import CpuMover
from kvloft.transfer.frames import FrameWindow
from kvloft.transfer.groups import GroupedMover
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Mover

logger = logging.getLogger(__name__)

MakeMover = Callable[[PagedLayout, FrameWindow], Mover]
"""Of one layout."""


@dataclass(frozen=True, slots=True)
class MoverSettings:
    """What a user may say about copies (see `kvloft.config`), and what the engine does with blocks."""

    gpu_copies: Literal["kernels", "torch"] = "kernels"
    staging_bytes: int = 80 << 20
    gathers_first: bool = False
    """The engine writes new blocks before it says which they are: it zeroes them."""
    encodes: bool = False
    """Parts of frames are encoded where the pages allow it."""


def for_each(make: MakeMover, layouts: Sequence[PagedLayout], *, is_grouped: bool = False) -> Callable[[FrameWindow], Mover]:
    """One mover a layout, each of a KV cache group, used as one. ``is_grouped``: plans carry `GroupBatches`."""

    def make_all(window: FrameWindow) -> Mover:
        movers = [make(layout, window) for layout in layouts]
        return GroupedMover(movers) if is_grouped else movers[0]

    return make_all


def choose_mover(
    layouts: Sequence[PagedLayout], blocks_per_chunk: Sequence[int], settings: MoverSettings, *, is_grouped: bool = False
) -> Callable[[FrameWindow], Mover]:
    """``blocks_per_chunk``: that a frame holds, of each layout.

    Raises UnsupportedError if the KV is on a GPU whose kernels cannot be had, unless settings allow torch's copies.
    """
    device = next(layout.planes[0].storage.device for layout in layouts if layout.planes)
    if device.type == "cpu":
        return for_each(CpuMover, layouts, is_grouped=is_grouped)
    if device.type != "cuda":
        raise UnsupportedError(
            f"kvloft serves KV on CPUs and CUDA GPUs, and this engine's is on {device.type!r}; run it without kvloft"
        )
    if settings.gpu_copies == "torch":
        logger.warning("kvloft: gpu_copies=torch: KV is copied page by page and each step waits for it; this is slow")
        return for_each(CpuMover, layouts, is_grouped=is_grouped)
    from kvloft.transfer.cuda.mover import prepare

    try:
        return prepare(
            layouts, blocks_per_chunk=blocks_per_chunk, staging_bytes=settings.staging_bytes, gathers_first=settings.gathers_first,
            encodes=settings.encodes,
        )  # fmt: skip
    except (UnsupportedError, RuntimeError, ValueError) as error:
        raise UnsupportedError(f'{error}. To run with slow copies instead, set gpu_copies="torch"') from error
