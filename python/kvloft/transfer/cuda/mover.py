"""CudaMover: copies chunks between paged KV in HBM and registered host frames, on streams that no
step waits for.

- Saves (`saves`): a kernel gathers a piece to a staging slot once the forward that wrote it is
  done, the copy engine copies the slot to the frames, and the host writes the trailer.
- Loads (`loads`): the copy engine copies a piece to a slot, and a kernel scatters it and computes
  its tag.
- Order is kept on the GPU: `begin_step` makes the next forward wait for gathers that still read a
  block it may write (I2), and loads wait for the work launched before the step.
- A few pieces at a time are on the GPU; a `submitter` in each direction sends the next ones. While
  host memory is being registered, saves to frames that are not registered yet wait.

No step allocates GPU memory or waits for the device. Must not depend on engines.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from kvloft.seam.ids import BlockId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.encoding import PartEncoding, can_encode
from kvloft.transfer.cuda.jobs import LOAD_PREPARE_US, SAVE_PREPARE_US, ramp
from kvloft.transfer.cuda.kernels import KernelError, Kernels, default_cache_dir
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
"""One KV cache group and one size of frames."""
SLOTS_AHEAD = 8
"""Bytes of one direction on the GPU, in slots: 6 ms of the link with slots of 40 MiB. A submitter
can wait up to 5 ms for the GIL; with 3 slots, loads took 4 to 6 % longer. Copies of the engine do
not wait for all of them: see `lanes`.
"""


class CudaMover:
    """Moves chunks for one GPU."""

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
        """Allocate staging and start to register the arena. Raises CudaError, or ValueError if
        staging is too small.

        ``frames`` and ``blocks_per_chunk``: frames, and blocks in a frame, for each of ``kinds``.
        ``kind_of``: the kind of each KV cache group's pages; all kinds share streams, staging and
        registered memory. With ``gathers_first``, the compute stream waits for the gathers of a
        step's saves, for engines that write blocks before `begin_step` names them.
        """
        all_kernels = [kernels for _, kernels in kinds]
        self._device = all_kernels[0].tiles.device
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
        self._shared = shared = Shared(
            parts, kind_of, num_blocks, bytes_ahead, self._compute, self._break
        )
        self.saves = Lane(all_kernels, save_tuning, frames, to_host=True)
        self.loads = Lane(all_kernels, tuning, frames, to_host=False)
        few_saved = ramp(shared.chunks_per_save, stride, SAVE_PREPARE_US)
        few_loaded = ramp(shared.chunks_per_load, stride, LOAD_PREPARE_US)
        self._saves = Saves(shared, self.saves, few_saved, gathers_first=gathers_first)
        self._loads = Loads(
            shared, self.loads, few_loaded, order_after_saves=self._saves.order_after_gathers
        )
        self._submitters = [
            Submitter(name, shared.lock, direction)
            for name, direction in (("kvloft-saves", self._saves), ("kvloft-loads", self._loads))
        ]
        # Ranks on two sockets would each place all pages on their node.
        node = None if arena.is_shared else numa_node_of(self._device)
        shared.registered = RegisteredRange(
            arena.address,
            arena.size_bytes,
            piece_bytes=slabs_per_registration * arena.slab_bytes,
            numa_node=node,
            on_progress=self._feed_saves,
        )

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """See `Mover.begin_step`. ``rewritten`` are blocks that were saved for another request."""
        with self._shared.lock:
            if self._shared.broken is None:
                self._loads.begin_step(has_loads=has_loads)
            if rewritten and self._shared.broken is None:
                # Without the order, a save could read rewritten blocks.
                with self._shared.guarded():
                    blocks = np.asarray(rewritten, dtype=np.int64)
                    self._saves.order_after_gathers(self._compute(), blocks)

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Queue gathers after the forward just launched. Saves without room are dropped."""
        with self._shared.lock:
            self._saves.submit(plans)
            self._submitters[0].wake()

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Queue loads. The next `poll` reports those without chunks."""
        with self._shared.lock:
            self._loads.submit(plans)
            self._loads.feed()
            self._submitters[1].wake()

    def poll(self) -> Finished:
        with self._shared.lock:
            self._feed()
            return self._shared.take_done()

    def drain(self) -> Finished:
        """Wait on the host for all copies. Saves to frames not yet registered fail."""
        with self._shared.lock:
            self._saves.waits_for_registration = False
            while self._shared.broken is None and (
                self.is_behind or self._saves.flying or self._loads.flying
            ):
                with self._shared.guarded():
                    self._saves.wait_for_first()
                    self._loads.wait_for_first()
                self._feed()
            self._saves.waits_for_registration = True
            return self._shared.take_done()

    def close(self) -> None:
        """Drain and release all resources. The mover must not be used afterwards."""
        self.drain()
        self._shared.broken = self._shared.broken or "closed"
        for submitter in self._submitters:
            submitter.close()
        self.saves.close()
        self.loads.close()
        self._shared.registered.close()

    @property
    def is_behind(self) -> bool:
        """Return True if copies wait to be sent to the GPU."""
        # A submitter may have taken the last piece and not have sent it yet.
        with self._shared.lock:
            return self._saves.is_behind or self._loads.is_behind

    @property
    def usable_bytes(self) -> int | None:
        """Return the number of registered bytes; None if all are."""
        registered = self._shared.registered
        return None if registered.is_complete else registered.num_registered_bytes

    def wait_registered(self, timeout_s: float | None = None) -> bool:
        """Wait until all host memory is registered, or registration has failed."""
        return self._shared.registered.wait(timeout_s)

    def _feed(self) -> None:
        self._saves.feed()
        self._loads.feed()

    def _feed_saves(self) -> None:
        """Send saves after more frames were registered, or registration ended."""
        with self._shared.lock:
            self._saves.feed()
            self._submitters[0].wake()

    def _break(self, reason: str) -> None:
        """Fail all copies from now on, after a CUDA error. Waits until no copy runs."""
        logger.error(
            "kvloft: CUDA error; this worker no longer copies pages, so nothing is cached: %s",
            reason,
        )
        self._shared.broken = reason
        self._saves.stop()
        self._loads.stop()

    def _compute(self) -> driver.Stream:
        """Return the current stream, which an engine can change between steps."""
        return driver.Stream.view(_current_stream(self._device))


def _kernels_of(layout: PagedLayout, device: torch.device, *, encodes: bool) -> Kernels:
    """Return kernels that encode if ``encodes``; otherwise, or if these fail to compile, kernels
    for raw parts.

    Raises as `Kernels`.
    """
    cache_dir = default_cache_dir() / "kernels"
    if encodes:
        try:
            return Kernels(layout, device, cache_dir, encodes=True)
        except (KernelError, driver.CudaError) as error:
            logger.warning(
                "kvloft: KV is not compressed: the kernels for it failed to compile or load (%s)",
                error,
            )
    return Kernels(layout, device, cache_dir)


def _device_encodes(device: torch.device) -> bool:
    """Return True if ``device`` has what e348.cu uses, and reaches registered frames."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    with torch.cuda.device(device):
        # Makes the context current on this thread; not in a step.
        torch.cuda.current_stream(device).synchronize()
        return driver.kernels_reach_registered()


