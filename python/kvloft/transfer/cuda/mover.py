"""CudaMover copies chunks between paged KV in HBM and registered host frames without blocking
steps.

- Saves (`saves`): after the forward pass that wrote a piece, a kernel gathers the piece into a
  staging slot. The copy engine copies the slot to the frames, and the host writes trailers.
- Loads (`loads`): the copy engine copies a piece to a slot. A kernel scatters the piece to paged KV
  and computes its tag.
- Events order the work on the GPU: `begin_step` makes the next forward pass wait for gathers that
  still read blocks that the pass can write (I2). Loads wait for work launched before the step.
- Only a few pieces per direction are on the GPU at any time. One thread per direction (`submitter`)
  submits the rest. Saves to unregistered frames wait for registration.

No step allocates GPU memory or waits for the device.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from kvloft.seam.ids import BlockId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.encoding import PartEncoding, can_encode
from kvloft.transfer.cuda.jobs import LOAD_PREPARE_US, SAVE_PREPARE_US, ramp
from kvloft.transfer.cuda.kernels import KernelError, Kernels
from kvloft.transfer.cuda.lanes import Lane, Tuning
from kvloft.transfer.cuda.loads import Loads
from kvloft.transfer.cuda.pieces import PieceLimits
from kvloft.transfer.cuda.registration import GOOD_PIECE_BYTES, RegisteredRange, numa_node_of
from kvloft.transfer.cuda.saves import Saves
from kvloft.transfer.cuda.shared import PageKind, Shared
from kvloft.transfer.cuda.submitter import Submitter
from kvloft.transfer.cuda.trailers import Trailers
from kvloft.transfer.frames import FrameMemory, GroupFrames
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished
from kvloft.transfer.movers import MoverSettings

logger = logging.getLogger(__name__)

FIRST_KIND: Final = MappingProxyType({(0, 0): 0})
"""Default ``kind_of``, for one KV cache group and one frame size."""
SLOTS_AHEAD = 8
"""Maximum amount of data on the GPU per direction, in slots. 8 slots of 40 MiB keep the link busy
for 6 ms, and a submitter can wait up to 5 ms for the GIL. With 3 slots, loads took 4 to 6% longer.
The engine's copies wait for at most one copy per slot (see `lanes`).
"""


class CudaMover:
    """Copies chunks for one GPU."""

    def __init__(
        self,
        kinds: Sequence[tuple[PagedLayout, Kernels]],
        frames: Sequence[FrameMemory],
        *,
        blocks_per_chunk: Sequence[int],
        tuning: Tuning,
        kind_of: Mapping[tuple[int, int], int] = FIRST_KIND,
        gathers_first: bool = False,
    ) -> None:
        """Allocate staging slots and start registering the arena.

        All kinds share streams, staging slots and registered memory.

        Args:
            frames: the frames for each of ``kinds``.
            blocks_per_chunk: the number of blocks in a frame, for each of ``kinds``.
            kind_of: the index in ``kinds`` for each KV cache group and size class.
            gathers_first: make the compute stream wait for the gathers of a step's saves. Required
                for engines that write to blocks before passing them to `begin_step`.

        Raises CudaError, or ValueError if the staging slots are too small.
        """
        all_kernels = [kernels for _, kernels in kinds]
        self._device = all_kernels[0].device
        self._context = driver.current_context()
        arena = frames[0]
        slabs_per_registration = max(1, GOOD_PIECE_BYTES // arena.slab_bytes)
        parts = [
            _kind(layout, kernels, num_blocks, memory, slabs_per_registration)
            for (layout, kernels), num_blocks, memory in zip(
                kinds, blocks_per_chunk, frames, strict=True
            )
        ]
        stride = max(kind.loads.slot_stride for kind in parts)
        encoded = [kind.unregistered for kind in parts if kind.loads.encoding is not None]
        tuning = tuning.fitted(stride, max((each.slot_stride for each in encoded), default=0))
        save_tuning = tuning.halved(stride) if encoded else tuning
        parts = [kind.with_slots(save_tuning.slot_bytes, tuning.slot_bytes) for kind in parts]
        bytes_ahead, num_blocks = (SLOTS_AHEAD - 1) * tuning.slot_bytes, kinds[0][0].num_blocks
        self._compute = compute = partial(_compute_stream, self._device)
        self._shared = shared = Shared(
            parts, kind_of, num_blocks, bytes_ahead, compute, self._break
        )
        self.save_lane = Lane(all_kernels, save_tuning, frames, to_host=True)
        self.load_lane = Lane(all_kernels, tuning, frames, to_host=False)
        save_ramp = ramp(shared.chunks_per_save, stride, SAVE_PREPARE_US)
        load_ramp = ramp(shared.chunks_per_load, stride, LOAD_PREPARE_US)
        self._saves = Saves(shared, self.save_lane, save_ramp, gathers_first=gathers_first)
        self._loads = Loads(
            shared, self.load_lane, load_ramp, order_after_saves=self._saves.order_after_gathers
        )
        self._save_submitter = Submitter("kvloft-saves", shared.lock, self._saves)
        self._load_submitter = Submitter("kvloft-loads", shared.lock, self._loads)
        # Ranks that share the arena can use GPUs on different NUMA nodes.
        node = None if arena.is_shared else numa_node_of(self._device)
        shared.registered = RegisteredRange(
            arena.address,
            arena.size_bytes,
            piece_bytes=slabs_per_registration * arena.slab_bytes,
            numa_node=node,
            on_progress=self._feed_saves,
        )

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        with self._shared.lock:
            if self._shared.broken is None:
                self._loads.begin_step(has_loads=has_loads)
            if rewritten and self._shared.broken is None:
                # Without this ordering, a gather could read blocks after they are rewritten.
                with self._shared.guarded():
                    blocks = np.asarray(rewritten, dtype=np.int64)
                    self._saves.order_after_gathers(self._compute(), blocks)

    def wait_for_saves(self, blocks: Sequence[BlockId]) -> None:
        with self._shared.lock:
            if self._shared.broken is None:
                with self._shared.guarded():
                    for event in self._saves.submit_gathers_of(np.asarray(blocks, dtype=np.int64)):
                        event.synchronize()

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers to run after the last forward pass launched so far. Drop saves if the queue
        is full.
        """
        with self._shared.lock:
            self._saves.submit(plans)
            self._save_submitter.wake()

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Queue loads. The next `poll` reports loads that have no chunks."""
        with self._shared.lock:
            self._loads.submit(plans)
            self._loads.feed()
            self._load_submitter.wake()

    def poll(self) -> Finished:
        with self._shared.lock:
            self._feed()
            return self._shared.take_done()

    def drain(self) -> Finished:
        """Block until all copies are done. Saves to unregistered frames fail."""
        with self._shared.lock:
            with self._shared.guarded():
                driver.use_context(self._context)  # the calling thread may never have used the GPU
            self._saves.waits_for_registration = False
            while self._shared.broken is None and (
                self.is_behind or self._saves.in_flight or self._loads.in_flight
            ):
                with self._shared.guarded():
                    self._saves.wait_for_first()
                    self._loads.wait_for_first()
                self._feed()
            self._saves.waits_for_registration = True
            return self._shared.take_done()

    def close(self) -> None:
        self.drain()
        self._shared.broken = self._shared.broken or "closed"
        self._save_submitter.close()
        self._load_submitter.close()
        self.save_lane.close()
        self.load_lane.close()
        self._shared.registered.close()
        while self._shared.spare_marks:
            self._shared.spare_marks.pop().destroy()
        # Break the reference cycle, so that deleting the mover unmaps the arena immediately.
        self._shared.fail = _ignore

    @property
    def is_behind(self) -> bool:
        """Return True if copies are waiting to be submitted to the GPU."""
        # Take the lock, because a submitter may have dequeued the last piece but not submitted it.
        with self._shared.lock:
            return self._saves.is_behind or self._loads.is_behind

    @property
    def usable_bytes(self) -> int | None:
        """Return how many bytes of host memory are registered, or None if all are."""
        registered = self._shared.registered
        return None if registered.is_complete else registered.num_registered_bytes

    def wait_registered(self, timeout_s: float | None = None) -> bool:
        """Wait until registration of host memory has completed or failed.

        Returns False if ``timeout_s`` expires.
        """
        return self._shared.registered.wait(timeout_s)

    def _feed(self) -> None:
        self._saves.feed()
        self._loads.feed()

    def _feed_saves(self) -> None:
        """After a piece is registered, submit saves that were waiting for registration."""
        with self._shared.lock:
            self._saves.feed()
            self._save_submitter.wake()

    def _break(self, reason: str) -> None:
        """Wait until no copy is running, and fail all queued and future copies."""
        logger.error(
            "kvloft: a copy failed; this worker stopped copying KV and caching is disabled: %s",
            reason,
        )
        self._shared.broken = reason
        self._saves.stop()
        self._loads.stop()


def _ignore(_reason: str) -> None:
    """Ignore any error that a closed mover reports."""


def _compute_stream(device: torch.device) -> driver.Stream:
    """Return the stream used by the engine's forward pass. It can change between steps."""
    return driver.Stream.view(_current_stream(device))


