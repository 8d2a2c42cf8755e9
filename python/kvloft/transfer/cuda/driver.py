"""CUDA driver calls for the GPU mover. Failed calls raise exceptions, and handles are ints.

All calls use the current context, which torch owns. Unlike torch's wrappers, the calls take about
1 us and accept raw addresses. This module uses ctypes, because the first calls through NVIDIA's
bindings are slow: they delayed the first copy of a save on an idle GPU by 100 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

import numpy as np

NOT_READY: Final = 600
"""CUDA_ERROR_NOT_READY, a normal result of a query."""
_HOST, _DEVICE = 1, 2
_BATCH_ATTRIBUTES, _BATCH_FIRST = (c_int * 6)(1), c_size_t(0)
"""CUmemcpyAttributes of a batch: sources are read in stream order, without hints or flags."""
_NON_BLOCKING = 1
_QUIET_EVENT = 1 | 2
"""CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING."""
_PORTABLE_AND_MAPPED = 1 | 2
_CAN_USE_HOST_POINTER = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""

_P: Final = c_void_p
_SIGNATURES: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("cuCtxSynchronize", ()),
    ("cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent cuDriverGetVersion", (_P,)),
    ("cuMemFreeHost cuMemHostUnregister cuEventDestroy_v2 cuEventQuery", (_P,)),
    ("cuEventSynchronize cuStreamDestroy_v2 cuStreamSynchronize", (_P,)),
    ("cuCtxGetStreamPriorityRange cuEventRecord cuMemcpy2DAsync_v2 cuModuleLoadData", (_P, _P)),
    ("cuEventElapsedTime cuModuleGetFunction", (_P, _P, _P)),
    ("cuEventCreate", (_P, c_uint)),
    ("cuDeviceGetAttribute", (_P, c_int, c_int)),
    ("cuMemHostAlloc cuMemHostRegister_v2", (_P, c_size_t, c_uint)),
    ("cuStreamCreateWithPriority", (_P, c_uint, c_int)),
    ("cuStreamWaitEvent", (_P, _P, c_uint)),
    ("cuMemcpyAsync cuMemcpyDtoHAsync_v2 cuMemcpyHtoDAsync_v2", (c_uint64, c_uint64, c_size_t, _P)),
    ("cuMemcpyBatchAsync", (_P, _P, _P, c_size_t, _P, _P, c_size_t, _P, _P)),
    ("cuLaunchKernel", (_P, *(c_uint,) * 7, _P, _P, _P)),
)
_ARGUMENTS: Final = {name: arguments for names, arguments in _SIGNATURES for name in names.split()}
"""Argument types by exported name. The driver never changes the signature of an exported name."""


class CudaError(RuntimeError):
    """A driver call failed."""


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"cannot load the CUDA driver: {error}") from error


class _Driver:
    """The driver's functions, each resolved on first use.

    The functions release the GIL and raise CudaError on failure.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            function = _library()[name]
        except AttributeError as error:
            raise CudaError(
                f"the CUDA driver does not export {name}; update the NVIDIA driver"
            ) from error
        function.argtypes, function.errcheck = _ARGUMENTS[name], _checked
        setattr(self, name, function)
        return function


def _checked(result: int, function: Any, _: object) -> int:
    if result and not (result == NOT_READY and function.__name__.endswith("Query")):
        name = ctypes.c_char_p()
        _library().cuGetErrorName(result, ctypes.byref(name))
        raise CudaError(
            f"{function.__name__}: {name.value.decode() if name.value else f'error {result}'}"
        )
    return result


_cu = _Driver()


def _made(kind: Any, call: Callable[..., int], *arguments: Any) -> Any:
    """Invoke ``call`` with an output argument of type ``kind``, and return the output."""
    out = kind()
    call(ctypes.byref(out), *arguments)
    return out.value


