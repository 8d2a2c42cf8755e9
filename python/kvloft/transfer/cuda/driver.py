"""The few CUDA driver calls that the movers make, with errors as exceptions and handles as plain ints.

torch owns the context; this only uses the one that is current. Driver calls instead of torch's wrappers because they cost a
microsecond and let a copy name raw addresses. It must not know pages, frames or plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from kvloft.errors import UnsupportedError

try:
    from cuda.bindings import driver as _cu
except ImportError as _error:  # a machine without CUDA packages imports this module, and is told when it uses it
    _cu: Any = None  # type: ignore[no-redef]
    _missing: ImportError | None = _error
else:
    _missing = None

NOT_READY = 600
"""CUDA_ERROR_NOT_READY, the answer of a query, not an error."""


class CudaError(RuntimeError):
    """A driver call failed."""


def require() -> None:
    """Raise UnsupportedError if the bindings are not installed."""
    if _missing is not None:
        raise UnsupportedError(f"kvloft's GPU path needs the package cuda-bindings ({_missing}): pip install cuda-bindings")


def _check(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]):
        _, name = _cu.cuGetErrorName(result[0])
        raise CudaError(f"{what}: {name.decode() if isinstance(name, bytes) else result[0]}")
    return result[1] if len(result) > 1 else None


class Stream:
    """A non-blocking stream of our own, or a view of one that torch owns."""

    __slots__ = ("handle", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.handle = int(raw)

    @classmethod
    def create(cls, *, high_priority: bool = False) -> Stream:
        _, low, high = _cu.cuCtxGetStreamPriorityRange()
        flags = _cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        return cls(_check(_cu.cuStreamCreateWithPriority(int(flags), high if high_priority else low), "cuStreamCreate"))

    @classmethod
    def view(cls, handle: int) -> Stream:
        return cls(_cu.CUstream(handle))

    def wait(self, event: Event) -> None:
        _check(_cu.cuStreamWaitEvent(self.raw, event.raw, 0), "cuStreamWaitEvent")

    def synchronize(self) -> None:
        _check(_cu.cuStreamSynchronize(self.raw), "cuStreamSynchronize")

    def copy_to_device(self, to: int, source: int, num_bytes: int) -> None:
        _check(_cu.cuMemcpyHtoDAsync(to, source, num_bytes, self.raw), "cuMemcpyHtoDAsync")

    def copy_to_host(self, to: int, source: int, num_bytes: int) -> None:
        _check(_cu.cuMemcpyDtoHAsync(to, source, num_bytes, self.raw), "cuMemcpyDtoHAsync")

    def copy_rows(
        self, *, to: int, to_pitch: int, source: int, source_pitch: int, row_bytes: int, num_rows: int, to_host: bool
    ) -> None:
        """Equally spaced runs of bytes in one copy-engine command."""
        copy = _cu.CUDA_MEMCPY2D()
        host, device = _cu.CUmemorytype.CU_MEMORYTYPE_HOST, _cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcMemoryType, copy.dstMemoryType = (device, host) if to_host else (host, device)
        if to_host:
            copy.srcDevice, copy.dstHost = _cu.CUdeviceptr(source), to
        else:
            copy.srcHost, copy.dstDevice = source, _cu.CUdeviceptr(to)
        copy.srcPitch, copy.dstPitch, copy.WidthInBytes, copy.Height = source_pitch, to_pitch, row_bytes, num_rows
        _check(_cu.cuMemcpy2DAsync(copy, self.raw), "cuMemcpy2DAsync")

    def copy_batch(self, to: Sequence[int], source: Sequence[int], num_bytes: Sequence[int]) -> None:
        """Many copies between pinned memory and the device as one command, in no order among themselves.

        One by one, copies of a few MiB each leave the link idle between them and fill the stream's queue, at whose end the
        host would wait. A driver older than 12.8 gets them one by one (`cuMemcpyAsync` infers their direction).
        """
        function = _batch_function()
        if function is None:
            for each in zip(to, source, num_bytes, strict=True):
                _check(_cu.cuMemcpyAsync(*each, self.raw), "cuMemcpyAsync")
            return
        columns = np.array((to, source, num_bytes), dtype=np.uint64)
        first, row, failed = columns.ctypes.data, columns.strides[0], ctypes.c_size_t(0)
        result = function(
            first, first + row, first + 2 * row, len(to), ctypes.addressof(_BATCH_ATTRIBUTES), ctypes.addressof(_BATCH_FIRST), 1,
            ctypes.addressof(failed), self.handle,
        )  # fmt: skip
        if result:
            raise CudaError(f"cuMemcpyBatchAsync: error {result} at copy {failed.value}")

    def launch(self, function: Any, num_ctas: int, num_threads: int, params_address: int) -> None:
        """``params_address`` is that of an array of pointers to the kernel's parameters, which are copied before it returns."""
        _check(_cu.cuLaunchKernel(function, num_ctas, 1, 1, num_threads, 1, 1, 0, self.raw, params_address, 0), "cuLaunchKernel")

    def destroy(self) -> None:
        _check(_cu.cuStreamDestroy(self.raw), "cuStreamDestroy")


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in what order sources are read, two location hints that pinned memory does not need, flags."""

    _fields_ = (("source_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_STREAM_ORDER = 1
_BATCH_ATTRIBUTES = _CopyAttributes(source_order=_STREAM_ORDER)
_BATCH_FIRST = ctypes.c_size_t(0)


@cache
def _event_synchronize() -> Any:
    error, address, *_ = _cu.cuGetProcAddress(b"cuEventSynchronize", 12000, 0)
    _check((error,), "cuGetProcAddress")
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(int(address))


@cache
def _batch_function() -> Any:
    """cuMemcpyBatchAsync as of CUDA 12.8, whose signature no binding's version changes; None if the driver has none."""
    error, address, *_ = _cu.cuGetProcAddress(b"cuMemcpyBatchAsync", 12080, 0)
    if int(error) or not int(address):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)(int(address))


