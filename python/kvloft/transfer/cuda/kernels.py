"""Launch parameters of the kernels in csrc: ctypes mirrors of kv_layout.cuh, and the tile table.

Both sides assert the sizes. Must not depend on the order of streams, frames or plans.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvloft.errors import UnsupportedError
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.compile import CHUNKS, E348, VEC_BYTES, compile_kernels
from kvloft.transfer.frames import TILE_BYTES
from kvloft.transfer.layout import PagedLayout

CTA_THREADS: Final = 512
WARPS_PER_CTA: Final = CTA_THREADS // 32
MAX_SEGMENTS: Final = 128
MAX_BLOCKS: Final = 1024

TILE: Final = np.dtype(
    [
        ("base", "<u8"),
        ("block_stride", "<u8"),
        ("payload_offset", "<u4"),
        ("num_bytes", "<u2"),
        ("is_bf16", "<u2"),
        ("plane", "<u4"),
        ("first_word", "<u4"),
    ]
)
SEGMENT: Final = np.dtype(
    [
        ("base", "<u8"),
        ("first_tile", "<u4"),
        ("chunk_tile", "<u4"),
        ("block_index", "<i4"),
        ("reserved", "<u4"),
    ]
)
PART: Final = np.dtype([("address", "<u8"), ("width", "<u4"), ("is_raw", "<u4")])
assert (
    TILE.itemsize == 32 and SEGMENT.itemsize == 24 and PART.itemsize == 16
)  # as kv_layout.cuh asserts


class PieceParams(ctypes.Structure):
    """Parameters of one launch; see kv_layout.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("tiles", "sums", "num_done", "tags_out", "block_bytes", "base")
        ),
        *((name, ctypes.c_uint64) for name in ("num_used", "used_out", "part_room")),
        *(
            (name, ctypes.c_uint32)
            for name in ("tiles_per_block", "num_planes", "num_tiles", "num_segments")
        ),
        ("segments", ctypes.c_uint8 * (SEGMENT.itemsize * MAX_SEGMENTS)),
        ("block_ids", ctypes.c_int32 * MAX_BLOCKS),
        ("parts", ctypes.c_uint8 * (PART.itemsize * MAX_SEGMENTS)),
    )


assert (
    ctypes.sizeof(PieceParams) == 88 + (24 + 16) * MAX_SEGMENTS + 4 * MAX_BLOCKS
)  # as kv_layout.cuh asserts


def vec_bytes_of(layout: PagedLayout) -> int:
    """Return the widest access that all addresses and lengths allow; frames allow any."""
    common = 16
    for plane in layout.planes:
        common = math.gcd(common, plane.base, plane.block_stride, plane.page_bytes)
    return max(vec for vec in VEC_BYTES if common % vec == 0)


def tile_table(layout: PagedLayout) -> npt.NDArray[Any]:
    """Return a block's tiles in payload order. Raises UnsupportedError from 4 GiB on."""
    if layout.block_bytes >= 1 << 32:
        raise UnsupportedError(
            f"a block of {layout.block_bytes} bytes is too large for kvloft's kernels; use a "
            "smaller block_size"
        )
    rows: list[tuple[int, ...]] = []
    payload_offset = 0
    for number, plane in enumerate(layout.planes):
        for at in range(0, plane.page_bytes, TILE_BYTES):
            num_bytes = min(TILE_BYTES, plane.page_bytes - at)
            rows.append(
                (
                    plane.base + at,
                    plane.block_stride,
                    payload_offset + at,
                    num_bytes,
                    plane.is_bf16,
                    number,
                    at // 8,
                )
            )
        payload_offset += plane.page_bytes
    return np.array(rows, dtype=TILE)


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """Sizes for cutting pieces. ``tile_offsets[t]``: tile t's byte offset in a block."""

    block_bytes: int
    tiles_per_block: int
    tile_offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layout: PagedLayout) -> BlockTiles:
        tiles = tile_table(layout)
        return cls(layout.block_bytes, len(tiles), tiles["payload_offset"].astype(np.int64))

    def payload_offset(self, tile: int) -> int:
        """Return the offset of a chunk's tile in the chunk's payload."""
        block, rest = divmod(tile, self.tiles_per_block)
        return block * self.block_bytes + int(self.tile_offsets[rest])


class Kernels:
    """Compiled kernels of one layout, and its tile table. Launches allocate nothing."""

    def __init__(
        self,
        layout: PagedLayout,
        device: torch.device,
        cache_dir: Path | None,
        *,
        encodes: bool = False,
        macros: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Compile and load kernels, with ``encodes`` those that encode parts of frames (see
        `encoding.can_encode`).

        Raises KernelError if they cannot be compiled, and CudaError if they cannot be loaded.
        """
        major, minor = torch.cuda.get_device_capability(device)
        torch.cuda.current_stream(
            device
        ).synchronize()  # makes the context current on this thread; not in a step
        self.vec_bytes, self.encodes = vec_bytes_of(layout), encodes
        family = E348 if encodes else CHUNKS
        cubin = compile_kernels(
            f"sm_{major}{minor}", self.vec_bytes, cache_dir, family=family, macros=macros
        )
        functions = driver.load_functions(cubin, family[1:])
        self.gather, self.scatter = functions[family.gather], functions[family.scatter]
        self.block_tiles = BlockTiles.of(layout)
        self.num_planes = len(layout.planes)
        self.tiles = torch.from_numpy(tile_table(layout).view(np.uint8)).to(device)
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
