"""Tests driver calls through ctypes: the arguments that reach the driver, returned errors, and
missing functions. The tests do not need a GPU.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.driver import CudaError, Event, Stream

HANDLE, OTHER = 0x7FFF_1234_5678_9ABC, 0xFFFF_8234_5678_9ABC
HOST, DEVICE, SIZE = 0x7F00_0000_1000, 0x7E00_0000_2000, 5 << 32


class Library:
    """Functions with the C calling convention that record their arguments and return ``result``."""

    def __init__(self) -> None:
        self.result = 0
        self.said: list[tuple[Any, ...]] = []
        self.lacks: set[str] = set()
        self.writes: dict[str, Any] = {}
        """Maps a function's name to the value that it writes to the address in argument 0."""
        self.copied: list[bytes] = []

    def __getitem__(self, name: str) -> Any:
        if name in self.lacks:
            raise AttributeError(name)

        def called(*arguments: int) -> int:
            if name == "cuMemcpy2DAsync_v2":
                self.copied.append(ctypes.string_at(arguments[0], 128))
            if name == "cuMemcpyBatchAsync":
                rows = [
                    (ctypes.c_uint64 * arguments[3]).from_address(address)[:]
                    for address in arguments[:3]
                ]
                self.copied.append(repr(rows).encode())
            if name in self.writes:
                ctypes.memmove(
                    arguments[0],
                    ctypes.addressof(self.writes[name]),
                    ctypes.sizeof(self.writes[name]),
                )
            self.said.append((name, *arguments))
            return self.result

        kinds = [
            ctypes.c_uint64 if ctypes.sizeof(kind) == 8 else kind
            for kind in driver._ARGUMENTS[name]
        ]
        function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(called)
        function.__name__ = name
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and name not in self.lacks:
            return self.name_of if name == "cuGetErrorName" else self[name]
        raise AttributeError(name)

    def name_of(self, result: int, out: Any) -> int:
        if result == 700:
            out._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(driver, "_library", lambda: library)
    monkeypatch.setattr(driver, "_cu", driver._Driver())
    return library


@pytest.fixture
def stream() -> Stream:
    return Stream.view(HANDLE)


@pytest.fixture
def event() -> Event:
    made = object.__new__(Event)
    made.handle = OTHER
    return made


@pytest.mark.parametrize("to_host", [False, True])
def test_rows_reach_the_driver_as_the_bindings_would_say_them(
    to_host: bool, library: Library, stream: Stream
) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    wanted = bindings.CUDA_MEMCPY2D()
    kinds = bindings.CUmemorytype
    if to_host:
        wanted.srcMemoryType, wanted.dstMemoryType = (
            kinds.CU_MEMORYTYPE_DEVICE,
            kinds.CU_MEMORYTYPE_HOST,
        )
        wanted.srcDevice, wanted.dstHost, wanted.srcPitch, wanted.dstPitch = (
            bindings.CUdeviceptr(DEVICE),
            HOST,
            5003,
            4099,
        )
    else:
        wanted.srcMemoryType, wanted.dstMemoryType = (
            kinds.CU_MEMORYTYPE_HOST,
            kinds.CU_MEMORYTYPE_DEVICE,
        )
        wanted.srcHost, wanted.dstDevice, wanted.srcPitch, wanted.dstPitch = (
            HOST,
            bindings.CUdeviceptr(DEVICE),
            4099,
            5003,
        )
    wanted.WidthInBytes, wanted.Height = 4093, 17
    stream.copy_rows(
        host=HOST,
        host_pitch=4099,
        device=DEVICE,
        device_pitch=5003,
        row_bytes=4093,
        num_rows=17,
        to_host=to_host,
    )
    assert library.copied == [ctypes.string_at(wanted.getPtr(), 128)]
    assert library.said[0][2] == HANDLE


def test_every_argument_reaches_its_function(
    library: Library, stream: Stream, event: Event
) -> None:
    stream.copy_to_device(OTHER, HOST, SIZE)
    stream.copy_to_host(HOST, OTHER, SIZE)
    stream.wait(event)
    stream.launch(OTHER, 66, 512, HOST)
    stream.synchronize()
    stream.destroy()
    event.record(stream)
    event.synchronize()
    assert event.is_done()
    event.destroy()
    driver.host_register(OTHER, SIZE)
    driver.host_unregister(OTHER)
    driver.host_free(OTHER)
    driver.use_context(OTHER)
    driver.use_context(None)
    driver.synchronize()
    assert library.said == [
        ("cuMemcpyHtoDAsync_v2", OTHER, HOST, SIZE, HANDLE),
        ("cuMemcpyDtoHAsync_v2", HOST, OTHER, SIZE, HANDLE),
        ("cuStreamWaitEvent", HANDLE, OTHER, 0),
        ("cuLaunchKernel", OTHER, 66, 1, 1, 512, 1, 1, 0, HANDLE, HOST, 0),
        ("cuStreamSynchronize", HANDLE),
        ("cuStreamDestroy_v2", HANDLE),
        ("cuEventRecord", OTHER, HANDLE),
        ("cuEventSynchronize", OTHER),
        ("cuEventQuery", OTHER),
        ("cuEventDestroy_v2", OTHER),
        ("cuMemHostRegister_v2", OTHER, SIZE, 3),
        ("cuMemHostUnregister", OTHER),
        ("cuMemFreeHost", OTHER),
        ("cuCtxSetCurrent", OTHER),
        ("cuCtxSetCurrent", 0),
        ("cuCtxSynchronize",),
    ]


