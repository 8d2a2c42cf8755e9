"""A lane manages one direction's staging slots and streams, and orders kernels and copies.

A kernel and the copy engine work on different slots concurrently. All work is queued on the GPU;
only `stop` and `close` block the host. A lane does not interpret tags.
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
"""Maximum number of pieces per direction that are queued or on the GPU.

With 20 MiB slots, 256 pieces keep a PCIe Gen5 link busy for about 95 ms.
"""

FEW_RUNS: Final = 2
FEW_ROWS: Final = 8
"""If a piece has more than FEW_RUNS runs, all runs with at most FEW_ROWS rows are copied as one
batch, because the link is idle for 5 us between commands.
"""

MIN_SLOT_BYTES: Final = 256 << 10
_ALIGN: Final = 4096


@dataclass(frozen=True, slots=True)
class Tuning:
    """The number and size of staging slots, and the number of CTAs per kernel.

    Every piece passes through a staging slot. With pages of 4 KiB to 2 MiB, copies reach 98% of a
    single large copy's bandwidth (benches/results). In measurements, kernels that access frames
    directly were never faster than staging.
    """

    num_slots: int = 2
    slot_bytes: int = 40 << 20
    """Slot size. An engine kernel that fills the GPU delays the next gather, so a direction's slots
    must keep the link busy until that kernel is done. An 8192^3 matmul takes 1.4 to 1.6 ms, and
    copying 80 MiB takes 1.5 ms.
    """
    num_ctas: int = 66
    """Number of CTAs per kernel. The default is half the number of SMs on an H200, which leaves the
    other SMs to the engine. The kernel for a piece then takes 35 us instead of 30 us, and a save
    does not slow down a matmul. The matmul takes 13% longer if the kernel uses all SMs, and 10%
    longer if it uses a quarter of the SMs.
    """

    @classmethod
    def of(cls, staging_bytes: int, num_sms: int) -> Tuning:
        """Return one direction's tuning for ``staging_bytes`` of device memory.

        Raises ValueError if a slot would be smaller than MIN_SLOT_BYTES.
        """
        return cls(slot_bytes=cls.slot_bytes_of(staging_bytes), num_ctas=max(1, num_sms // 2))

    @classmethod
    def slot_bytes_of(cls, staging_bytes: int) -> int:
        """Return the slot size before `fitted` adjusts it. Raises the same exceptions as `of`."""
        slot_bytes = staging_bytes // cls().num_slots // _ALIGN * _ALIGN
        if slot_bytes < MIN_SLOT_BYTES:
            raise ValueError(
                f"{staging_bytes} bytes is too small for the staging slots; use at least "
                f"{cls().num_slots * MIN_SLOT_BYTES} bytes"
            )
        return slot_bytes

    def fitted(self, chunk_bytes: int, least: int = 0) -> Tuning:
        """Return a tuning whose slots hold a whole number of chunks and at least ``least`` bytes.

        Partly filled slots increase the link's idle time. Returns this tuning if a chunk is larger
        than a slot.
        """
        if chunk_bytes > self.slot_bytes:
            return self
        return replace(
            self, slot_bytes=max(least, round(self.slot_bytes / chunk_bytes) * chunk_bytes)
        )

    def halved(self, chunk_bytes: int) -> Tuning:
        """Return a tuning with twice as many slots, each half the size.

        Returns this tuning if a chunk is larger than half a slot.
        """
        num_chunks = self.slot_bytes // 2 // chunk_bytes
        if not num_chunks:
            return self
        return replace(self, num_slots=2 * self.num_slots, slot_bytes=num_chunks * chunk_bytes)


@dataclass(slots=True)
class _Slot:
    """Device memory for one piece at a time. The slot is free once the event ``freed`` has
    occurred.

    Each slot has a separate stream for copies. A copy engine keeps serving a stream that has a copy
    ready to start. A slot's next copy cannot start before the slot's kernel is done, so copies on
    other streams wait for at most one copy per slot.
    """

    address: int
    copy_stream: driver.Stream
    kernel_stream: driver.Stream
    params: Sequence[_Params]
    """One entry for each page kind."""
    freed: driver.Event | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A submitted piece. Once the event ``read`` has occurred, the source is no longer being read.
    Once the event ``done`` has occurred, the copy and ``tags`` are complete.
    """

    read: driver.Event
    done: driver.Event
    tags: npt.NDArray[np.uint64]
    """The sum of each segment, as an array of shape [MAX_SEGMENTS]."""
    record_units: npt.NDArray[np.uint64]
    """For saves that encode, each segment's total record size in units of 16 bytes, as an array of
    shape [MAX_SEGMENTS].
    """
    tags_address: int


