"""The one place that chooses a store for an engine: the one in this process."""

from __future__ import annotations

from kvloft import _core
from kvloft.config import Config
from kvloft.seam.shape import CacheShape


def open_store(config: Config, shape: CacheShape, namespace: bytes, *, disk_path: str | None, description: str) -> _core.Session:
    """A session with the store that ``config`` asks for; ``disk_path`` is this engine's own directory.

    Raises ConfigError, BusyError where another process owns the directory, StoreError if the system refuses.
    """
    return _core.Session(
        frame_bytes=shape.frame_bytes,
        host_bytes=config.host_size,
        namespace=namespace,
        blocks_per_chunk=shape.full.blocks_per_chunk,
        num_ranks=shape.num_ranks,
        eviction=config.eviction,
        disk_path=disk_path,
        disk_bytes=config.disk_bytes,
        disk_threads=config.disk_threads,
        description=description,
    )
