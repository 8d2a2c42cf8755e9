"""One direction of copies: its streams, its ring, and the order of kernel, copy engine and slots between them.

Kernel and copy engine work on different slots at once. Everything is queued on the GPU; only `wait_for` and `stop` wait on the
host. It must not know plans, keys or tags' meaning.
"""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.frame_memory import FrameMemory
from kvloft.transfer.cuda.kernels import MAX_SEGMENTS, Kernels, Launcher
from kvloft.transfer.cuda.pieces import Piece, Run
from kvloft.transfer.cuda.staging import Ring, RingSize

MAX_PIECES: Final = 128
"""Queued and in flight in one direction; with 40 MiB slots this is some 95 ms of PCIe Gen5."""

FEW_RUNS: Final = 2
FEW_ROWS: Final = 8
"""Of a piece with more runs than that, those of so few rows go in one batch: the link idles for 5 us between commands."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How copies are made on one device.

    Every piece is staged. With that, pages of 4 KiB to 2 MiB reach 98 % of one large copy (benches/results/h200-2026-11-22); no
    measured row shows a kernel that reads or writes the frames itself to be faster.
    """

    ring: RingSize = field(default_factory=RingSize.of)
    num_ctas: int = 66
    """A CTA for half of the SMs, by default an H200's: a piece takes 35 us instead of 30, and what computes beside it keeps the
    other half (a matmul beside a save: 1.00 of its time alone, 1.13 with all SMs, 1.10 with a quarter)."""


class _BaseLane(ABC):
    """Streams, events and tag memory that both directions have."""

    def __init__(self, kernels: Kernels, tuning: Tuning, frames: FrameMemory) -> None:
        self.kernel_stream = driver.Stream.create()
        self.copy_streams = tuple(driver.Stream.create() for _ in range(tuning.ring.num_slots))
        """One a slot. A copy engine stays with a stream while that has a copy that may start, then turns to the next; a slot's next
        copy may not start before the kernel had the slot, so others' copies wait for one copy of each slot and no longer."""
        self.last_copy_stream = self.copy_streams[0]
        """The one that the last piece went by."""
        self._launcher = Launcher(kernels, self.kernel_stream)
        self._ring = Ring(tuning.ring, kernels.tiles.device)
        self._frames = frames
        self._num_ctas = tuning.num_ctas
        self._kernel_done = [driver.Event() for _ in range(MAX_PIECES)]
        self._copy_done = [driver.Event() for _ in range(MAX_PIECES)]
        self._tags_address = driver.host_alloc(MAX_PIECES * MAX_SEGMENTS * 8)
        raw = (ctypes.c_uint64 * (MAX_PIECES * MAX_SEGMENTS)).from_address(self._tags_address)
        self._tags = np.frombuffer(raw, dtype=np.uint64).reshape(MAX_PIECES, MAX_SEGMENTS)
        self._next = 0
        self._num_landed = 0

    def is_full(self, num_flying: int) -> bool:
        return num_flying >= MAX_PIECES

    @abstractmethod
    def done_event(self, ticket: int) -> driver.Event: ...

    def is_done(self, ticket: int) -> bool:
        return self.done_event(ticket).is_done()

    def wait_for(self, ticket: int) -> None:
        self.done_event(ticket).synchronize()

    def take_tags(self, ticket: int, num_segments: int) -> npt.NDArray[np.uint64]:
        """The sums of a piece that is done; a piece is taken once, oldest first."""
        self._num_landed = ticket + 1
        return self._tags[ticket % MAX_PIECES, :num_segments]

    def stop(self) -> None:
        """Until nothing of this lane runs any more, whatever became of it."""
        for stream in (self.kernel_stream, *self.copy_streams):
            with contextlib.suppress(driver.CudaError):
                stream.synchronize()

    def close(self) -> None:
        """Give everything back; nothing may be in flight but what `stop` waits for."""
        self.stop()
        driver.host_free(self._tags_address)
        for event in (*self._kernel_done, *self._copy_done):
            event.destroy()
        self.kernel_stream.destroy()
        for stream in self.copy_streams:
            stream.destroy()

    def _launch(self, function: Any, piece: Piece, ticket: int, slot: int) -> None:
        tags_out = self._tags_address + ticket % MAX_PIECES * MAX_SEGMENTS * 8
        self._launcher.launch(
            function, segments=piece.segments, num_segments=piece.num_segments, base=slot, num_tiles=piece.num_tiles,
            block_ids=piece.block_ids, tags_out=tags_out, max_ctas=self._num_ctas,
        )  # fmt: skip

    def _copy(self, stream: driver.Stream, piece: Piece, slot: int, *, to_host: bool, is_pinned: bool = True) -> None:
        """Move the piece's runs between ``slot`` and the frames."""
        host: list[int] = []
        device: list[int] = []
        num_bytes: list[int] = []
        few_rows = FEW_ROWS if len(piece.runs) > FEW_RUNS else 1
        for run in piece.runs:
            if run.num_rows > few_rows:
                self._copy_rows(stream, run, slot, to_host=to_host)
                continue
            for row in range(run.num_rows):
                host.append(self._frames.part(run.frame + row) + run.part_offset)
                device.append(slot + run.slot_offset + row * self._frames.part_bytes)
                num_bytes.append(run.row_bytes)
        if len(host) > 1 and is_pinned:
            to, source = (host, device) if to_host else (device, host)
            stream.copy_batch(to, source, num_bytes)
        else:
            one_by_one = stream.copy_to_host if to_host else stream.copy_to_device
            for each in zip(*((host, device) if to_host else (device, host)), num_bytes, strict=True):
                one_by_one(*each)

    def _copy_rows(self, stream: driver.Stream, run: Run, slot: int, *, to_host: bool) -> None:
        host, device = self._frames.part(run.frame) + run.part_offset, slot + run.slot_offset
        host_pitch, device_pitch = self._frames.frame_bytes, self._frames.part_bytes
        to, source = (host, device) if to_host else (device, host)
        to_pitch, source_pitch = (host_pitch, device_pitch) if to_host else (device_pitch, host_pitch)
        stream.copy_rows(
            to=to, to_pitch=to_pitch, source=source, source_pitch=source_pitch, row_bytes=run.row_bytes, num_rows=run.num_rows,
            to_host=to_host,
        )  # fmt: skip


