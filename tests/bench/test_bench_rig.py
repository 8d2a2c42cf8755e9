"""Tests the rig of the copy bench on the emulated GPU. A run lasts until its last byte has arrived,
and dropped copies are reported.

Time is the number of commands that have run. The tests do not need a GPU.
"""

import ctypes
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from emulated_gpu import EmulatedKernels, Gpu, Stream, emulated

from kvloft.bench import copy as copy_bench
from kvloft.bench import link as link_module
from kvloft.bench import rig as rig_module
from kvloft.bench.link import Ceiling, HostFrames
from kvloft.bench.rig import FRAME_ORDERS, Case, Rig
from kvloft.transfer.cuda import lanes, mover, saves
from kvloft.transfer.cuda.lanes import Tuning

PAGE, PART, CHUNKS = 4096, 8192, 30
GATE_COMMANDS = 40


class Link:
    """Executes all copies, and records the copies between host frames and the device."""

    def __init__(self, gpu: Gpu, host: HostFrames) -> None:
        self.gpu, self.begin = gpu, host.bytes.ctypes.data
        self.end = self.begin + host.size_bytes
        self.copies: list[tuple[int, int]] = []
        """The time and the size in bytes of each copy."""
        self.touched: dict[str, set[int]] = {"read": set(), "written": set()}
        """Addresses of the host frames read or written."""

    def move(self, to: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(to, source, num_bytes)
        if any(self.begin <= address < self.end for address in (to, source)):
            self.copies.append((self.gpu.num_run, num_bytes))
            is_write = self.begin <= to < self.end
            at = to if is_write else source
            self.touched["written" if is_write else "read"].update(range(at, at + num_bytes))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with emulated(3) as gpu:
        driver = lanes.driver
        cuda = SimpleNamespace(
            _sleep=lambda _: [gpu.compute.enqueue(lambda: None) for _ in range(GATE_COMMANDS)],
            synchronize=driver.synchronize,
            current_stream=lambda *_: SimpleNamespace(cuda_stream=0),
        )
        on_host = {name: getattr(torch, name) for name in ("uint8", "equal")}
        fake_torch = SimpleNamespace(
            cuda=cuda,
            empty=lambda *size, dtype, device: torch.empty(*size, dtype=dtype),
            tensor=lambda values, device: torch.tensor(values),
            **on_host,
        )
        for module in (rig_module, link_module):
            monkeypatch.setattr(module, "driver", driver)
            monkeypatch.setattr(module, "torch", fake_torch)
        monkeypatch.setattr(rig_module, "Kernels", lambda layout, *_, **__: EmulatedKernels(layout))
        yield gpu


def make_rig(host: HostFrames, order: str = "ascending", slot_parts: int = 2) -> Rig:
    tuning = Tuning(2, slot_parts * PART)
    return Rig(Case(PAGE, 1), host, CHUNKS * PAGE, tuning, frame_order=order)


@pytest.mark.parametrize("order", FRAME_ORDERS)
@pytest.mark.parametrize("what", ["save", "save_idle", "load", "both"])
def test_a_run_is_timed_from_its_data_to_its_last_byte(
    what: str, order: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "SLOTS_AHEAD", 2)
    host = HostFrames(2 * CHUNKS * PART)
    link = Link(gpu, host)
    rig = make_rig(host, order)
    rig.verify()

    def seen(self: Stream, to: int, source: int, num_bytes: int) -> None:
        self.enqueue(lambda: link.move(to, source, num_bytes))

    for _ in range(4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "copy_to_device", seen)
            patch.setattr(Stream, "copy_to_host", seen)
            link.copies.clear()
            link.touched = {"read": set(), "written": set()}
            gates = gpu.num_run
            seconds, _ = rig.seconds(what)
        begin = rig._begin.last.at  # type: ignore[attr-defined]
        assert sum(num_bytes for _, num_bytes in link.copies) == CHUNKS * PAGE * (
            2 if what == "both" else 1
        )
        assert not link.touched["read"] & link.touched["written"], (
            "a block is loaded and saved at the same time"
        )
        assert begin <= min(when for when, _ in link.copies), (
            "a copy began before the measured time"
        )
        assert max(when for when, _ in link.copies) <= begin + seconds, (
            "a copy ended after the measured time"
        )
        assert (begin - gates >= GATE_COMMANDS) == (what in ("save", "both"))
    rig.close()


@pytest.mark.parametrize("order", FRAME_ORDERS)
def test_saves_during_loads_use_frames_that_are_not_read(order: str, gpu: Gpu) -> None:
    rig = make_rig(HostFrames(2 * CHUNKS * PART), order)
    frames = {
        name: [copy.frame for copy in plan.chunks]
        for name, plan in (
            ("saved", rig.save_plan()),
            ("loaded", rig.load_plan()),
            ("elsewhere", rig.save_plan(elsewhere=True)),
        )
    }
    assert frames["saved"] == frames["loaded"] and sorted(frames["saved"]) == list(range(CHUNKS))
    assert sorted(frames["elsewhere"]) == list(range(CHUNKS, 2 * CHUNKS))
    rig.close()


def test_a_run_that_moved_less_is_no_run(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover without free slots drops copies, so the rate would include bytes that were never
    copied.
    """
    rig = make_rig(HostFrames(2 * CHUNKS * PART), slot_parts=1)
    rig.verify()
    monkeypatch.setattr(saves, "MAX_PIECES", 3)
    with pytest.raises(RuntimeError, match="saves failed; 0 of 0 loads"):
        rig.seconds("save")
    with pytest.raises(RuntimeError, match="saves failed; 0 of 0 loads"):
        copy_bench.rig_interference(rig, lambda: None, "save")
    rig.close()


def test_a_run_with_a_wrong_byte_is_no_run(gpu: Gpu) -> None:
    host = HostFrames(2 * CHUNKS * PART)
    rig = make_rig(host)
    rig.verify()
    host.bytes[3 * PART + 7] ^= 1
    rig.mover.begin_step((), has_loads=True)
    rig.start_load()
    with pytest.raises(RuntimeError, match="1 bad block"):
        rig.check(rig.mover.drain(), saves=False, loads=True)
    rig.close()


def test_a_ceiling_keeps_its_memory_while_it_is_registered(gpu: Gpu) -> None:
    host = HostFrames(8 * PAGE)
    alive = weakref.ref(host)
    ceiling = Ceiling(host, 4 * PAGE)
    del host
    gc.collect()
    assert alive() is not None
    ceiling.close()
