"""Emulates a GPU with numpy: the streams, events and kernels that the movers use.

The emulation replaces `driver` and the compiled kernels, and provides exactly CUDA's guarantees:
commands in a stream run in order, an event refers to its most recent record, and commands in
different streams run in random order unless an event orders them. With many seeds, a missing wait
makes a test fail. The tests marked gpu check that the real kernels process bytes in the same way.
"""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import e348
import numpy as np
import pytest
import torch
from kernels_oracle import page_sum

from kvloft.transfer.cuda import kernels as kernels_module
from kvloft.transfer.cuda import mover as mover_module
from kvloft.transfer.cuda.driver import CudaError
from kvloft.transfer.cuda.kernels import TILE, BlockTiles, PieceParams, tile_table, vec_bytes_of
from kvloft.transfer.layout import PagedLayout

NEVER_WRITTEN = 0xFEED_FACE_DEAD_BEEF


class Record:
    """A record of an event. The record is done once the stream has reached it."""

    def __init__(self) -> None:
        self.is_done = False
        self.at = 0
        """Emulated time: the number of commands that all streams had run before the record."""


class Gpu:
    """Streams whose commands run in random order.

    One lock protects all state, because submitters run in threads.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[deque[tuple[Record | None, Callable[[], None]]]] = []
        self.compute = Stream(self)
        self.is_broken = False
        self.kept: list[Any] = []
        self.registered: dict[int, int] = {}
        """Maps the address of each registered range to the range's size in bytes."""
        self.num_run = 0

    def check(self) -> None:
        if self.is_broken:
            raise CudaError("CUDA_ERROR_ILLEGAL_ADDRESS, injected by the test")

    def check_host(self, address: int, num_bytes: int) -> None:
        """Check that a copy from or to registered memory stays within one registration.

        Copies of other memory (on the device, or pageable) are not checked.
        """
        for begin, size in list(self.registered.items()):
            if address < begin + size and begin < address + num_bytes:
                inside = begin <= address and address + num_bytes <= begin + size
                assert inside, "the driver rejects copies that cross registrations"

    def check_registered(self, address: int, num_bytes: int) -> None:
        ranges = list(self.registered.items())
        assert any(
            begin <= address and address + num_bytes <= begin + size for begin, size in ranges
        ), "a kernel would fault on unregistered memory"

    def advance(self, num_commands: int) -> None:
        """Run at most ``num_commands`` ready commands."""
        with self.lock:
            for _ in range(num_commands):
                ready = [s for s in self.streams if s and (s[0][0] is None or s[0][0].is_done)]
                if not ready or self.is_broken:
                    return
                self.random.choice(ready).popleft()[1]()
                self.num_run += 1

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                self.check()
                if is_over():
                    return
                before = self.num_run
                self.advance(1)
                assert self.num_run > before, "the GPU waits for a command that was not enqueued"

    def stop_forever(self) -> None:
        """Emulate a sticky error: enqueued commands never run, and every call fails."""
        with self.lock:
            self.is_broken = True
            for stream in self.streams:
                stream.clear()

    @property
    def is_idle(self) -> bool:
        return not any(self.streams)


class Stream:
    """Replaces driver.Stream."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.queue: deque[tuple[Record | None, Callable[[], None]]] = deque()
        self.handle = len(gpu.streams)
        gpu.streams.append(self.queue)

    def enqueue(self, action: Callable[[], None], after: Record | None = None) -> None:
        with self.gpu.lock:
            self.gpu.check()
            self.queue.append((after, action))

    def wait(self, event: "Event") -> None:
        if event.last is not None:
            self.enqueue(lambda: None, event.last)

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.queue)

    def copy_to_device(self, to: int, source: int, num_bytes: int) -> None:
        assert num_bytes > 0, "cuMemcpyBatchAsync rejects empty copies"
        self.gpu.check_host(to, num_bytes)
        self.gpu.check_host(source, num_bytes)
        self.enqueue(lambda: ctypes.memmove(to, source, num_bytes))

    copy_to_host = copy_to_device

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
        assert row_bytes <= min(host_pitch, device_pitch), (
            "cuMemcpy2DAsync rejects rows wider than their pitch"
        )
        self.gpu.check_host(host, (num_rows - 1) * host_pitch + row_bytes)
        for row in range(num_rows):
            at = host + row * host_pitch, device + row * device_pitch
            self.copy_to_device(*(at if to_host else at[::-1]), row_bytes)

    def copy_batch(
        self, to: Sequence[int], source: Sequence[int], num_bytes: Sequence[int]
    ) -> None:
        copies = list(zip(to, source, num_bytes, strict=True))
        self.gpu.random.shuffle(copies)
        for each in copies:
            self.copy_to_device(*each)

    def launch(self, function: str, num_ctas: int, num_threads: int, params_address: int) -> None:
        assert num_ctas > 0, "cuLaunchKernel rejects an empty grid"
        pointer = ctypes.c_void_p.from_address(params_address).value
        assert pointer is not None
        params = PieceParams.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(PieceParams)))
        run = run_coder if params.used_out else run_kernel
        self.enqueue(lambda: run(function, params, self.gpu))

    def destroy(self) -> None:
        assert not self.queue or self.gpu.is_broken, "a stream with work was destroyed"


class Event:
    """Replaces driver.Event."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.last: Record | None = None

    def record(self, stream: Stream) -> None:
        record = Record()

        def pass_it() -> None:
            record.is_done, record.at = True, self.gpu.num_run

        stream.enqueue(pass_it)
        self.last = record

    def is_done(self) -> bool:
        with self.gpu.lock:
            self.gpu.check()
            self.gpu.advance(self.gpu.random.randrange(4))
            return self.last is None or self.last.is_done

    def synchronize(self) -> None:
        last = self.last
        self.gpu.run_until(lambda: last is None or last.is_done)

    def seconds_since(self, begin: "Event") -> float:
        assert (
            self.last is not None
            and self.last.is_done
            and begin.last is not None
            and begin.last.is_done
        )
        return float(self.last.at - begin.last.at)

    def destroy(self) -> None: ...


