"""One direction of copies: its streams, its staging slots, and the order of kernel, copy engine and slots between them.

Kernel and copy engine work on different slots at once. Everything is queued on the GPU; only `stop` waits on the host. It must not
know plans, keys or tags' meaning.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.kernels import CTA_THREADS, MAX_SEGMENTS, PART, SEGMENT, WARPS_PER_CTA, Kernels, PieceParams
from kvloft.transfer.cuda.pieces import Piece
from kvloft.transfer.frames import FrameMemory

MAX_PIECES: Final = 128
"""Queued and in flight in one direction; with 40 MiB slots this is some 95 ms of PCIe Gen5."""

FEW_RUNS: Final = 2
FEW_ROWS: Final = 8
"""Of a piece with more runs than that, those of so few rows go in one batch: the link idles for 5 us between commands."""

MIN_SLOT_BYTES: Final = 256 << 10
_ALIGN: Final = 4096


@dataclass(frozen=True, slots=True)
class Tuning:
    """How copies are made on one device.

    Every piece is staged. With that, pages of 4 KiB to 2 MiB reach 98 % of one large copy (benches/results); no
    measured row shows a kernel that reads or writes the frames itself to be faster.
    """

    num_slots: int = 2
    slot_bytes: int = 40 << 20
    """A kernel that fills the GPU holds the next gather back for its whole length, so the slots of a direction must hold what the
    link takes meanwhile: an 8192^3 matmul lasts 1.4 to 1.6 ms, 80 MiB 1.5 ms."""
    num_ctas: int = 66
    """A CTA for half of the SMs, by default an H200's: a piece takes 35 us instead of 30, and what computes beside it keeps the
    other half (a matmul beside a save: 1.00 of its time alone, 1.13 with all SMs, 1.10 with a quarter)."""

    @classmethod
    def of(cls, staging_bytes: int, num_sms: int) -> Tuning:
        """With so much staging in each direction. Raises ValueError if a slot would be smaller than MIN_SLOT_BYTES."""
        return cls(slot_bytes=cls.slot_bytes_of(staging_bytes), num_ctas=max(1, num_sms // 2))

    @classmethod
    def slot_bytes_of(cls, staging_bytes: int) -> int:
        """Bytes of a slot, before it is fitted to chunks. Raises as `of`."""
        slot_bytes = staging_bytes // cls().num_slots // _ALIGN * _ALIGN
        if slot_bytes < MIN_SLOT_BYTES:
            raise ValueError(f"{staging_bytes} bytes of staging are too few; use at least {cls().num_slots * MIN_SLOT_BYTES}")
        return slot_bytes

    def fitted(self, chunk_bytes: int, least: int = 0) -> Tuning:
        """Slots of the nearest whole number of chunks, if one fits at all: a slot that is not full keeps the link waiting.

        ``least``: what a slot must hold.
        """
        if chunk_bytes > self.slot_bytes:
            return self
        return replace(self, slot_bytes=max(least, round(self.slot_bytes / chunk_bytes) * chunk_bytes))


@dataclass(slots=True)
class _Slot:
    """A place in HBM for one piece at a time, free again once ``freed`` has passed.

    Each has a stream for its copies. A copy engine stays with a stream while that has a copy that may start, then takes the next; a
    slot's next copy may not start before the kernel had the slot, so others' copies wait for one copy of each slot and no longer.
    """

    address: int
    stream: driver.Stream
    freed: driver.Event | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A piece on the GPU: it is out of its source once ``read`` has passed, and with ``done`` all of it is, ``tags`` too."""

    read: driver.Event
    done: driver.Event
    tags: npt.NDArray[np.uint64]
    """[MAX_SEGMENTS], the sum of each of its segments."""
    used: npt.NDArray[np.uint64]
    """[MAX_SEGMENTS], of a save that encodes: 16-byte units of each segment's records."""
    tags_address: int