class Stream:
    """A non-blocking stream, or a view of a stream that torch owns."""

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @classmethod
    def create(cls) -> Stream:
        """Create a stream with the lowest priority, so that the engine's kernels run first."""
        low = _made(c_int, _cu.cuCtxGetStreamPriorityRange, None)
        return cls(_made(c_void_p, _cu.cuStreamCreateWithPriority, _NON_BLOCKING, low))

    @classmethod
    def view(cls, handle: int) -> Stream:
        return cls(handle)

    def wait(self, event: Event) -> None:
        _cu.cuStreamWaitEvent(self.handle, event.handle, 0)

    def synchronize(self) -> None:
        _cu.cuStreamSynchronize(self.handle)

    def copy_to_device(self, to: int, source: int, num_bytes: int) -> None:
        _cu.cuMemcpyHtoDAsync_v2(to, source, num_bytes, self.handle)

    def copy_to_host(self, to: int, source: int, num_bytes: int) -> None:
        _cu.cuMemcpyDtoHAsync_v2(to, source, num_bytes, self.handle)

    def copy_rows(
        self,
        *,
        host: int,
        host_pitch: int,
        device: int,
        device_pitch: int,
        row_bytes: int,
        num_rows: int,
        to_host: bool,
    ) -> None:
        """Copy equally spaced rows with one copy-engine command.

        CUDA_MEMCPY2D's fields are source, destination, row size and number of rows. The source and
        the destination each have the fields x, y, memory type, host address, device address, array
        and pitch.
        """
        sides = (0, 0, _HOST, host, 0, 0, host_pitch), (0, 0, _DEVICE, 0, device, 0, device_pitch)
        source, to = sides[::-1] if to_host else sides
        copy = (c_uint64 * 16)(*source, *to, row_bytes, num_rows)
        _cu.cuMemcpy2DAsync_v2(ctypes.addressof(copy), self.handle)

    def copy_batch(
        self, to: Sequence[int], source: Sequence[int], num_bytes: Sequence[int]
    ) -> None:
        """Copy many ranges between registered memory and the device with one command.

        The copies run in any order. With a separate command for each copy of a few MiB, the link
        would be idle between commands, and the stream's queue would fill up, which blocks the host.
        Drivers older than CUDA 12.8 do not support batches, so this function queues separate copies
        (`cuMemcpyAsync` infers the direction).
        """
        if not hasattr(_library(), "cuMemcpyBatchAsync"):
            for each in zip(to, source, num_bytes, strict=True):
                _cu.cuMemcpyAsync(*each, self.handle)
            return
        columns = np.array((to, source, num_bytes), dtype=np.uint64)
        first, row, failed = columns.ctypes.data, columns.strides[0], c_size_t(0)
        _cu.cuMemcpyBatchAsync(
            first,
            first + row,
            first + 2 * row,
            len(to),
            ctypes.addressof(_BATCH_ATTRIBUTES),
            ctypes.addressof(_BATCH_FIRST),
            1,
            ctypes.addressof(failed),
            self.handle,
        )

    def launch(self, function: int, num_ctas: int, num_threads: int, params_address: int) -> None:
        """Launch a kernel. The driver copies the parameters before the call returns.

        ``params_address`` is the address of an array of pointers to the parameters.
        """
        _cu.cuLaunchKernel(
            function, num_ctas, 1, 1, num_threads, 1, 1, 0, self.handle, params_address, None
        )

    def destroy(self) -> None:
        _cu.cuStreamDestroy_v2(self.handle)


class Event:
    """A CUDA event. `synchronize` spins if the event has ``timing``, and sleeps otherwise."""

    __slots__ = ("handle",)

    def __init__(self, *, timing: bool = False) -> None:
        self.handle: int = _made(c_void_p, _cu.cuEventCreate, 0 if timing else _QUIET_EVENT)

    def record(self, stream: Stream) -> None:
        _cu.cuEventRecord(self.handle, stream.handle)

    def is_done(self) -> bool:
        """Return True if all work before the event is done. Raises CudaError if the work failed."""
        return bool(_cu.cuEventQuery(self.handle) != NOT_READY)

    def synchronize(self) -> None:
        _cu.cuEventSynchronize(self.handle)

    def destroy(self) -> None:
        _cu.cuEventDestroy_v2(self.handle)

    def seconds_since(self, begin: Event) -> float:
        return float(_made(ctypes.c_float, _cu.cuEventElapsedTime, begin.handle, self.handle)) / 1e3


def load_functions(cubin: bytes, names: tuple[str, ...]) -> dict[str, int]:
    """Load kernels into the current context and return their handles by name.

    The kernels remain loaded until the process exits.
    """
    module = _made(c_void_p, _cu.cuModuleLoadData, cubin)
    return {name: _made(c_void_p, _cu.cuModuleGetFunction, module, name.encode()) for name in names}


def current_context() -> int | None:
    """Return this thread's current CUDA context, or None."""
    context: int | None = _made(c_void_p, _cu.cuCtxGetCurrent)
    return context


def use_context(context: int | None) -> None:
    """Make ``context`` current on this thread."""
    _cu.cuCtxSetCurrent(context)


def kernels_reach_registered() -> bool:
    """Return True if kernels can access registered memory by its host address."""
    device = _made(c_int, _cu.cuCtxGetDevice)
    return bool(_made(c_int, _cu.cuDeviceGetAttribute, _CAN_USE_HOST_POINTER, device))


def host_register(address: int, num_bytes: int) -> None:
    """Register host memory for all contexts of this process."""
    _cu.cuMemHostRegister_v2(address, num_bytes, _PORTABLE_AND_MAPPED)


def host_unregister(address: int) -> None:
    """Unregister the memory registered at ``address``."""
    _cu.cuMemHostUnregister(address)


def host_alloc(num_bytes: int) -> int:
    """Allocate page-locked memory and return its address."""
    return int(_made(c_void_p, _cu.cuMemHostAlloc, num_bytes, _PORTABLE_AND_MAPPED))


def host_free(address: int) -> None:
    """Free memory from `host_alloc`."""
    _cu.cuMemFreeHost(address)


def synchronize() -> None:
    """Wait for all work on the device. Only tests and benchmarks may call this: a step must not
    wait.
    """
    _cu.cuCtxSynchronize()


def driver_version() -> int:
    """Return the CUDA version that the driver supports, for example 13000 for CUDA 13.0."""
    return int(_made(c_int, _cu.cuDriverGetVersion))