class Lane:
    """Copies pieces in one direction.

    Saves: paged KV -> slot -> frames. Loads: frames -> slot -> paged KV.
    """

    def __init__(
        self,
        kinds: Sequence[Kernels],
        tuning: Tuning,
        frames: Sequence[FrameMemory],
        *,
        to_host: bool,
    ) -> None:
        """Allocate the slots, which all ``kinds`` of pages share.

        ``frames`` has one entry per kind.
        """
        device, slot_bytes = kinds[0].device, tuning.slot_bytes
        self._to_host, self._frames = to_host, frames
        self._encodes = [kernels.encodes for kernels in kinds]
        # Encoding and decoding use two CTAs on every SM. With fewer CTAs, a piece takes too long
        # between engine kernels that fill the GPU (docs/design/compression.md).
        self._num_ctas = [
            4 * tuning.num_ctas if kernels.encodes else tuning.num_ctas for kernels in kinds
        ]
        self._functions = [kernels.gather if to_host else kernels.scatter for kernels in kinds]
        # Zero the memory, so that a bug in copies cannot expose another process's data.
        self._staging = torch.zeros(
            tuning.num_slots * slot_bytes + _ALIGN, dtype=torch.uint8, device=device
        )
        base = -(-self._staging.data_ptr() // _ALIGN) * _ALIGN
        tables = [torch.from_numpy(each.tiles.view(np.uint8)).to(device) for each in kinds]
        self._slots = deque(
            _Slot(
                base + i * slot_bytes,
                driver.Stream.create(),
                driver.Stream.create(),
                [
                    _Params(each, tiles, memory.part_capacity)
                    for each, tiles, memory in zip(kinds, tables, frames, strict=True)
                ],
            )
            for i in range(tuning.num_slots)
        )
        """The next piece uses the first slot."""
        self.copy_streams = tuple(slot.copy_stream for slot in self._slots)
        self.kernel_streams = tuple(slot.kernel_stream for slot in self._slots)
        self._tags_address = driver.host_alloc(MAX_PIECES * 2 * MAX_SEGMENTS * 8)
        raw = (ctypes.c_uint64 * (MAX_PIECES * 2 * MAX_SEGMENTS)).from_address(self._tags_address)
        rows = np.frombuffer(raw, dtype=np.uint64).reshape(MAX_PIECES, 2, MAX_SEGMENTS)
        self._sent = [
            Sent(
                driver.Event(), driver.Event(), row[0], row[1], self._tags_address + i * row.nbytes
            )
            for i, row in enumerate(rows)
        ]
        self._next_sent = cycle(self._sent)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def next_kernel_stream(self, kind: int) -> driver.Stream:
        """Return the stream on which the next kernel for pages of ``kind`` will run.

        Kernels that encode or decode use one stream per slot, so that the kernels for all free
        slots can start as soon as an engine kernel that filled the GPU is done, before the next
        engine kernel starts. All other kernels are fast enough to share a stream.
        """
        return self._slots[0].kernel_stream if self._encodes[kind] else self.kernel_streams[0]

    def submit(self, piece: Piece, *, kind: int = 0, is_registered: bool = True) -> Sent:
        """Queue a piece with pages of ``kind``. The piece runs after the previous piece in its
        slot.

        The returned `Sent` is reused after MAX_PIECES pieces. If the frames are not registered, a
        save copies nothing.
        """
        sent, slot, kernels = next(self._next_sent), self._slots[0], self.next_kernel_stream(kind)
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
        """Wait until no work in this lane is running. Ignores errors."""
        for stream in (*self.kernel_streams, *self.copy_streams):
            with contextlib.suppress(driver.CudaError):
                stream.synchronize()

    def close(self) -> None:
        self.stop()
        driver.host_free(self._tags_address)
        for sent in self._sent:
            sent.read.destroy()
            sent.done.destroy()
        for stream in (*self.kernel_streams, *self.copy_streams):
            stream.destroy()

    def _launch(
        self, piece: Piece, kind: int, sent: Sent, slot: _Slot, stream: driver.Stream
    ) -> None:
        """Launch at least one CTA, so that even a piece with no pages writes sums of 0."""
        address = slot.params[kind].filled(piece, slot.address, sent.tags_address)
        num_ctas = max(1, min(self._num_ctas[kind], -(-piece.num_tiles // WARPS_PER_CTA)))
        stream.launch(self._functions[kind], num_ctas, CTA_THREADS, address)

    def _copy(self, piece: Piece, frames: FrameMemory, slot: _Slot, *, is_registered: bool) -> None:
        """Copy the runs of ``piece`` between ``slot`` and the frames.

        If the frames are not registered, the driver copies through internal staging buffers.
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
    """A slot's launch parameters. All launches for the slot share these parameters, because the
    driver copies them before the launch call returns.
    """

    def __init__(self, kernels: Kernels, tiles: torch.Tensor, part_capacity: int) -> None:
        """Create the parameters. ``tiles`` is the tile table on the device."""
        self._sums = torch.zeros(2 * MAX_SEGMENTS + 1, dtype=torch.int64, device=kernels.device)
        # The sums must be zero before the first launch. Blocking is acceptable at startup.
        torch.cuda.current_stream(kernels.device).synchronize()
        self._tiles, sums = tiles, self._sums.data_ptr()
        self._params = PieceParams(
            tiles=tiles.data_ptr(),
            sums=sums,
            num_done=sums + 8 * MAX_SEGMENTS,
            num_planes=kernels.num_planes,
            block_bytes=kernels.block_tiles.block_bytes,
            tiles_per_block=kernels.block_tiles.tiles_per_block,
            num_used=sums + 8 * (MAX_SEGMENTS + 1),
            part_room=part_capacity,
        )
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._address = ctypes.addressof(self._pointers)
        self._segments = np.frombuffer(self._params.segments, dtype=SEGMENT)
        self._written: npt.NDArray[Any] | None = None
        """The segments last written to ``_segments``. Full pieces share this array, so it must not
        be modified.
        """
        self._block_ids = np.frombuffer(self._params.block_ids, dtype=np.int32)
        self._parts = np.frombuffer(self._params.parts, dtype=PART)

    def filled(self, piece: Piece, base: int, tags_out: int) -> int:
        """Set the parameters for ``piece`` in the slot at ``base``.

        Returns the address of the array of pointers to the parameters. The kernel writes one u64
        sum per segment at ``tags_out`` and, MAX_SEGMENTS words later, the sizes of encoded records.
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
