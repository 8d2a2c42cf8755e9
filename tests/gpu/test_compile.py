"""Checks that every kernel compiles for every supported architecture, without a GPU."""

import pytest
import torch

pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'cuda-core>=1'")
pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

from kvloft.errors import UnsupportedError
from kvloft.transfer.cuda.kernels import (
    CHUNKS,
    E348,
    VEC_BYTES,
    Family,
    KernelError,
    compile_kernels,
    kernel_source,
    tile_table,
)
from kvloft.transfer.layout import PagedLayout, Plane


@pytest.mark.parametrize("vec_bytes", VEC_BYTES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile(arch: str, vec_bytes: int) -> None:
    cubin = compile_kernels(arch, vec_bytes)
    assert cubin.startswith(b"\x7fELF")
    for name in CHUNKS[1:]:
        assert name.encode() in cubin


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_kernels_that_encode_compile(arch: str) -> None:
    cubin = compile_kernels(arch, 16, family=E348)
    assert cubin.startswith(b"\x7fELF")
    for name in E348[1:]:
        assert name.encode() in cubin


def test_each_kernel_is_compiled_once_in_a_process() -> None:
    assert compile_kernels("sm_90", 16) is compile_kernels("sm_90", 16)


def test_a_failed_compilation_reports_the_compilers_output() -> None:
    with pytest.raises(KernelError, match="sm_90"):
        compile_kernels("sm_90", 3)


@pytest.mark.parametrize("family", [CHUNKS, E348])
def test_source_is_flat_and_has_each_header_once(family: Family) -> None:
    source = kernel_source(family)
    assert '#include "' not in source
    assert source.count("struct PieceParams {") == 1
    assert source.count("constexpr u64 kTagA") == 1


def test_blocks_beyond_32_bit_offsets_are_rejected() -> None:
    plane = Plane(torch.UntypedStorage(), 0, 1 << 32, 1 << 31, 1)
    with pytest.raises(UnsupportedError, match="reduce block_size"):
        tile_table(PagedLayout((plane, plane), 1, b""))