def run_kernel(verb: str, params: PieceParams, gpu: Gpu) -> None:
    """Emulate chunks.cu: move every tile of a piece, in random order, and compute the tags."""
    tiles = np.frombuffer(
        ctypes.string_at(params.tiles, TILE.itemsize * params.tiles_per_block), TILE
    )
    segments = np.frombuffer(params.segments, kernels_module.SEGMENT)[: params.num_segments]
    first_tiles = segments["first_tile"].tolist()
    assert first_tiles[0] == 0 and first_tiles == sorted(first_tiles)
    sums = [0] * params.num_segments
    order = list(range(params.num_tiles))
    gpu.random.shuffle(order)
    for number in order:
        at = int(np.searchsorted(segments["first_tile"], number, side="right")) - 1
        segment = segments[at]
        block, rest = divmod(
            int(segment["chunk_tile"]) + number - first_tiles[at], params.tiles_per_block
        )
        tile = tiles[rest]
        num_bytes = int(tile["num_bytes"])
        block_id = int(params.block_ids[int(segment["block_index"]) + block])
        page = int(tile["base"]) + block_id * int(tile["block_stride"]) if block_id >= 0 else None
        payload = (
            params.base
            + int(segment["base"])
            + block * params.block_bytes
            + int(tile["payload_offset"])
        ) % 2**64
        if verb == "gather":
            if page is None:
                continue
            ctypes.memmove(payload, page, num_bytes)
        elif page is not None:
            ctypes.memmove(page, payload, num_bytes)
        words = np.frombuffer(ctypes.string_at(payload, num_bytes), np.uint8)
        sums[at] += page_sum(
            words, block * params.num_planes + int(tile["plane"]), int(tile["first_word"])
        )
    tags_out = (ctypes.c_uint64 * params.num_segments).from_address(params.tags_out)
    tags_out[:] = [total % 2**64 for total in sums]