class Lane:
    """Saves: paged KV -> slot -> frames. Loads: frames -> slot -> paged KV."""

    def __init__(self, kinds: Sequence[Kernels], tuning: Tuning, frames: FrameMemory, *, to_host: bool) -> None:
        """Allocates the slots, which pieces of all ``kinds`` of pages go through."""
        device, slot_bytes = kinds[0].tiles.device, tuning.slot_bytes
        self._to_host, self._frames = to_host, frames
        # Encoding and decoding use all SMs: with half of them, a piece takes too long to run between two kernels that fill the GPU
        # (loads with 8192^3 matmuls on an H100: 36 GB/s with half of the SMs, 54 with all).
        self._num_ctas = [2 * tuning.num_ctas if kernels.encodes else tuning.num_ctas for kernels in kinds]
        self._functions = [kernels.gather if to_host else kernels.scatter for kernels in kinds]
        self.kernel_stream = driver.Stream.create()
        self.copy_streams = tuple(driver.Stream.create() for _ in range(tuning.num_slots))
        self.last_copy_stream = self.copy_streams[0]
        """The one that the last piece went by."""
        # Zeroed, so that a mistake in what is copied could not show another process's old data.
        self._staging = torch.zeros(tuning.num_slots * slot_bytes + _ALIGN, dtype=torch.uint8, device=device)
        base = -(-self._staging.data_ptr() // _ALIGN) * _ALIGN
        self._slots = cycle([_Slot(base + i * slot_bytes, stream) for i, stream in enumerate(self.copy_streams)])
        self._params = [_Params(kernels, frames.part_room) for kernels in kinds]
        self._tags_address = driver.host_alloc(MAX_PIECES * 2 * MAX_SEGMENTS * 8)
        raw = (ctypes.c_uint64 * (MAX_PIECES * 2 * MAX_SEGMENTS)).from_address(self._tags_address)
        rows = np.frombuffer(raw, dtype=np.uint64).reshape(MAX_PIECES, 2, MAX_SEGMENTS)
        self._places = [
            Sent(driver.Event(), driver.Event(), row[0], row[1], self._tags_address + i * row.nbytes) for i, row in enumerate(rows)
        ]
        self._next_place = cycle(self._places)

    def submit(self, piece: Piece, *, kind: int = 0, is_pinned: bool = True) -> Sent:
        """Queue one piece, of pages of ``kind``; MAX_PIECES later its `Sent` is used again.

        Nothing is saved to frames that are not pinned.
        """
        sent = next(self._next_place)
        if self._to_host and not is_pinned:
            sent.read.record(self.kernel_stream)
            sent.done.record(self.kernel_stream)
            return sent
        slot = next(self._slots)
        self.last_copy_stream = slot.stream
        launch, copy = partial(self._launch, piece, kind, sent, slot), partial(self._copy, piece, slot, is_pinned=is_pinned)
        steps = ((self.kernel_stream, launch), (slot.stream, copy))
        (first, begin), (second, finish) = steps if self._to_host else steps[::-1]
        if slot.freed is not None:
            first.wait(slot.freed)
        slot.freed = sent.done
        begin()
        sent.read.record(first)
        second.wait(sent.read)
        finish()
        sent.done.record(second)
        return sent

    def stop(self) -> None:
        """Wait until nothing of this lane runs, whatever became of it."""
        for stream in (self.kernel_stream, *self.copy_streams):
            with contextlib.suppress(driver.CudaError):
                stream.synchronize()

    def close(self) -> None:
        """Give everything back; nothing may be in flight but what `stop` waits for."""
        self.stop()
        driver.host_free(self._tags_address)
        for sent in self._places:
            sent.read.destroy()
            sent.done.destroy()
        for stream in (self.kernel_stream, *self.copy_streams):
            stream.destroy()

    def _launch(self, piece: Piece, kind: int, sent: Sent, slot: _Slot) -> None:
        """One CTA at least: where there are no pages, it says that their sums are 0."""
        address = self._params[kind].filled(piece, slot.address, sent.tags_address)
        num_ctas = max(1, min(self._num_ctas[kind], -(-piece.num_tiles // WARPS_PER_CTA)))
        self.kernel_stream.launch(self._functions[kind], num_ctas, CTA_THREADS, address)

    def _copy(self, piece: Piece, slot: _Slot, *, is_pinned: bool) -> None:
        """Move the piece's runs between ``slot`` and the frames; those not pinned go through the driver's own buffers."""
        stream, pitch, stride = slot.stream, self._frames.frame_bytes, piece.slot_stride
        host: list[int] = []
        device: list[int] = []
        num_bytes: list[int] = []
        few_rows = FEW_ROWS if len(piece.runs) > FEW_RUNS else 1
        for run in piece.runs:
            host_at, device_at = self._frames.part(run.frame) + run.part_offset, slot.address + run.slot_offset
            if run.num_rows > few_rows:
                stream.copy_rows(
                    host=host_at, host_pitch=pitch, device=device_at, device_pitch=stride, row_bytes=run.row_bytes,
                    num_rows=run.num_rows, to_host=self._to_host,
                )  # fmt: skip
                continue
            host.extend(host_at + row * pitch for row in range(run.num_rows))
            device.extend(device_at + row * stride for row in range(run.num_rows))
            num_bytes.extend(run.row_bytes for _ in range(run.num_rows))
        to, source = (host, device) if self._to_host else (device, host)
        if len(host) > 1 and is_pinned:
            stream.copy_batch(to, source, num_bytes)
        else:
            one_by_one = stream.copy_to_host if self._to_host else stream.copy_to_device
            for each in zip(to, source, num_bytes, strict=True):
                one_by_one(*each)


class _Params:
    """Parameters of one stream's launches, used again by each; they are copied before a launch returns."""

    def __init__(self, kernels: Kernels, part_room: int) -> None:
        self._sums = torch.zeros(2 * MAX_SEGMENTS + 1, dtype=torch.int64, device=kernels.tiles.device)
        torch.cuda.current_stream(kernels.tiles.device).synchronize()  # the zeros are there before any launch; not in a step
        self._tiles, sums = kernels.tiles, self._sums.data_ptr()
        self._params = PieceParams(
            tiles=kernels.tiles.data_ptr(), sums=sums, num_done=sums + 8 * MAX_SEGMENTS, num_planes=kernels.num_planes,
            block_bytes=kernels.block_tiles.block_bytes, tiles_per_block=kernels.block_tiles.tiles_per_block,
            num_used=sums + 8 * (MAX_SEGMENTS + 1), part_room=part_room,
        )  # fmt: skip
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._address = ctypes.addressof(self._pointers)
        self._segments = np.frombuffer(self._params.segments, dtype=SEGMENT)
        self._written: npt.NDArray[Any] | None = None
        """What ``_segments`` begins with: of full chunks it is the same piece after piece, so a piece's must not change."""
        self._block_ids = np.frombuffer(self._params.block_ids, dtype=np.int32)
        self._parts = np.frombuffer(self._params.parts, dtype=PART)

    def filled(self, piece: Piece, base: int, tags_out: int) -> int:
        """Address of the pointers to parameters, for ``piece`` in the slot at ``base``; its sums go to ``tags_out``, u64 each.

        Of an encoded piece, so does behind MAX_SEGMENTS of them how much its segments' records use.
        """
        if piece.segments is not self._written:
            self._segments[: len(piece.segments)] = self._written = piece.segments
        self._block_ids[: len(piece.block_ids)] = piece.block_ids
        params = self._params
        params.base, params.tags_out, params.used_out = base, tags_out, 0
        if piece.parts is not None:
            self._parts[: len(piece.parts)] = piece.parts
            params.used_out = tags_out + 8 * MAX_SEGMENTS
        params.num_tiles, params.num_segments = piece.num_tiles, piece.num_segments
        return self._address
