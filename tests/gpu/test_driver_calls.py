"""Driver calls by ctypes: the arguments that reach the driver, answers that are errors, functions that it has not. Needs no GPU."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.driver import CudaError, Event, Stream

HANDLE = 0x7FFF_1234_5678_9ABC


class Driver:
    """Answers each call with ``result`` and notes its arguments; what was pointed to is copied while it is there."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.said: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> int:
        self.said.append(arguments)
        return self.result

    def copy_2d(self, address: int, stream: int) -> int:
        return self(ctypes.string_at(address, 128), stream)

    def __getattr__(self, _: str) -> Any:
        return self


def calls(monkeypatch: pytest.MonkeyPatch, result: int = 0) -> Driver:
    fake = Driver(result)
    monkeypatch.setattr(driver, "_calls", lambda: fake)
    return fake


def stream() -> Stream:
    return Stream.view(HANDLE)


def event() -> Event:
    made = object.__new__(Event)
    made.handle = HANDLE + 1
    return made


@pytest.mark.parametrize("to_host", [False, True])
def test_rows_reach_the_driver_as_the_bindings_would_say_them(to_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, host, device = calls(monkeypatch), 0x7F00_0000_1000, 0x7E00_0000_2000
    wanted = bindings.CUDA_MEMCPY2D()
    kinds = bindings.CUmemorytype
    if to_host:
        wanted.srcMemoryType, wanted.dstMemoryType = kinds.CU_MEMORYTYPE_DEVICE, kinds.CU_MEMORYTYPE_HOST
        wanted.srcDevice, wanted.dstHost = bindings.CUdeviceptr(device), host
    else:
        wanted.srcMemoryType, wanted.dstMemoryType = kinds.CU_MEMORYTYPE_HOST, kinds.CU_MEMORYTYPE_DEVICE
        wanted.srcHost, wanted.dstDevice = host, bindings.CUdeviceptr(device)
    wanted.srcPitch, wanted.dstPitch, wanted.WidthInBytes, wanted.Height = 5003, 4099, 4093, 17
    to, source = (host, device) if to_host else (device, host)
    stream().copy_rows(to=to, to_pitch=4099, source=source, source_pitch=5003, row_bytes=4093, num_rows=17, to_host=to_host)
    assert fake.said == [(ctypes.string_at(wanted.getPtr(), 128), HANDLE)]


def test_what_each_call_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = calls(monkeypatch)
    stream().copy_to_device(1, 2, 3)
    stream().copy_to_host(4, 5, 6)
    stream().wait(event())
    stream().launch(7, 66, 512, 8)
    event().record(stream())
    event().synchronize()
    assert event().is_done()
    assert fake.said == [
        (1, 2, 3, HANDLE), (4, 5, 6, HANDLE), (HANDLE, HANDLE + 1, 0), (7, 66, 1, 1, 512, 1, 1, 0, HANDLE, 8, None),
        (HANDLE + 1, HANDLE), (HANDLE + 1,), (HANDLE + 1,),
    ]  # fmt: skip


@pytest.mark.parametrize(("result", "name"), [(700, "CUDA_ERROR_ILLEGAL_ADDRESS"), (987654, "error 987654")])
def test_an_answer_that_is_an_error_is_raised_with_its_name(result: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def name_of(code: Any) -> tuple[int, bytes]:
        return 0, bindings.CUresult(code).name.encode()

    monkeypatch.setattr(driver._cu, "cuGetErrorName", name_of)
    calls(monkeypatch, result)
    for call in (
        lambda: stream().copy_to_device(1, 2, 3), lambda: stream().copy_to_host(1, 2, 3), lambda: stream().wait(event()),
        lambda: stream().launch(1, 2, 3, 4), lambda: event().record(stream()), lambda: event().synchronize(),
        lambda: event().is_done(),
        lambda: stream().copy_rows(to=1, to_pitch=1, source=1, source_pitch=1, row_bytes=1, num_rows=1, to_host=True),
    ):  # fmt: skip
        with pytest.raises(CudaError, match=name):
            call()


def test_work_that_is_not_done_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls(monkeypatch, driver.NOT_READY)
    assert not event().is_done()


def test_a_function_that_the_driver_has_not_is_an_error_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers "success" and no address."""
    monkeypatch.setattr(driver, "_cu", SimpleNamespace(cuGetProcAddress=lambda *_: (0, 0, 0)))
    with pytest.raises(CudaError, match="cuLaunchKernel"):
        driver._calls.__wrapped__()
    assert driver._batch_function.__wrapped__() is None


def test_every_argument_reaches_its_function_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the machine's own calling convention, which say what they were given."""
    num = {
        "cuLaunchKernel": 11, "cuMemcpy2DAsync": 2, "cuMemcpyHtoDAsync": 4, "cuMemcpyDtoHAsync": 4, "cuEventRecord": 2,
        "cuEventQuery": 1, "cuStreamWaitEvent": 3, "cuEventSynchronize": 1,
    }  # fmt: skip
    given: dict[str, tuple[int, ...]] = {}
    kept: list[Any] = []

    def address_of(name: bytes, version: int, flags: int) -> tuple[int, int, int]:
        text = name.decode()
        kept.append(ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_uint64,) * num[text])(lambda *args: given.update({text: args}) or 0))
        return 0, ctypes.cast(kept[-1], ctypes.c_void_p).value or 0, 0

    monkeypatch.setattr(driver, "_cu", SimpleNamespace(cuGetProcAddress=address_of))
    calls = driver._calls.__wrapped__()
    a, b, size = HANDLE, 0xFFFF_8234_5678_9ABC, 5 << 32
    calls.to_device(a, b, size, HANDLE)
    calls.to_host(b, a, size, HANDLE)
    calls.copy_2d(a, HANDLE)
    calls.record(a, HANDLE)
    calls.query(a)
    calls.wait(a, HANDLE, 0)
    calls.synchronize(a)
    calls.launch(a, 66, 1, 1, 512, 1, 1, 0, HANDLE, b, None)
    launch = given.pop("cuLaunchKernel")
    assert (launch[0], *(value & 0xFFFF_FFFF for value in launch[1:8]), *launch[8:]) == (a, 66, 1, 1, 512, 1, 1, 0, HANDLE, b, 0)
    assert (*given.pop("cuStreamWaitEvent")[:2],) == (a, HANDLE)
    assert given == {
        "cuMemcpyHtoDAsync": (a, b, size, HANDLE), "cuMemcpyDtoHAsync": (b, a, size, HANDLE), "cuMemcpy2DAsync": (a, HANDLE),
        "cuEventRecord": (a, HANDLE), "cuEventQuery": (a,), "cuEventSynchronize": (a,),
    }  # fmt: skip