def _current_stream(device: torch.device) -> int:
    """Return the current stream 60 to 90 us faster than torch.cuda with cold caches."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))  # noqa: SLF001


def _kind(
    layout: PagedLayout,
    kernels: Kernels,
    num_blocks: int,
    frames: FrameMemory,
    slabs_per_registration: int,
) -> PageKind:
    """Return the kind of a layout with chunks of ``num_blocks``; the size of slots is set later."""
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
    holds_raw = num_blocks * layout.block_bytes <= frames.part_room
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
    """Compile the kernels of ``layouts``, one per KV cache group; returns the function that makes
    the mover.

    ``blocks_per_chunk``: blocks in a frame, for each group. Parts are encoded if settings, layout
    and device allow it. Called at engine start, so that an engine without kernels does not start.
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
    encodes = settings.encodes and _device_encodes(device)
    for where, layout, num_blocks in zip(addresses, layouts, blocks_per_chunk, strict=True):
        if where not in kinds:
            is_encoded = encodes and can_encode(layout, num_blocks, slot_bytes)
            with torch.cuda.device(device):
                kinds[where] = layout, _kernels_of(layout, device, encodes=is_encoded)
    tuning = Tuning.of(settings.staging_bytes, next(iter(kinds.values()))[1].num_sms)
    for layout, kernels in kinds.values():
        logger.info(
            "kvloft: kernels of %d-byte accesses for %d planes, %d KiB a block, %s, on %s; %d x %d "
            "MiB of staging each way",
            kernels.vec_bytes,
            kernels.num_planes,
            layout.block_bytes >> 10,
            "compressed" if kernels.encodes else "not compressed",
            torch.cuda.get_device_name(device),
            tuning.num_slots,
            tuning.slot_bytes >> 20,
        )

    def make(frames: Sequence[GroupFrames]) -> CudaMover:
        # A kind has pages of one layout and frames of one size.
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
