"""Registers the host arena with CUDA in the background.

Memory is registered in pieces, so that the cache can be used before registration completes.
Multiple threads first populate each piece's pages, on the GPU's NUMA node and with huge pages if
possible. The threads do not modify the memory, because other ranks may be writing to it.
"""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from kvloft import _core
from kvloft.transfer.cuda import driver

logger = logging.getLogger(__name__)

GOOD_PIECE_BYTES: Final = 256 << 20
"""Piece size, kept small because kernel launches block while a piece is being registered."""
_PAGE: Final = 4096
_NUM_THREADS: Final = 8
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


class RegisteredRange:
    """A memory range that a background thread registers in address order. `num_registered_bytes`
    tracks progress.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        *,
        piece_bytes: int,
        numa_node: int | None,
        on_progress: Callable[[], None],
    ) -> None:
        """Start the thread, which calls ``on_progress`` after each piece and before exiting.

        ``piece_bytes`` must be a multiple of the page size. No copy may cross a multiple of
        ``piece_bytes``.
        """
        self._on_progress = on_progress
        self._piece_bytes = piece_bytes
        self.address = address
        self.size_bytes = size_bytes
        self.num_registered_bytes = 0
        self.is_over = False
        """True after registration has completed, failed or been stopped."""
        self._numa_node = numa_node
        self._context = driver.current_context()
        self._pieces: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloft-register", daemon=True)
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        return self.num_registered_bytes >= self.size_bytes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until registration ends. Return False if ``timeout_s`` elapses first."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Unregister the memory. No copy may be in flight."""
        self._stop.set()
        self._thread.join()
        self.num_registered_bytes = 0
        for piece in self._pieces:
            try:
                driver.host_unregister(piece)
            except driver.CudaError as error:
                logger.warning("kvloft: could not unregister host memory: %s", error)
        self._pieces.clear()
        self._on_progress = lambda: None  # drops the reference to this object's owner

    def _run(self) -> None:
        try:
            driver.use_context(self._context)
            with ThreadPoolExecutor(_NUM_THREADS, "kvloft-populate") as pool:
                for begin, num_bytes in pieces_of(self.size_bytes, self._piece_bytes):
                    if self._stop.is_set():
                        return
                    _touch(self.address + begin, num_bytes, self._numa_node, pool)
                    driver.host_register(self.address + begin, num_bytes)
                    self._pieces.append(self.address + begin)
                    self.num_registered_bytes = begin + num_bytes
                    self._on_progress()
        except (RuntimeError, OSError) as error:
            logger.error(
                "kvloft: registered only %.1f of %.1f GiB of host memory (%s); saves can use only "
                "the registered memory. Lower host_size or raise the container's memory limit",
                self.num_registered_bytes / 2**30,
                self.size_bytes / 2**30,
                error,
            )
        finally:
            self.is_over = True
            self._on_progress()


def pieces_of(size_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the offset and size of each piece.

    Like an arena's last slab, the last piece includes the remainder, so that no frame spans two
    pieces.
    """
    begin = 0
    while begin < size_bytes:
        left = size_bytes - begin
        num_bytes = piece_bytes if left >= 2 * piece_bytes else left
        yield begin, num_bytes
        begin += num_bytes


def _touch(address: int, num_bytes: int, numa_node: int | None, pool: ThreadPoolExecutor) -> None:
    """Populate the pages in parallel. If this fails, registration itself populates the pages, but
    more slowly.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    begin, end = address & -_PAGE, -(-(address + num_bytes) // _PAGE) * _PAGE
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    if numa_node is not None:
        _core.prefer_numa_node(begin, end - begin, numa_node)
    step = -(-(end - begin) // _NUM_THREADS // (2 << 20)) * (2 << 20)

    def populate(at: int) -> None:
        num_bytes = ctypes.c_size_t(min(step, end - at))
        libc.madvise(ctypes.c_void_p(at), num_bytes, _MADV_POPULATE_WRITE)

    list(pool.map(populate, range(begin, end, step)))


def numa_node_of(device: torch.device) -> int | None:
    """Return the NUMA node of a GPU, or None if the operating system does not report it."""
    properties = torch.cuda.get_device_properties(device)
    names = ("domain", "bus", "device")
    domain, bus, number = (int(getattr(properties, f"pci_{name}_id", 0)) for name in names)
    folder = f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{number:02x}.0"
    try:
        node = int(Path(folder, "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
