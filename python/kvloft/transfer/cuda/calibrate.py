"""How to copy on this device: measured once in well under 150 ms, kept on disk for the same GPU, driver and kvloft.

Small pieces may do better without staging, straight between frames and pages; up to which size, and whether at all, is what
is measured, per direction. It must not know engines.
"""

from __future__ import annotations

import ctypes
import json
import logging
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvloft import __version__
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey
from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.frame_memory import FrameMemory
from kvloft.transfer.cuda.kernels import Kernels
from kvloft.transfer.cuda.lanes import LoadLane, SaveLane, Tuning
from kvloft.transfer.cuda.pieces import ChunkTable, Piece, Shape, split
from kvloft.transfer.cuda.staging import RingSize

logger = logging.getLogger(__name__)

BUDGET_S: Final = 0.15
SIZES: Final = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
NUM_RUNS: Final = 5
CLEAR_WIN: Final = 0.9
"""Direct copies hold SMs for the link's time, so they must be at least this much faster."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found, and the measurements behind it: ``micros[direction][route][bytes]``."""

    tuning: Tuning
    micros: dict[str, dict[str, dict[str, float]]]
    seconds: float
    from_cache: bool = False

    def summary(self) -> str:
        """One line for the log."""
        tuning, ring = self.tuning, self.tuning.ring
        source = "from cache" if self.from_cache else f"measured in {self.seconds * 1e3:.0f} ms"
        direct = ", ".join(
            f"{name} below {below >> 10} KiB direct" if below else f"{name} always staged"
            for name, below in (("saves", tuning.save_direct_below), ("loads", tuning.load_direct_below))
        )
        return f"{ring.num_slots} x {ring.slot_bytes >> 20} MiB of staging a direction, {direct} ({source})"


def calibrated(kernels: Kernels, ring: RingSize, cache_dir: Path) -> Calibration:
    """From the cache, or measured now and put there. A device that cannot be measured gets the defaults, logged."""
    path = cache_dir / "calibration.json"
    key = _key(kernels, ring)
    found = _read(path).get(key)
    if found is not None:
        try:
            return Calibration(_tuning_of(found["tuning"]), found["micros"], found["seconds"], from_cache=True)
        except (KeyError, TypeError):
            logger.info("kvloft: %s has an entry of another form; measured again", path)
    result = measure(kernels, ring)
    entry = {"tuning": asdict(result.tuning), "micros": result.micros, "seconds": result.seconds}
    _write(path, {**_read(path), key: entry})
    return result


def measure(kernels: Kernels, ring: RingSize) -> Calibration:
    """Copy a few sizes by each route and keep the faster; stops early, with what it has, when the budget is spent."""
    begin = time.perf_counter()
    half = max(1, kernels.num_sms // 2)  # why: Tuning
    tuning = Tuning(ring=ring, save_ctas=half, load_ctas=half)
    micros: dict[str, dict[str, dict[str, float]]] = {}
    below = {"save": 0, "load": 0}
    bench = _Bench(kernels, tuning)
    try:
        for direction in below:
            micros[direction] = {"staged": {}, "direct": {}}
            for size in SIZES:
                if time.perf_counter() - begin > BUDGET_S * (0.5 if direction == "save" else 0.9):
                    break
                staged, direct = (bench.micros(direction, size, is_direct) for is_direct in (False, True))
                micros[direction]["staged"][str(size)] = staged
                micros[direction]["direct"][str(size)] = direct
                if direct > CLEAR_WIN * staged:
                    break
                below[direction] = size + 1
    finally:
        bench.close()
    tuning = Tuning(
        ring=ring, save_ctas=tuning.save_ctas, load_ctas=tuning.load_ctas, save_direct_below=below["save"],
        load_direct_below=below["load"],
    )  # fmt: skip
    return Calibration(tuning, micros, time.perf_counter() - begin)


class _Bench:
    """A few frames of pinned memory, and lanes for each route; paged KV is what ``kernels`` was made for, block 0 alone.

    Block 0 is vLLM's null block, nobody's page. Loads put back what a save took from it.
    """

    def __init__(self, kernels: Kernels, tuning: Tuning) -> None:
        block_bytes = kernels.block_tiles.block_bytes
        self._blocks = {size: max(1, min(256, size // block_bytes)) for size in SIZES}
        part = -(-(block_bytes * max(self._blocks.values()) + 128) // 4096) * 4096
        self._address = driver.host_alloc(part)
        ctypes.memset(self._address, 0, part)  # what a load of more than was saved would write
        memory = FrameMemory(self._address, 1, part, 0, part, 0, None)
        self._kernels = kernels
        small = RingSize(2, 8 << 20)
        self._shape = Shape(kernels.block_tiles, small.slot_bytes, part, max(self._blocks.values()), 1)
        direct = Tuning(ring=small, direct_ctas=tuning.direct_ctas, save_direct_below=1 << 62, load_direct_below=1 << 62)
        staged = Tuning(ring=small, save_ctas=tuning.save_ctas, load_ctas=tuning.load_ctas)
        self._lanes: dict[tuple[str, bool], SaveLane | LoadLane] = {}
        for is_direct, routed in ((False, staged), (True, direct)):
            self._lanes["save", is_direct] = SaveLane(kernels, routed, memory)
            self._lanes["load", is_direct] = LoadLane(kernels, routed, memory)

    def micros(self, direction: str, size: int, is_direct: bool) -> float:
        """Median microseconds from the first command to the end of the last."""
        pieces = self._pieces(self._blocks[size])
        lane = self._lanes[direction, is_direct]
        frames: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        times = []
        for _ in range(NUM_RUNS + 1):
            begin = time.perf_counter()
            for piece in pieces:
                ticket = lane.submit(piece, frames)
            lane.wait_for(ticket)
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:]) * 1e6

    def _pieces(self, num_blocks: int) -> tuple[Piece, ...]:
        copy = ChunkCopy(0, ChunkKey(bytes(32)), num_blocks, 0, (BlockId(0),) * num_blocks)
        return tuple(split(ChunkTable.of([copy]), self._shape))

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        driver.host_free(self._address)


def _key(kernels: Kernels, ring: RingSize) -> str:
    name = torch.cuda.get_device_name(kernels.tiles.device)
    tiles = kernels.block_tiles
    parts = (
        name,
        driver.driver_version(),
        __version__,
        kernels.vec_bytes,
        tiles.block_bytes,
        tiles.tiles_per_block,
        ring,
    )
    return "|".join(map(str, parts))


def _tuning_of(found: dict[str, Any]) -> Tuning:
    return Tuning(**{**found, "ring": RingSize(**found["ring"])})


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, entries: dict[str, Any]) -> None:
    """Whole or not at all; a cache that cannot be written costs a measurement at each start."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(entries, file, indent=1)
        Path(file.name).replace(path)
    except OSError as error:
        logger.info("kvloft: the calibration is not kept: %s", error)