def _kernels_of(layout: PagedLayout, device: torch.device, *, encodes: bool) -> Kernels:
    """Return kernels that encode parts, if ``encodes`` is True and they can be compiled and loaded.

    Otherwise, returns kernels for raw parts. Raises the same exceptions as `Kernels`.
    """
    if encodes:
        try:
            return Kernels(layout, device, encodes=True)
        except (KernelError, driver.CudaError) as error:
            logger.warning(
                "kvloft: the compression kernels could not be compiled or loaded (%s); storing KV "
                "uncompressed",
                error,
            )
    return Kernels(layout, device)


def device_encodes(device: torch.device) -> bool:
    """Return True if ``device`` can run the kernels of e348.cu and access registered memory."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    with torch.cuda.device(device):
        # Make the context current on this thread. This runs at startup, never in a step.
        torch.cuda.current_stream(device).synchronize()
        return driver.kernels_reach_registered()


def _current_stream(device: torch.device) -> int:
    """Return the current stream.

    With cold caches, torch.cuda.current_stream takes 60 to 90 us longer than this call.
    """
    return int(torch._C._cuda_getCurrentRawStream(device.index))  # noqa: SLF001


def _kind(
    layout: PagedLayout,
    kernels: Kernels,
    num_blocks: int,
    frames: FrameMemory,
    slabs_per_registration: int,
) -> PageKind:
    """Return a layout's page kind, whose slot sizes are not set yet.

    A chunk has ``num_blocks`` blocks.
    """
    frames_per_run = frames.per_slab * (slabs_per_registration if frames.is_dense else 1)
    limits = unregistered = PieceLimits(
        kernels.block_tiles, 0, frames.part_bytes, num_blocks, frames_per_run
    )
    block_tiles = None
    if kernels.encodes:
        block_tiles = kernels.block_tiles.tiles_per_block
        limits = replace(limits, encoding=PartEncoding.of(layout, frames))
        most = PartEncoding.of(layout, frames, everything=True)
        unregistered = replace(unregistered, encoding=most)
    holds_raw = num_blocks * layout.block_bytes <= frames.part_capacity
    trailers = Trailers(
        frames,
        layout=layout.digest,
        block_bytes=layout.block_bytes,
        block_tiles=block_tiles,
        holds_raw=holds_raw,
    )
    fits = holds_raw or kernels.encodes
    return PageKind(limits, limits, unregistered, trailers, frames, fits)


def prepare(
    layouts: Sequence[PagedLayout], blocks_per_chunk: Sequence[int], settings: MoverSettings
) -> Callable[[Sequence[GroupFrames]], CudaMover]:
    """Compile the kernels for ``layouts`` and return a function that creates the mover.

    ``layouts`` has one entry per KV cache group, and ``blocks_per_chunk`` lists the number of
    blocks per frame for each group. Parts are encoded if the settings, the layout and the device
    allow it. Kernels are compiled at startup, so an engine without usable kernels does not start.
    Raises UnsupportedError or CudaError.
    """
    device = next(layout.planes[0].storage.device for layout in layouts if layout.planes)
    kinds: dict[tuple[object, ...], tuple[PagedLayout, Kernels]] = {}
    addresses: list[tuple[object, ...]] = [
        (
            num_blocks,
            layout.digest,
            *((p.base, p.block_stride, p.page_bytes) for p in layout.planes),
        )
        for num_blocks, layout in zip(blocks_per_chunk, layouts, strict=True)
    ]
    slot_bytes = Tuning.slot_bytes_of(settings.staging_bytes)
    encodes = settings.encodes and device_encodes(device)
    for where, layout, num_blocks in zip(addresses, layouts, blocks_per_chunk, strict=True):
        if where not in kinds:
            is_encoded = encodes and can_encode(layout, num_blocks, slot_bytes)
            with torch.cuda.device(device):
                kinds[where] = layout, _kernels_of(layout, device, encodes=is_encoded)
    tuning = Tuning.of(settings.staging_bytes, next(iter(kinds.values()))[1].num_sms)
    for layout, kernels in kinds.values():
        logger.info(
            "kvloft: kernels with %d-byte accesses for %d planes, %d KiB per block, %s, on %s; %d "
            "staging slots of %d MiB per direction",
            kernels.vec_bytes,
            kernels.num_planes,
            layout.block_bytes >> 10,
            "compressed" if kernels.encodes else "not compressed",
            torch.cuda.get_device_name(device),
            tuning.num_slots,
            tuning.slot_bytes >> 20,
        )

    def make(frames: Sequence[GroupFrames]) -> CudaMover:
        # A kind is a combination of a page layout and a frame size.
        distinct: dict[tuple[object, ...], tuple[int, FrameMemory]] = {}
        kind_of: dict[tuple[int, int], int] = {}
        for group, (where, own) in enumerate(zip(addresses, frames, strict=True)):
            for window, size_class in ((own.raw, own.raw_class), (own.compact, own.compact_class)):
                if window is not None:
                    kind = (where, window.memory.part_bytes)
                    distinct.setdefault(kind, (group, window.memory))
                    kind_of[group, size_class] = list(distinct).index(kind)
        with torch.cuda.device(device):
            return CudaMover(
                [kinds[addresses[group]] for group, _ in distinct.values()],
                [memory for _, memory in distinct.values()],
                blocks_per_chunk=[blocks_per_chunk[group] for group, _ in distinct.values()],
                tuning=tuning,
                kind_of=kind_of,
                gathers_first=settings.gathers_first,
            )

    return make
