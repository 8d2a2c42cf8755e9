"""One direction of copies: staging slots, their streams, and the order of kernels and copies.

Kernel and copy engine work on different slots at the same time. Everything is queued on the GPU;
only `stop` waits on the host. Must not depend on plans, keys or the meaning of tags.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.kernels import (
    CTA_THREADS,
    MAX_SEGMENTS,
    PART,
    SEGMENT,
    WARPS_PER_CTA,
    Kernels,
    PieceParams,
)
from kvloft.transfer.cuda.pieces import Piece
from kvloft.transfer.frames import FrameMemory

MAX_PIECES: Final = 256
"""Limit of queued and submitted pieces in one direction: about 95 ms of PCIe Gen5 with slots of 20
MiB.
"""

FEW_RUNS: Final = 2
FEW_ROWS: Final = 8
"""In a piece with more than FEW_RUNS runs, runs of up to FEW_ROWS rows are one batch: the link
idles 5 us between commands.
"""

MIN_SLOT_BYTES: Final = 256 << 10
_ALIGN: Final = 4096


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of copies on one device.

    Every piece is staged. Pages of 4 KiB to 2 MiB then reach 98 % of the rate of one large copy
    (benches/results). A kernel that accesses frames directly was not faster in any measured case.
    """

    num_slots: int = 2
    slot_bytes: int = 40 << 20
    """A kernel that fills the GPU delays the next gather, so the slots of a direction must hold the
    bytes that the link moves meanwhile: an 8192^3 matmul takes 1.4 to 1.6 ms, and 80 MiB take 1.5
    ms.
    """
    num_ctas: int = 66
    """One CTA for half of the SMs, by default of an H200. A piece takes 35 us instead of 30, and
    other kernels keep the other half: a matmul during a save takes 1.00 of its time alone, 1.13
    with all SMs, and 1.10 with a quarter.
    """

    @classmethod
    def of(cls, staging_bytes: int, num_sms: int) -> Tuning:
        """Return the tuning for ``staging_bytes`` per direction. Raises ValueError if slots would
        be below MIN_SLOT_BYTES.
        """
        return cls(slot_bytes=cls.slot_bytes_of(staging_bytes), num_ctas=max(1, num_sms // 2))

    @classmethod
    def slot_bytes_of(cls, staging_bytes: int) -> int:
        """Return the bytes of a slot, before it is fitted to chunks. Raises as `of`."""
        slot_bytes = staging_bytes // cls().num_slots // _ALIGN * _ALIGN
        if slot_bytes < MIN_SLOT_BYTES:
            raise ValueError(
                f"{staging_bytes} bytes of staging are too few; use at least "
                f"{cls().num_slots * MIN_SLOT_BYTES}"
            )
        return slot_bytes

    def fitted(self, chunk_bytes: int, least: int = 0) -> Tuning:
        """Return a tuning whose slots hold a whole number of chunks and at least ``least`` bytes,
        if one chunk fits.

        A slot that is not full leaves the link idle.
        """
        if chunk_bytes > self.slot_bytes:
            return self
        return replace(
            self, slot_bytes=max(least, round(self.slot_bytes / chunk_bytes) * chunk_bytes)
        )

    def halved(self, chunk_bytes: int) -> Tuning:
        """Return a tuning with twice as many slots of half the size, if one chunk fits."""
        num_chunks = self.slot_bytes // 2 // chunk_bytes
        if not num_chunks:
            return self
        return replace(self, num_slots=2 * self.num_slots, slot_bytes=num_chunks * chunk_bytes)


@dataclass(slots=True)
class _Slot:
    """Device memory for one piece at a time, free once ``freed`` has passed.

    Each slot has a stream for its copies. A copy engine stays with a stream while the stream has a
    copy that can start. A slot's next copy cannot start before the kernel has used the slot, so
    copies of other streams wait for at most one copy of each slot.
    """

    address: int
    copy_stream: driver.Stream
    kernel_stream: driver.Stream
    params: Sequence[_Params]
    """Of each kind of pages."""
    freed: driver.Event | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A submitted piece: its source has been read once ``read`` has passed; copy and ``tags`` are
    complete after ``done``.
    """

    read: driver.Event
    done: driver.Event
    tags: npt.NDArray[np.uint64]
    """[MAX_SEGMENTS]: the sum of each segment."""
    used: npt.NDArray[np.uint64]
    """[MAX_SEGMENTS]: for saves that encode, the size of each segment's records in units of 16
    bytes.
    """
    tags_address: int


class Lane:
    """Copies of one direction. Saves: paged KV -> slot -> frames. Loads: frames -> slot -> paged
    KV.
    """

    def __init__(
        self,
        kinds: Sequence[Kernels],
        tuning: Tuning,
        frames: Sequence[FrameMemory],
        *,
        to_host: bool,
    ) -> None:
        """Allocate the slots, which pieces of all ``kinds`` of pages use. ``frames``: of each
        kind.
        """
        device, slot_bytes = kinds[0].tiles.device, tuning.slot_bytes
        self._to_host, self._frames = to_host, frames
        self._encodes = [kernels.encodes for kernels in kinds]
        # Encoding and decoding use all SMs, with two CTAs each. With fewer CTAs, a piece is too
        # slow between kernels that fill the GPU (docs/design/compression.md).
        self._num_ctas = [
            4 * tuning.num_ctas if kernels.encodes else tuning.num_ctas for kernels in kinds
        ]
        self._functions = [kernels.gather if to_host else kernels.scatter for kernels in kinds]
        # Zeroed, so that an error in copies cannot expose data of another process.
        self._staging = torch.zeros(
            tuning.num_slots * slot_bytes + _ALIGN, dtype=torch.uint8, device=device
        )
        base = -(-self._staging.data_ptr() // _ALIGN) * _ALIGN
        self._slots = deque(
            _Slot(
                base + i * slot_bytes,
                driver.Stream.create(),
                driver.Stream.create(),
                [
                    _Params(each, memory.part_room)
                    for each, memory in zip(kinds, frames, strict=True)
                ],
            )
            for i in range(tuning.num_slots)
        )
        """The slot of the next piece is first."""
        self.copy_streams = tuple(slot.copy_stream for slot in self._slots)
        self.kernel_streams = tuple(slot.kernel_stream for slot in self._slots)
        self._tags_address = driver.host_alloc(MAX_PIECES * 2 * MAX_SEGMENTS * 8)
        raw = (ctypes.c_uint64 * (MAX_PIECES * 2 * MAX_SEGMENTS)).from_address(self._tags_address)
        rows = np.frombuffer(raw, dtype=np.uint64).reshape(MAX_PIECES, 2, MAX_SEGMENTS)
        self._places = [
            Sent(
                driver.Event(), driver.Event(), row[0], row[1], self._tags_address + i * row.nbytes
            )
            for i, row in enumerate(rows)
        ]
        self._next_place = cycle(self._places)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def next_kernel_stream(self, kind: int) -> driver.Stream:
        """Return the stream of the next kernel, for pages of ``kind``.

        Kernels that encode or decode have a stream per slot. When a kernel that fills the GPU ends,
        those of all free slots start before the next one of the engine. Others are fast enough to
        follow each other.
        """
        return self._slots[0].kernel_stream if self._encodes[kind] else self.kernel_streams[0]

    def submit(self, piece: Piece, *, kind: int = 0, is_registered: bool = True) -> Sent:
        """Queue one piece of pages of ``kind``. Its `Sent` is reused after MAX_PIECES pieces.

        It follows the piece before it in its slot. Saves to frames that are not registered do
        nothing.
        """
        sent, slot, kernels = next(self._next_place), self._slots[0], self.next_kernel_stream(kind)
        launch = partial(self._launch, piece, kind, sent, slot, kernels)
        copy = partial(self._copy, piece, self._frames[kind], slot, is_registered=is_registered)
        steps = ((kernels, launch), (slot.copy_stream, copy))
        (first, begin), (second, finish) = steps if self._to_host else steps[::-1]
        has_work = is_registered or not self._to_host
        self._slots.rotate(-1)
        if slot.freed is not None:
            first.wait(slot.freed)
        slot.freed = sent.done
        if has_work:
            begin()
        sent.read.record(first)
        second.wait(sent.read)
        if has_work:
            finish()
        sent.done.record(second)
        return sent

    def stop(self) -> None:
        """Wait until no work of this lane runs, including work that failed."""
        for stream in (*self.kernel_streams, *self.copy_streams):
            with contextlib.suppress(driver.CudaError):
                stream.synchronize()

    def close(self) -> None:
        """Wait as `stop` does, and release all resources."""
        self.stop()
        driver.host_free(self._tags_address)
        for sent in self._places:
            sent.read.destroy()
            sent.done.destroy()
        for stream in (*self.kernel_streams, *self.copy_streams):
            stream.destroy()

    def _launch(
        self, piece: Piece, kind: int, sent: Sent, slot: _Slot, stream: driver.Stream
    ) -> None:
        """Launch the kernel with at least one CTA, which writes sums of 0 if there are no pages."""
        address = slot.params[kind].filled(piece, slot.address, sent.tags_address)
        num_ctas = max(1, min(self._num_ctas[kind], -(-piece.num_tiles // WARPS_PER_CTA)))
        stream.launch(self._functions[kind], num_ctas, CTA_THREADS, address)

    def _copy(self, piece: Piece, frames: FrameMemory, slot: _Slot, *, is_registered: bool) -> None:
        """Copy the piece's runs between ``slot`` and the frames. The driver uses its buffers for
        frames not registered.
        """
        stream, pitch, stride = slot.copy_stream, frames.frame_bytes, piece.slot_stride
        host: list[int] = []
        device: list[int] = []
        num_bytes: list[int] = []
        few_rows = FEW_ROWS if len(piece.runs) > FEW_RUNS else 1
        for run in piece.runs:
            host_at = frames.part(run.frame) + run.part_offset
            device_at = slot.address + run.slot_offset
            if run.num_rows > few_rows:
                stream.copy_rows(
                    host=host_at,
                    host_pitch=pitch,
                    device=device_at,
                    device_pitch=stride,
                    row_bytes=run.row_bytes,
                    num_rows=run.num_rows,
                    to_host=self._to_host,
                )
                continue
            host.extend(host_at + row * pitch for row in range(run.num_rows))
            device.extend(device_at + row * stride for row in range(run.num_rows))
            num_bytes.extend(run.row_bytes for _ in range(run.num_rows))
        to, source = (host, device) if self._to_host else (device, host)
        if len(host) > 1 and is_registered:
            stream.copy_batch(to, source, num_bytes)
        else:
            one_by_one = stream.copy_to_host if self._to_host else stream.copy_to_device
            for each in zip(to, source, num_bytes, strict=True):
                one_by_one(*each)


class _Params:
    """Parameters of one slot's launches, reused by each; a launch copies them before it returns."""

    def __init__(self, kernels: Kernels, part_room: int) -> None:
        self._sums = torch.zeros(
            2 * MAX_SEGMENTS + 1, dtype=torch.int64, device=kernels.tiles.device
        )
        # Zeros before any launch; not in a step.
        torch.cuda.current_stream(kernels.tiles.device).synchronize()
        self._tiles, sums = kernels.tiles, self._sums.data_ptr()
        self._params = PieceParams(
            tiles=kernels.tiles.data_ptr(),
            sums=sums,
            num_done=sums + 8 * MAX_SEGMENTS,
            num_planes=kernels.num_planes,
            block_bytes=kernels.block_tiles.block_bytes,
            tiles_per_block=kernels.block_tiles.tiles_per_block,
            num_used=sums + 8 * (MAX_SEGMENTS + 1),
            part_room=part_room,
        )
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._address = ctypes.addressof(self._pointers)
        self._segments = np.frombuffer(self._params.segments, dtype=SEGMENT)
        self._written: npt.NDArray[Any] | None = None
        """The segments at the start of ``_segments``. Pieces of full chunks share them, so they
        must not be modified.
        """
        self._block_ids = np.frombuffer(self._params.block_ids, dtype=np.int32)
        self._parts = np.frombuffer(self._params.parts, dtype=PART)

    def filled(self, piece: Piece, base: int, tags_out: int) -> int:
        """Fill in ``piece`` in the slot at ``base``; returns the address of the pointers to
        parameters.

        The kernel writes sums to ``tags_out`` as u64, and the sizes of encoded records after
        MAX_SEGMENTS of them.
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