def test_driver_outputs_are_read_back(library: Library) -> None:
    """Streams are non-blocking and have the lowest priority. Events record no time by default."""
    for name in (
        "cuStreamCreateWithPriority",
        "cuEventCreate",
        "cuMemHostAlloc",
        "cuCtxGetCurrent",
        "cuModuleGetFunction",
    ):
        library.writes[name] = ctypes.c_uint64(OTHER)
    library.writes["cuModuleLoadData"] = ctypes.c_uint64(HANDLE)
    library.writes["cuCtxGetStreamPriorityRange"], library.writes["cuDriverGetVersion"] = (
        ctypes.c_int(-3),
        ctypes.c_int(13000),
    )
    assert Stream.create().handle == OTHER
    assert (
        Event().handle
        == Event(timing=True).handle
        == driver.host_alloc(SIZE)
        == driver.current_context()
        == OTHER
    )
    assert driver.load_functions(b"\x7fELF\0more", ("gather",)) == {"gather": OTHER}
    assert driver.driver_version() == 13000
    said = {call[0]: call[2:] for call in library.said}
    assert said["cuStreamCreateWithPriority"] == (1, -3) and said["cuMemHostAlloc"] == (SIZE, 3)
    assert [call[2] for call in library.said if call[0] == "cuEventCreate"] == [3, 0]
    assert said["cuModuleGetFunction"][0] == HANDLE


def test_seconds_are_counted_from_the_earlier_event(library: Library, event: Event) -> None:
    library.writes["cuEventElapsedTime"] = ctypes.c_float(1500.0)
    later = object.__new__(Event)
    later.handle = HANDLE
    assert later.seconds_since(event) == 1.5
    assert library.said[0][2:] == (OTHER, HANDLE)


@pytest.mark.parametrize("is_old", [False, True])
def test_a_batch_is_one_command_if_the_driver_supports_it(
    is_old: bool, library: Library, stream: Stream
) -> None:
    if is_old:
        library.lacks.add("cuMemcpyBatchAsync")
    stream.copy_batch([OTHER, 2], [3, HOST], [SIZE, 6])
    if is_old:
        assert library.said == [
            ("cuMemcpyAsync", OTHER, 3, SIZE, HANDLE),
            ("cuMemcpyAsync", 2, HOST, 6, HANDLE),
        ]
    else:
        assert library.copied == [repr([[OTHER, 2], [3, HOST], [SIZE, 6]]).encode()]
        assert (
            [call[4] for call in library.said] == [2]
            and library.said[0][7] == 1
            and library.said[0][9] == HANDLE
        )


@pytest.mark.parametrize(
    ("result", "name"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (987654, "error 987654")]
)
def test_an_answer_that_is_an_error_is_raised_with_its_name(
    result: int, name: str, library: Library, stream: Stream, event: Event
) -> None:
    library.result = result
    calls: tuple[Callable[[], object], ...] = (
        lambda: stream.copy_to_device(1, 2, 3),
        lambda: stream.copy_to_host(1, 2, 3),
        lambda: stream.wait(event),
        lambda: stream.launch(1, 2, 3, 4),
        lambda: event.record(stream),
        event.synchronize,
        event.is_done,
        Event,
        Stream.create,
        lambda: stream.copy_batch([1, 2], [1, 2], [1, 2]),
        lambda: driver.host_register(1, 2),
        driver.current_context,
        lambda: stream.copy_rows(
            host=1, host_pitch=1, device=1, device_pitch=1, row_bytes=1, num_rows=1, to_host=True
        ),
    )
    for call in calls:
        with pytest.raises(CudaError, match=name):
            call()


def test_work_that_is_not_done_is_no_error(library: Library, event: Event) -> None:
    library.result = driver.NOT_READY
    assert not event.is_done()


def test_a_function_that_the_driver_has_not_is_an_error_not_a_crash(
    library: Library, stream: Stream
) -> None:
    library.lacks.add("cuLaunchKernel")
    with pytest.raises(CudaError, match="cuLaunchKernel"):
        stream.launch(1, 2, 3, 4)


def test_a_machine_without_a_driver_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(CudaError, match="libcuda"):
        driver._library.__wrapped__()


def test_each_function_has_the_name_of_cuda_12_and_13() -> None:
    """Compares the names with cuda.h: without the suffix ``_v2``, the library returns a function of
    CUDA 3.

    The functions in ``kept`` deliberately use their first version.
    """
    header = Path(
        str(
            pytest.importorskip(
                "triton", reason="triton, which has cuda.h, is not installed"
            ).__file__
        )
    ).parent
    text = (header / "backends" / "nvidia" / "include" / "cuda.h").read_text()
    mapped = dict(
        re.findall(
            r"^#define (cu\w+) +(?:__CUDA_API_PT[DS]Z?\()?(cu\w+_v\d)\)?$", text, re.MULTILINE
        )
    )
    kept = {"cuMemcpyBatchAsync", "cuEventElapsedTime"}
    for name in driver._ARGUMENTS:
        plain = re.sub(r"_v\d$", "", name)
        assert f" {plain}(" in text
        assert name == (plain if plain in kept else mapped.get(plain, plain))
