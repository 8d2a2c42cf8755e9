"""The few CUDA driver calls that the movers make, with errors as exceptions and handles as plain ints.

torch owns the context; this only uses the one that is current. Driver calls instead of torch's wrappers because they cost a
microsecond and let a copy name raw addresses; those of every piece by ctypes, for the bindings' own Python is slow to start (see
`_Calls`). It must not know pages, frames or plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

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
        raise _failed(int(result[0]), what)
    return result[1] if len(result) > 1 else None


def _failed(result: int, what: str) -> CudaError:
    """The error to raise for a driver's answer other than 0."""
    try:
        _, name = _cu.cuGetErrorName(_cu.CUresult(result))
    except ValueError:  # newer than the bindings
        name = None
    return CudaError(f"{what}: {name.decode() if isinstance(name, bytes) else f'error {result}'}")


class Stream:
    """A non-blocking stream of our own, or a view of one that torch owns."""

    __slots__ = ("handle", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.handle = int(raw)

    @classmethod
    def create(cls) -> Stream:
        """Of the lowest priority: computation goes first."""
        _, low, _ = _cu.cuCtxGetStreamPriorityRange()
        flags = _cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        return cls(_check(_cu.cuStreamCreateWithPriority(int(flags), low), "cuStreamCreate"))

    @classmethod
    def view(cls, handle: int) -> Stream:
        return cls(_cu.CUstream(handle))

    def wait(self, event: Event) -> None:
        if result := _calls().wait(self.handle, event.handle, 0):
            raise _failed(result, "cuStreamWaitEvent")

    def synchronize(self) -> None:
        _check(_cu.cuStreamSynchronize(self.raw), "cuStreamSynchronize")

    def copy_to_device(self, to: int, source: int, num_bytes: int) -> None:
        if result := _calls().to_device(to, source, num_bytes, self.handle):
            raise _failed(result, "cuMemcpyHtoDAsync")

    def copy_to_host(self, to: int, source: int, num_bytes: int) -> None:
        if result := _calls().to_host(to, source, num_bytes, self.handle):
            raise _failed(result, "cuMemcpyDtoHAsync")

    def copy_rows(
        self, *, to: int, to_pitch: int, source: int, source_pitch: int, row_bytes: int, num_rows: int, to_host: bool
    ) -> None:
        """Equally spaced runs of bytes in one copy-engine command."""
        if to_host:
            sides = _Side(0, 0, _DEVICE, 0, source, 0, source_pitch), _Side(0, 0, _HOST, to, 0, 0, to_pitch)
        else:
            sides = _Side(0, 0, _HOST, source, 0, 0, source_pitch), _Side(0, 0, _DEVICE, 0, to, 0, to_pitch)
        copy = _Copy2D(*sides, row_bytes, num_rows)
        if result := _calls().copy_2d(ctypes.addressof(copy), self.handle):
            raise _failed(result, "cuMemcpy2DAsync")

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
            raise _failed(result, f"cuMemcpyBatchAsync at copy {failed.value}")

    def launch(self, function: int, num_ctas: int, num_threads: int, params_address: int) -> None:
        """``params_address`` is that of an array of pointers to the kernel's parameters, which are copied before it returns."""
        if result := _calls().launch(function, num_ctas, 1, 1, num_threads, 1, 1, 0, self.handle, params_address, None):
            raise _failed(result, "cuLaunchKernel")

    def destroy(self) -> None:
        _check(_cu.cuStreamDestroy(self.raw), "cuStreamDestroy")


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in what order sources are read, two location hints that pinned memory does not need, flags."""

    _fields_ = (("source_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_STREAM_ORDER = 1
_BATCH_ATTRIBUTES = _CopyAttributes(source_order=_STREAM_ORDER)
_BATCH_FIRST = ctypes.c_size_t(0)


_HOST, _DEVICE = 1, 2


class _Side(ctypes.Structure):
    """Where from, or where to: host or device, and bytes from one row to the next."""

    _fields_ = (
        ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_int), ("host", ctypes.c_uint64),
        ("device", ctypes.c_uint64), ("array", ctypes.c_uint64), ("pitch", ctypes.c_size_t),
    )  # fmt: skip


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _Side), ("to", _Side), ("row_bytes", ctypes.c_size_t), ("num_rows", ctypes.c_size_t))


assert ctypes.sizeof(_Copy2D) == 128


class _Calls(NamedTuple):
    """What every piece needs, by address: through the bindings, the first copy of a save on an idle GPU was 100 us later.

    They run without the interpreter's lock, whichever release of the bindings this is.
    """

    launch: Any
    copy_2d: Any
    to_device: Any
    to_host: Any
    record: Any
    query: Any
    wait: Any
    synchronize: Any


def _address_of(name: str, version: int) -> int | None:
    """Of the driver's function as of that CUDA version (13000 for 13.0); None if the driver has none."""
    error, address, *_ = _cu.cuGetProcAddress(name.encode(), version, 0)
    return None if int(error) else int(address) or None


@cache
def _calls() -> _Calls:
    pointer, number, address = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64

    def call(name: str, *arguments: Any) -> Any:
        if (found := _address_of(name, 12000)) is None:
            raise CudaError(f"the driver has no {name} of CUDA 12: kvloft's GPU path needs a newer one")
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(found)

    return _Calls(
        launch=call("cuLaunchKernel", pointer, *(number,) * 7, pointer, pointer, pointer),
        copy_2d=call("cuMemcpy2DAsync", pointer, pointer),
        to_device=call("cuMemcpyHtoDAsync", address, address, ctypes.c_size_t, pointer),
        to_host=call("cuMemcpyDtoHAsync", address, address, ctypes.c_size_t, pointer),
        record=call("cuEventRecord", pointer, pointer),
        query=call("cuEventQuery", pointer),
        wait=call("cuStreamWaitEvent", pointer, pointer, number),
        synchronize=call("cuEventSynchronize", pointer),
    )


@cache
def _batch_function() -> Any:
    """cuMemcpyBatchAsync as of CUDA 12.8, whose signature no binding's version changes; None if the driver has none."""
    if (address := _address_of("cuMemcpyBatchAsync", 12080)) is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)(address)


