"""Compiles the kernels in csrc, and defines their launch parameters and the tile table.

NVRTC compiles the kernels for the device at each start, which takes about a second. The cubins are
not cached on disk, where they could be damaged or replaced. Compilation does not require nvcc,
torch's C++ ABI or a GPU. The launch parameters mirror kv_layout.cuh.
"""

import ctypes
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kvloft.errors import UnsupportedError
from kvloft.transfer.cuda import driver
from kvloft.transfer.frames import TILE_BYTES
from kvloft.transfer.layout import PagedLayout

HEADERS = ("tag.cuh", "kv_layout.cuh", "piece.cuh")
"""The headers in dependency order: each header includes only earlier headers."""
VEC_BYTES = (16, 8, 4, 1)
CTA_THREADS: Final = 512
WARPS_PER_CTA: Final = CTA_THREADS // 32
MAX_SEGMENTS: Final = 128
MAX_BLOCKS: Final = 1024


class Family(NamedTuple):
    """The two kernels in a source file. ``sources`` lists this file after the family's headers."""

    sources: tuple[str, ...]
    gather: str
    scatter: str


CHUNKS = Family(("chunks.cu",), "gather_chunks", "scatter_chunks")
E348 = Family(("e348_format.cuh", "e348.cu"), "encode_chunks", "decode_chunks")


class KernelError(UnsupportedError):
    """The kernels cannot be compiled on this machine."""


def kernel_source(family: Family = CHUNKS) -> str:
    """Return the headers and sources of ``family`` as one string without #include lines."""
    folder = resources.files("kvloft") / "csrc"
    text = "".join(
        (folder / name).read_text(encoding="utf-8") for name in (*HEADERS, *family.sources)
    )
    return re.sub(r'^#(include "[^"]+"|pragma once)\n', "", text, flags=re.MULTILINE)


@cache
def compile_kernels(
    arch: str,
    vec_bytes: int,
    *,
    family: Family = CHUNKS,
    macros: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Return the cubin of ``family`` for ``arch``, for example "sm_90".

    Args:
        vec_bytes: the width of the kernels' memory accesses.
        macros: preprocessor macros for benchmarks that omit parts of the kernels.

    Raises KernelError with the compiler's log.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise KernelError(
            "kvloft compiles GPU kernels with NVRTC, but a required package is missing "
            f"({error}); run: "
            "pip install 'kvloft[cu13]', or kvloft[cu12] if torch was built for CUDA 12"
        ) from error
    defined = [("KVLOFT_VEC_BYTES", str(vec_bytes)), *macros]
    options = ProgramOptions(
        name="kvloft_chunks", arch=arch, std="c++17", lineinfo=True, define_macro=defined
    )
    try:
        program = Program(kernel_source(family), "c++", options)
        return bytes(program.compile("cubin").code)
    # cuda.core raises various exceptions if NVRTC is missing, arch is invalid or compilation fails.
    except Exception as error:
        raise KernelError(f"could not compile kvloft's GPU kernels for {arch}: {error}") from error


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
# kv_layout.cuh also asserts these sizes.
assert TILE.itemsize == 32 and SEGMENT.itemsize == 24 and PART.itemsize == 16


def _fields_of(kind: Any, names: str) -> Iterator[tuple[str, Any]]:
    return ((name, kind) for name in names.split())


class PieceParams(ctypes.Structure):
    """The parameters of a kernel launch. kv_layout.cuh documents the fields."""

    _fields_ = (
        *_fields_of(ctypes.c_uint64, "tiles sums num_done tags_out block_bytes base"),
        *_fields_of(ctypes.c_uint64, "num_used used_out part_room"),
        *_fields_of(ctypes.c_uint32, "tiles_per_block num_planes num_tiles num_segments"),
        ("segments", ctypes.c_uint8 * (SEGMENT.itemsize * MAX_SEGMENTS)),
        ("block_ids", ctypes.c_int32 * MAX_BLOCKS),
        ("parts", ctypes.c_uint8 * (PART.itemsize * MAX_SEGMENTS)),
    )


# kv_layout.cuh also asserts this size.
assert ctypes.sizeof(PieceParams) == 88 + (24 + 16) * MAX_SEGMENTS + 4 * MAX_BLOCKS


def vec_bytes_of(layout: PagedLayout) -> int:
    """Return the widest access, in bytes, that the page addresses and strides allow.

    Frames are page-aligned, so they do not limit the width.
    """
    common = 16
    for plane in layout.planes:
        common = math.gcd(common, plane.base, plane.block_stride, plane.page_bytes)
    return max(vec for vec in VEC_BYTES if common % vec == 0)


def tile_table(layout: PagedLayout) -> npt.NDArray[Any]:
    """Return a block's tiles in payload order.

    Raises UnsupportedError if a block is 4 GiB or larger.
    """
    if layout.block_bytes >= 1 << 32:
        raise UnsupportedError(
            f"a block of {layout.block_bytes} bytes is too large for kvloft's kernels; reduce "
            "block_size"
        )
    rows: list[tuple[int, ...]] = []
    payload_offset = 0
    for number, plane in enumerate(layout.planes):
        for at in range(0, plane.page_bytes, TILE_BYTES):
            num_bytes = min(TILE_BYTES, plane.page_bytes - at)
            place = (plane.base + at, plane.block_stride, payload_offset + at, num_bytes)
            rows.append((*place, plane.is_bf16, number, at // 8))
        payload_offset += plane.page_bytes
    return np.array(rows, dtype=TILE)


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """The sizes needed to split chunks at tile boundaries.

    ``tile_offsets`` holds the payload offsets of a block's tiles.
    """

    block_bytes: int
    tiles_per_block: int
    tile_offsets: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layout: PagedLayout) -> Self:
        tiles = tile_table(layout)
        return cls(layout.block_bytes, len(tiles), tiles["payload_offset"].astype(np.int64))

    def payload_offset(self, tile: int) -> int:
        """Return the payload offset of a tile, given its index in the chunk."""
        block, rest = divmod(tile, self.tiles_per_block)
        return block * self.block_bytes + int(self.tile_offsets[rest])


class Kernels:
    """The compiled kernels and the tile table for one layout. Launches do not allocate memory.

    The tile table is in host memory, because vLLM can create this object inside the memory pool
    that sleep mode discards. Lanes copy the table to the device.
    """

    def __init__(
        self,
        layout: PagedLayout,
        device: torch.device,
        *,
        encodes: bool = False,
        macros: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Compile and load the kernels.

        With ``encodes``, load kernels that encode and decode parts (see `encoding.can_encode`).
        Raises KernelError if compilation fails, and CudaError if the kernels cannot be loaded.
        """
        major, minor = torch.cuda.get_device_capability(device)
        # Make the context current on this thread. This runs at startup, never in a step.
        torch.cuda.current_stream(device).synchronize()
        self.vec_bytes, self.encodes = vec_bytes_of(layout), encodes
        family = E348 if encodes else CHUNKS
        cubin = compile_kernels(f"sm_{major}{minor}", self.vec_bytes, family=family, macros=macros)
        functions = driver.load_functions(cubin, family[1:])
        self.gather, self.scatter = functions[family.gather], functions[family.scatter]
        self.block_tiles = BlockTiles.of(layout)
        self.num_planes = len(layout.planes)
        self.device, self.tiles = device, tile_table(layout)
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