class SaveLane(_BaseLane):
    """Paged KV -> slot -> frames."""

    def __init__(self, kernels: Kernels, tuning: Tuning, frames: FrameMemory) -> None:
        super().__init__(kernels, tuning, frames)
        self._function = kernels.gather

    def submit(self, piece: Piece) -> int:
        """Queue one piece. Returns its ticket, counting up."""
        ticket, self._next = self._next, self._next + 1
        gathered, copied = self._kernel_done[ticket % MAX_PIECES], self._copy_done[ticket % MAX_PIECES]
        self.last_copy_stream = stream = self.copy_streams[self._ring.next_slot]
        slot = self._ring.take(self.kernel_stream, copied)
        self._launch(self._function, piece, ticket, slot)
        gathered.record(self.kernel_stream)
        stream.wait(gathered)
        self._copy(stream, piece, slot, to_host=True)
        copied.record(stream)
        return ticket

    def skip(self) -> int:
        """The next ticket, for a piece that is not copied."""
        ticket, self._next = self._next, self._next + 1
        for event in (self._kernel_done[ticket % MAX_PIECES], self._copy_done[ticket % MAX_PIECES]):
            event.record(self.kernel_stream)
        return ticket

    def done_event(self, ticket: int) -> driver.Event:
        """Passes when the payload is in the frames."""
        return self._copy_done[ticket % MAX_PIECES]

    def order_after_gather(self, stream: driver.Stream, ticket: int) -> None:
        """Let ``stream`` go on only when piece ``ticket``, and all before it, have read the paged blocks."""
        if ticket >= self._num_landed:
            stream.wait(self._kernel_done[ticket % MAX_PIECES])


class LoadLane(_BaseLane):
    """Frames -> slot -> paged KV."""

    def __init__(self, kernels: Kernels, tuning: Tuning, frames: FrameMemory) -> None:
        super().__init__(kernels, tuning, frames)
        self._function = kernels.scatter

    def submit(self, piece: Piece, *, is_pinned: bool = True) -> int:
        """As `SaveLane.submit`. Frames that are not pinned are copied too, through the driver's own buffers."""
        ticket, self._next = self._next, self._next + 1
        scattered, copied = self._kernel_done[ticket % MAX_PIECES], self._copy_done[ticket % MAX_PIECES]
        self.last_copy_stream = stream = self.copy_streams[self._ring.next_slot]
        slot = self._ring.take(stream, scattered)
        self._copy(stream, piece, slot, to_host=False, is_pinned=is_pinned)
        copied.record(stream)
        self.kernel_stream.wait(copied)
        self._launch(self._function, piece, ticket, slot)
        scattered.record(self.kernel_stream)
        return ticket

    def done_event(self, ticket: int) -> driver.Event:
        """Passes when the pages are in place and the tags known."""
        return self._kernel_done[ticket % MAX_PIECES]
