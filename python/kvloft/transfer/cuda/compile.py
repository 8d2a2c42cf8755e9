"""Kernels from source: compiled by NVRTC for the device that is there, kept on disk by cuda.core's program cache.

The sources travel in the package (`kvloft/csrc`); nothing here needs nvcc, torch's ABI or, to compile, a GPU. It must not know
what the kernels are for.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from kvloft.errors import UnsupportedError

HEADERS = ("tag.cuh", "kv_layout.cuh", "piece.cuh")
"""Each includes only those before it."""


class Family(NamedTuple):
    """Kernels of one source file: from pages to parts of frames, and back."""

    source: str
    gather: str
    scatter: str


CHUNKS = Family("chunks.cu", "gather_chunks", "scatter_chunks")
E348 = Family("e348.cu", "encode_chunks", "decode_chunks")
VEC_BYTES = (16, 8, 4, 1)
CACHE_BYTES = 64 << 20


class KernelError(UnsupportedError):
    """The kernels cannot be had on this machine; the message says what to install or set."""


@cache
def kernel_source(family: Family = CHUNKS) -> str:
    """The device code of ``family`` as one text, with no file to include: what the program cache needs."""
    folder = resources.files("kvloft") / "csrc"
    text = "".join((folder / name).read_text(encoding="utf-8") for name in (*HEADERS, family.source))
    return re.sub(r'^#(include "[^"]+"|pragma once)\n', "", text, flags=re.MULTILINE)


def compile_kernels(
    arch: str, vec_bytes: int, cache_dir: Path | None = None, *, family: Family = CHUNKS, macros: tuple[tuple[str, str], ...] = ()
) -> bytes:
    """The cubin of ``family`` for ``arch`` ("sm_90") that moves ``vec_bytes`` at a time, from ``cache_dir`` if it is there.

    ``macros`` are for benches that price a part of the kernels. Raises KernelError with the compiler's log.
    """
    try:
        from cuda.core import Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache
    except ImportError as error:
        raise KernelError(
            f"kvloft compiles its GPU kernels with NVRTC, and a package for that is missing ({error}): "
            "pip install 'kvloft[cu13]', or kvloft[cu12] where torch was built for CUDA 12"
        ) from error
    defined = [("KVLOFT_VEC_BYTES", str(vec_bytes)), *macros]
    options = ProgramOptions(name="kvloft_chunks", arch=arch, std="c++17", lineinfo=True, define_macro=defined)
    try:
        store: Any = FileStreamProgramCache(cache_dir, max_size_bytes=CACHE_BYTES) if cache_dir is not None else None
        program = Program(kernel_source(family), "c++", options)
        return bytes(program.compile("cubin", cache=store).code)
    except Exception as error:  # cuda.core raises its own types for a missing NVRTC, a bad arch and a compile error
        raise KernelError(f"kvloft's GPU kernels could not be compiled for {arch}: {error}") from error


def default_cache_dir() -> Path:
    """Where compiled kernels are kept: ``~/.cache/kvloft``."""
    return Path.home() / ".cache" / "kvloft"
