"""Measures the link between host and GPU memory, independently of kvloft's mover.

This module provides the host memory for all cases, a large copy whose bandwidth is the mover's
upper limit, and measurements of computation during copies.
"""

import mmap
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from kvloft.transfer.cuda import driver
from kvloft.transfer.frames import FrameMemory

SMALL_BYTES = 128 << 10
FORWARD_CYCLES = 4_000_000
"""Number of clock cycles in a simulated forward pass (about 2 ms)."""


class HostFrames:
    """Anonymous shared memory that holds the frames for all cases."""

    def __init__(self, size_bytes: int) -> None:
        self._map = mmap.mmap(-1, size_bytes)
        self.size_bytes = size_bytes
        self.bytes = np.frombuffer(self._map, np.uint8)

    def memory(self, frame_bytes: int, num_frames: int) -> FrameMemory:
        size_bytes = frame_bytes * num_frames
        assert size_bytes <= self.size_bytes
        return FrameMemory(
            self.bytes.ctypes.data,
            size_bytes,
            frame_bytes,
            frame_bytes,
            0,
            frame_bytes,
            0,
            self._map,
        )


def current_stream() -> driver.Stream:
    """Return torch's current stream."""
    return driver.Stream.view(torch.cuda.current_stream().cuda_stream)


def occupy(then: driver.Event, cycles: int) -> None:
    """Run a kernel for ``cycles`` clock cycles on the current stream. Record ``then`` after it."""
    torch.cuda._sleep(cycles)  # noqa: SLF001 - the only way to keep a stream busy
    then.record(current_stream())


class Ceiling:
    """One large copy-engine transfer in each direction.

    Host memory is registered in one call. Like the rig's copies, 'save' and 'both' are timed from
    the end of a kernel.
    """

    def __init__(self, host: HostFrames, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        # Keep the memory alive: if registered memory is freed, new memory at the same address
        # cannot be registered.
        self._frames = host
        self._host = host.bytes.ctypes.data
        self._device = torch.empty(2 * num_bytes, dtype=torch.uint8, device="cuda")
        self._device.random_(0, 256)
        driver.host_register(self._host, 2 * num_bytes)
        self._up, self._down = driver.Stream.create(), driver.Stream.create()
        self.streams = [self._down, self._up]

    def start(self, what: str) -> None:
        """Start the copies for 'save', 'load', 'both' or 'save_idle' and return immediately."""
        at = self._device.data_ptr()
        if what != "load":
            self._down.copy_to_host(self._host, at, self._num_bytes)
        if what in ("load", "both"):
            self._up.copy_to_device(
                at + self._num_bytes, self._host + self._num_bytes, self._num_bytes
            )

    def seconds(self, what: str) -> float:
        begin, ends = driver.Event(timing=True), []
        driver.synchronize()
        if what in ("save", "both"):
            occupy(begin, FORWARD_CYCLES)
            self._down.wait(begin)
        else:
            begin.record(self._down)
        self._up.wait(begin)
        self.start(what)
        for stream in (self._down, self._up):
            ends.append(driver.Event(timing=True))
            ends[-1].record(stream)
        driver.synchronize()
        return max(end.seconds_since(begin) for end in ends)

    def gbps(self, what: str) -> float:
        """Run the copies once and return the bandwidth in each direction, in GB/s."""
        return self._num_bytes / self.seconds(what) / 1e9

    def close(self) -> None:
        driver.synchronize()
        driver.host_unregister(self._host)


def interference(
    work: Callable[[], object],
    start_copy: Callable[[], None],
    wait_sent: Callable[[], None],
    streams: list[driver.Stream],
    num_reps: int,
) -> tuple[float, float, float]:
    """Return the durations, in seconds, of ``work`` alone, of ``work`` during a copy, and of the
    copy.

    ``wait_sent`` must block until the entire copy is queued on ``streams``. Repetitions of ``work``
    that do not run entirely during the copy are ignored.
    """
    compute = current_stream()

    def timed(count: int) -> list[driver.Event]:
        events = [driver.Event(timing=True) for _ in range(count + 1)]
        events[0].record(compute)
        for event in events[1:]:
            work()
            event.record(compute)
        return events

    timed(5)
    driver.synchronize()
    events = timed(num_reps)
    driver.synchronize()
    alone = statistics.median(b.seconds_since(a) for a, b in pairwise(events))
    zero, ends = driver.Event(timing=True), [driver.Event(timing=True) for _ in streams]
    zero.record(compute)
    for stream in streams:
        stream.wait(zero)
    start_copy()
    events = timed(num_reps)
    wait_sent()
    for end, stream in zip(ends, streams, strict=True):
        end.record(stream)
    driver.synchronize()
    stop = max(end.seconds_since(zero) for end in ends)
    marks = [event.seconds_since(zero) for event in events]
    inside = [b - a for a, b in pairwise(marks) if b <= stop]
    return alone, statistics.mean(inside[1:]) if len(inside) > 3 else float("nan"), stop


def waits(start: Callable[[], None], is_over: Callable[[], bool], what: str) -> list[float]:
    """Run small copies during the copy that ``start`` begins, and return their durations in
    seconds.

    Each small copy transfers `SMALL_BYTES`, like an engine's copies in each step. The small copies
    run in sequence on the compute stream: to the host if ``what`` is 'save', otherwise to the GPU.
    """
    host = torch.empty(SMALL_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cuda")
    to, source = (host, device) if what == "save" else (device, host)
    to.copy_(source)
    driver.synchronize()
    start()
    found: list[float] = []
    while not found or not is_over():
        begin = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        found.append(time.perf_counter() - begin)
    return found
