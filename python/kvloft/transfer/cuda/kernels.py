"""Launch parameters of the kernels in csrc: ctypes mirrors of kv_layout.cuh, the tile table, and one launcher.

The sizes below are asserted on both sides. It must not know streams' order, frames or plans.
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
from kvloft.transfer.cuda.compile import KERNEL_NAMES, VEC_BYTES, compile_kernels
from kvloft.transfer.layout import PagedLayout

CTA_THREADS: Final = 512
WARPS_PER_CTA: Final = CTA_THREADS // 32
TILE_BYTES: Final = 4096
MAX_SEGMENTS: Final = 128
MAX_BLOCKS: Final = 1024

TILE: Final = np.dtype(
    [
        ("base", "<u8"),
        ("block_stride", "<u8"),
        ("payload_offset", "<u4"),
        ("num_bytes", "<u4"),
        ("plane", "<u4"),
        ("first_word", "<u4"),
    ]
)
SEGMENT: Final = np.dtype(
    [("base", "<u8"), ("first_tile", "<u4"), ("chunk_tile", "<u4"), ("block_index", "<i4"), ("reserved", "<u4")]
)
assert TILE.itemsize == 32 and SEGMENT.itemsize == 24  # as kv_layout.cuh asserts


class PieceParams(ctypes.Structure):
    """One launch; see kv_layout.cuh."""

    _fields_ = (
        ("tiles", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("num_done", ctypes.c_uint64),
        ("tags_out", ctypes.c_uint64),
        ("block_bytes", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("tiles_per_block", ctypes.c_uint32),
        ("num_planes", ctypes.c_uint32),
        ("num_tiles", ctypes.c_uint32),
        ("num_segments", ctypes.c_uint32),
        ("segments", ctypes.c_uint8 * (SEGMENT.itemsize * MAX_SEGMENTS)),
        ("block_ids", ctypes.c_int32 * MAX_BLOCKS),
    )


assert ctypes.sizeof(PieceParams) == 64 + 24 * MAX_SEGMENTS + 4 * MAX_BLOCKS  # as kv_layout.cuh asserts


def vec_bytes_of(layout: PagedLayout) -> int:
    """The widest access that every address and length of the layout allows (frames are aligned to more)."""
    common = 16
    for plane in layout.planes:
        common = math.gcd(common, plane.base, plane.block_stride, plane.page_bytes)
    return max(vec for vec in VEC_BYTES if common % vec == 0)


def tile_table(layout: PagedLayout) -> npt.NDArray[Any]:
    """The tiles of one block in payload order, dtype `TILE`. Raises UnsupportedError beyond 32-bit offsets."""
    if layout.block_bytes >= 1 << 32:
        raise UnsupportedError(f"a block of {layout.block_bytes} bytes is too large for kvloft's kernels; use a smaller block_size")
    rows: list[tuple[int, int, int, int, int, int]] = []
    payload_offset = 0
    for number, plane in enumerate(layout.planes):
        for at in range(0, plane.page_bytes, TILE_BYTES):
            num_bytes = min(TILE_BYTES, plane.page_bytes - at)
            rows.append((plane.base + at, plane.block_stride, payload_offset + at, num_bytes, number, at // 8))
        payload_offset += plane.page_bytes
    return np.array(rows, dtype=TILE)


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """What of a layout the splitting into pieces needs. ``tile_offsets[t]`` is tile t's byte offset in a block."""

    block_bytes: int
    tiles_per_block: int
    tile_offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layout: PagedLayout) -> BlockTiles:
        tiles = tile_table(layout)
        return cls(layout.block_bytes, len(tiles), tiles["payload_offset"].astype(np.int64))

    def payload_offset(self, tile: int) -> int:
        """Where tile ``tile`` of a chunk starts in the chunk's payload."""
        block, rest = divmod(tile, self.tiles_per_block)
        return block * self.block_bytes + int(self.tile_offsets[rest])


class Kernels:
    """The compiled kernels for one layout, and its tile table on the device. Made once; launching allocates nothing."""

    def __init__(
        self, layout: PagedLayout, device: torch.device, cache_dir: Path | None, *, macros: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Raises KernelError if they cannot be compiled, CudaError if they cannot be loaded."""
        driver.require()
        major, minor = torch.cuda.get_device_capability(device)
        torch.cuda.current_stream(device).synchronize()  # makes the context current on this thread; not in a step
        self.vec_bytes = vec_bytes_of(layout)
        cubin = compile_kernels(f"sm_{major}{minor}", self.vec_bytes, cache_dir, macros=macros)
        functions = driver.load_functions(cubin, KERNEL_NAMES)
        self.gather, self.scatter, self.tag = (functions[name] for name in KERNEL_NAMES)
        self.block_tiles = BlockTiles.of(layout)
        self.num_planes = len(layout.planes)
        table = torch.from_numpy(tile_table(layout).view(np.uint8).copy())
        self.tiles = table.to(device)
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count


class Launcher:
    """Parameters of one stream's launches, reused: launches that share a Launcher must be on one stream."""

    def __init__(self, kernels: Kernels, stream: driver.Stream) -> None:
        self._kernels = kernels
        self._stream = stream
        self._sums = torch.zeros(MAX_SEGMENTS + 1, dtype=torch.int64, device=kernels.tiles.device)
        torch.cuda.current_stream(kernels.tiles.device).synchronize()  # the zeros are there before any launch; not in a step
        block_tiles = kernels.block_tiles
        self._params = PieceParams(
            tiles=kernels.tiles.data_ptr(),
            sums=self._sums.data_ptr(),
            num_done=self._sums.data_ptr() + 8 * MAX_SEGMENTS,
            block_bytes=block_tiles.block_bytes,
            tiles_per_block=block_tiles.tiles_per_block,
            num_planes=kernels.num_planes,
        )
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._address = ctypes.addressof(self._pointers)
        self._segments = np.frombuffer(self._params.segments, dtype=SEGMENT)
        self._written: npt.NDArray[Any] | None = None
        """What ``_segments`` begins with: of full chunks it is the same piece after piece."""
        self._block_ids = np.frombuffer(self._params.block_ids, dtype=np.int32)

    def launch(
        self, function: Any, *, segments: npt.NDArray[Any], num_segments: int, base: int, num_tiles: int,
        block_ids: npt.NDArray[np.int32], tags_out: int, max_ctas: int,
    ) -> None:  # fmt: skip
        """Run one piece of the first ``num_segments`` of ``segments``, whose bases count from ``base``.

        ``tags_out`` takes one u64 a segment. Nobody may change ``segments`` afterwards: the same ones are not written again.
        """
        if segments is not self._written:
            self._segments[: len(segments)] = self._written = segments
        self._block_ids[: len(block_ids)] = block_ids
        params = self._params
        params.base, params.tags_out, params.num_tiles, params.num_segments = base, tags_out, num_tiles, num_segments
        num_ctas = min(max_ctas, -(-num_tiles // WARPS_PER_CTA))
        self._stream.launch(function, num_ctas, CTA_THREADS, self._address)
