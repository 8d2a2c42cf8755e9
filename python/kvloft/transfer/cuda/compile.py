"""Compiles kernels with NVRTC for the device, and caches them on disk with cuda.core's program
cache.

The sources are in the package (`kvloft/csrc`). Needs no nvcc and no torch ABI, and no GPU to
compile. Must not depend on the purpose of the kernels.
"""

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from kvloft.errors import UnsupportedError

HEADERS = ("tag.cuh", "kv_layout.cuh", "piece.cuh")
"""Each includes only headers before it."""


class Family(NamedTuple):
    """The two kernels of a source file, which is the last of ``sources`` after its headers."""

    sources: tuple[str, ...]
    gather: str
    scatter: str


CHUNKS = Family(("chunks.cu",), "gather_chunks", "scatter_chunks")
E348 = Family(("e348_format.cuh", "e348.cu"), "encode_chunks", "decode_chunks")
VEC_BYTES = (16, 8, 4, 1)
CACHE_BYTES = 64 << 20


class KernelError(UnsupportedError):
    """The kernels are not available on this machine; the message has the fix."""


@cache
def kernel_source(family: Family = CHUNKS) -> str:
    """Return the device code of ``family`` without includes, for the program cache."""
    folder = resources.files("kvloft") / "csrc"
    text = "".join(
        (folder / name).read_text(encoding="utf-8") for name in (*HEADERS, *family.sources)
    )
    return re.sub(r'^#(include "[^"]+"|pragma once)\n', "", text, flags=re.MULTILINE)


def compile_kernels(
    arch: str,
    vec_bytes: int,
    cache_dir: Path | None = None,
    *,
    family: Family = CHUNKS,
    macros: tuple[tuple[str, str], ...] = (),
) -> bytes:
    """Return the cubin of ``family`` for ``arch`` (such as "sm_90") with accesses of ``vec_bytes``.

    Uses the cache in ``cache_dir``. ``macros`` are for benchmarks that leave out a part of the
    kernels. Raises KernelError with the compiler's log.
    """
    try:
        from cuda.core import Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache
    except ImportError as error:
        raise KernelError(
            "kvloft compiles its GPU kernels with NVRTC, and a package for that is missing "
            f"({error}): "
            "pip install 'kvloft[cu13]', or kvloft[cu12] where torch was built for CUDA 12"
        ) from error
    defined = [("KVLOFT_VEC_BYTES", str(vec_bytes)), *macros]
    options = ProgramOptions(
        name="kvloft_chunks", arch=arch, std="c++17", lineinfo=True, define_macro=defined
    )
    try:
        store: Any = None
        if cache_dir is not None:
            store = FileStreamProgramCache(cache_dir, max_size_bytes=CACHE_BYTES)
        program = Program(kernel_source(family), "c++", options)
        return bytes(program.compile("cubin", cache=store).code)
    # cuda.core raises its own types for a missing NVRTC, a bad arch and a compile error
    except Exception as error:
        raise KernelError(
            f"kvloft's GPU kernels could not be compiled for {arch}: {error}"
        ) from error


def default_cache_dir() -> Path:
    """Return the folder of compiled kernels: ``~/.cache/kvloft``."""
    return Path.home() / ".cache" / "kvloft"