class Event:
    """A point in a stream's work. Whoever waits for one with ``timing`` spins; for the others, it sleeps."""

    __slots__ = ("raw",)

    def __init__(self, *, timing: bool = False) -> None:
        flags = _cu.CUevent_flags
        quiet = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        self.raw = _check(_cu.cuEventCreate(int(flags.CU_EVENT_DEFAULT) if timing else quiet), "cuEventCreate")

    def record(self, stream: Stream) -> None:
        _check(_cu.cuEventRecord(self.raw, stream.raw), "cuEventRecord")

    def is_done(self) -> bool:
        """Whether the work before it is; raises CudaError if that work failed."""
        (result,) = _cu.cuEventQuery(self.raw)
        if int(result) == NOT_READY:
            return False
        _check((result,), "cuEventQuery")
        return True

    def synchronize(self) -> None:
        """Waits without the interpreter's lock, whichever release of the bindings this is."""
        if result := _event_synchronize()(int(self.raw)):
            raise CudaError(f"cuEventSynchronize: error {result}")

    def destroy(self) -> None:
        _check(_cu.cuEventDestroy(self.raw), "cuEventDestroy")

    def seconds_since(self, begin: Event) -> float:
        return float(_check(_cu.cuEventElapsedTime(begin.raw, self.raw), "cuEventElapsedTime")) / 1e3


def load_functions(cubin: bytes, names: tuple[str, ...]) -> dict[str, Any]:
    """Kernels by name, loaded into the current context (and kept for the life of the process)."""
    module = _check(_cu.cuModuleLoadData(cubin), "cuModuleLoadData")
    return {name: _check(_cu.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction") for name in names}


def current_context() -> Any:
    """The CUDA context of this thread."""
    return _check(_cu.cuCtxGetCurrent(), "cuCtxGetCurrent")


def use_context(context: Any) -> None:
    """Make ``context`` current on this thread."""
    _check(_cu.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def host_register(address: int, num_bytes: int) -> None:
    """Pin memory for every context of this process."""
    _check(
        _cu.cuMemHostRegister(address, num_bytes, _cu.CU_MEMHOSTREGISTER_PORTABLE | _cu.CU_MEMHOSTREGISTER_DEVICEMAP),
        "cuMemHostRegister",
    )


def host_unregister(address: int) -> None:
    """Undo `host_register` of the range that begins there."""
    _check(_cu.cuMemHostUnregister(address), "cuMemHostUnregister")


def host_alloc(num_bytes: int) -> int:
    """Address of pinned memory of ours."""
    return int(
        _check(_cu.cuMemHostAlloc(num_bytes, _cu.CU_MEMHOSTALLOC_PORTABLE | _cu.CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc")
    )


def host_free(address: int) -> None:
    """Undo `host_alloc`."""
    _check(_cu.cuMemFreeHost(address), "cuMemFreeHost")


def synchronize() -> None:
    """Wait for everything on the device. For tests and benches only; nothing in a step may."""
    _check(_cu.cuCtxSynchronize(), "cuCtxSynchronize")


def driver_version() -> int:
    """As 13000 for CUDA 13.0."""
    return int(_check(_cu.cuDriverGetVersion(), "cuDriverGetVersion"))