def run_coder(verb: str, params: PieceParams, gpu: Gpu) -> None:
    """Emulate e348.cu: encode or decode complete chunks. Records are in random order, and data
    beyond the width is in host memory.
    """
    tiles = np.frombuffer(
        ctypes.string_at(params.tiles, TILE.itemsize * params.tiles_per_block), TILE
    )
    segments = np.frombuffer(params.segments, kernels_module.SEGMENT)[: params.num_segments]
    parts = np.frombuffer(params.parts, kernels_module.PART)
    ends = [*segments["first_tile"][1:].tolist(), params.num_tiles]
    sums, used = [0] * params.num_segments, [0] * params.num_segments
    for at, (segment, part) in enumerate(zip(segments, parts[: params.num_segments], strict=True)):
        slot, host, width = (
            params.base + int(segment["base"]),
            int(part["address"]),
            int(part["width"]),
        )
        count = ends[at] - int(segment["first_tile"])
        table_bytes = -(-8 * count // 16) * 16
        order = list(range(count))
        gpu.random.shuffle(order)
        for number in order:
            block, rest = divmod(number, params.tiles_per_block)
            tile = tiles[rest]
            num_bytes = int(tile["num_bytes"])
            block_id = int(params.block_ids[int(segment["block_index"]) + block])
            page = (
                int(tile["base"]) + block_id * int(tile["block_stride"]) if block_id >= 0 else None
            )
            if verb == "encode":
                words = ctypes.string_at(page, num_bytes)
                made = e348.encode_tile(words, is_bf16=bool(tile["is_bf16"]))
                begin = table_bytes + 16 * used[at]
                ctypes.memmove(slot + 8 * number, made.entry(used[at]).to_bytes(8, "little"), 8)
                used[at] += len(made.record) // 16
                end = begin + len(made.record)
                if end <= params.part_room:
                    for is_wanted, base in ((begin < width, slot), (end > width, host)):
                        if is_wanted and base == host:
                            gpu.check_registered(base + begin, len(made.record))
                        if is_wanted:
                            ctypes.memmove(base + begin, made.record, len(made.record))
            else:
                begin, end = block * params.block_bytes + int(tile["payload_offset"]), 0
                entry = 0xFFF << 32
                if not part["is_raw"]:
                    entry = int.from_bytes(ctypes.string_at(slot + 8 * number, 8), "little")
                    begin = table_bytes + (entry & 0xFFFFFF) * 16
                end = begin + e348.record_bytes(entry, num_bytes)
                if end > params.part_room or (end > width and not host):
                    continue
                if end > width:
                    gpu.check_registered(host + begin, end - begin)
                words = e348.decode_tile(
                    entry,
                    ctypes.string_at((slot if end <= width else host) + begin, end - begin),
                    num_bytes,
                )
                if page is not None:
                    ctypes.memmove(page, words, num_bytes)
            number_of_page = block * params.num_planes + int(tile["plane"])
            sums[at] += page_sum(
                np.frombuffer(words, np.uint8), number_of_page, int(tile["first_word"])
            )
    tags_out = (ctypes.c_uint64 * params.num_segments).from_address(params.tags_out)
    tags_out[:] = [total % 2**64 for total in sums]
    used_out = (ctypes.c_uint64 * params.num_segments).from_address(params.used_out)
    used_out[:] = used


def fake_driver(gpu: Gpu) -> Any:
    """Return replacements for the functions of `kvloft.transfer.cuda.driver` that the movers
    use.
    """
    registered = gpu.registered

    def host_alloc(num_bytes: int) -> int:
        memory = np.full(-(-num_bytes // 8), NEVER_WRITTEN, np.uint64)
        # Keep the memory until the test ends, so that late writes cannot change reused memory.
        gpu.kept.append(memory)
        return memory.ctypes.data

    stream = SimpleNamespace(create=lambda **_: Stream(gpu), view=lambda _: gpu.compute)
    return SimpleNamespace(
        Stream=stream,
        Event=lambda **_: Event(gpu),
        CudaError=CudaError,
        current_context=lambda: None,
        use_context=lambda _: None,
        host_alloc=host_alloc,
        host_free=lambda _: None,
        registered=registered,
        host_register=registered.__setitem__,
        host_unregister=registered.__delitem__,
        synchronize=lambda: gpu.run_until(lambda: gpu.is_idle),
    )


class EmulatedKernels:
    """Replaces kernels.Kernels without compiling kernels."""

    num_sms = 132

    def __init__(
        self, layout: PagedLayout, *_: object, encodes: bool = False, **__: object
    ) -> None:
        self.gather, self.scatter = ("encode", "decode") if encodes else ("gather", "scatter")
        self.encodes = encodes
        self.vec_bytes = vec_bytes_of(layout)
        self.block_tiles = BlockTiles.of(layout)
        self.num_planes = len(layout.planes)
        self.device, self.tiles = torch.device("cpu"), tile_table(layout)


@contextmanager
def emulated(seed: int = 0) -> Iterator[Gpu]:
    """Make movers that are created in the ``with`` body run on the emulated GPU, with paged KV in
    host memory.
    """
    gpu = Gpu(seed)
    fake = fake_driver(gpu)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mover", "saves", "loads", "shared", "lanes", "submitter", "registration"):
            patch.setattr(f"kvloft.transfer.cuda.{name}.driver", fake)
        patch.setattr(mover_module, "numa_node_of", lambda _: None)
        patch.setattr(mover_module, "_current_stream", lambda _: gpu.compute.handle)
        patch.setattr(
            torch.cuda,
            "current_stream",
            lambda _=None: SimpleNamespace(cuda_stream=0, synchronize=lambda: None),
        )
        patch.setattr(
            mover_module, "ramp", lambda chunks_per_piece, *_: tuple(range(1, chunks_per_piece))
        )  # as with large chunks
        patch.setattr("gpu_support.DEVICE", "cpu")
        patch.setattr("gpu_support.make_kernels", EmulatedKernels)
        yield gpu
        assert not fake.registered or gpu.is_broken, "host memory is still registered"