class Event:
    """A point in a stream's work. Whoever waits for one with ``timing`` spins; for the others, it sleeps."""

    __slots__ = ("handle", "raw")

    def __init__(self, *, timing: bool = False) -> None:
        flags = _cu.CUevent_flags
        quiet = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        self.raw = _check(_cu.cuEventCreate(int(flags.CU_EVENT_DEFAULT) if timing else quiet), "cuEventCreate")
        self.handle = int(self.raw)

    def record(self, stream: Stream) -> None:
        if result := _calls().record(self.handle, stream.handle):
            raise _failed(result, "cuEventRecord")

    def is_done(self) -> bool:
        """Whether the work before it is; raises CudaError if that work failed."""
        result = _calls().query(self.handle)
        if result not in (0, NOT_READY):
            raise _failed(result, "cuEventQuery")
        return bool(result == 0)

    def synchronize(self) -> None:
        if result := _calls().synchronize(self.handle):
            raise _failed(result, "cuEventSynchronize")

    def destroy(self) -> None:
        _check(_cu.cuEventDestroy(self.raw), "cuEventDestroy")

    def seconds_since(self, begin: Event) -> float:
        return float(_check(_cu.cuEventElapsedTime(begin.raw, self.raw), "cuEventElapsedTime")) / 1e3


def load_functions(cubin: bytes, names: tuple[str, ...]) -> dict[str, int]:
    """Kernels by name, loaded into the current context (and kept for the life of the process)."""
    module = _check(_cu.cuModuleLoadData(cubin), "cuModuleLoadData")
    return {name: int(_check(_cu.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction")) for name in names}


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
