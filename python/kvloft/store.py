"""Opens an engine's store, either in this process or on a shared server.

This module must not import vLLM.
"""

from pathlib import Path
from typing import Any

from kvloft import _core
from kvloft.config.table import Config
from kvloft.limits import tenant_limits
from kvloft.seam.shape import ArenaSpec, CacheShape


def open_store(
    config: Config, shape: CacheShape, namespace: bytes, description: str, *, disk_path: str | None
) -> _core.Session:
    """Open a session with the store for ``namespace``.

    ``description`` describes the namespace in one line of text. ``disk_path`` is this engine's
    disk directory. Raises ConfigError if a setting is invalid.
    """
    groups = groups_of(shape)
    sizes = list(zip(shape.frame_sizes, shape.raw_frame_sizes, strict=True))
    if config.socket is not None:
        return _core.Session.connect(
            config.socket,
            frame_bytes=sizes,
            namespace=namespace,
            timeout_s=config.server_timeout,
            num_ranks=shape.num_ranks,
            groups=groups,
            description=description,
        )
    return _core.Session(
        frame_bytes=sizes,
        host_bytes=config.host_size,
        namespace=namespace,
        num_ranks=shape.num_ranks,
        groups=groups,
        eviction=config.eviction,
        disk_path=disk_path,
        disk_bytes=config.disk_bytes,
        disk_threads=config.disk_threads,
        description=description,
        limits=tenant_limits(config),
    )


def groups_of(
    shape: CacheShape,
) -> list[tuple[int | None, str, int, int, int, int, int, int | None]]:
    """Return the KV cache groups in the format that `_core.Session` expects."""
    return [
        (
            shape.number_of(nth),
            group.kind,
            group.block_tokens,
            group.blocks_per_unit,
            group.kept_blocks,
            group.reach,
            *shape.size_classes(nth),
        )
        for nth, group in enumerate(shape.groups)
    ]


def arena_of(store: _core.Session, shape: CacheShape) -> ArenaSpec | None:
    """Return the arena that workers map, or None while the server is unavailable."""
    if not (path := store.arena_path):
        return None
    size_bytes, slab_bytes = store.arena_sizes
    return ArenaSpec(path, size_bytes, slab_bytes, shape.groups, store.arena_id, store.lifeline)


def disk_path_of(config: Config, parallel: Any) -> str | None:
    """Return this data-parallel engine's disk directory.

    The first engine uses ``disk_path``; engine N uses its subdirectory ``dpN``. ``parallel`` is
    vLLM's ParallelConfig. For a dense model, only ``data_parallel_index`` identifies the engine,
    because vLLM resets the data-parallel size to 1 and the rank to 0
    (`reconfigure_for_independent_dp_rank`).
    """
    index = getattr(parallel, "data_parallel_index", None)
    rank = parallel.data_parallel_rank if index is None else index
    if config.disk_path is None or rank == 0:
        return config.disk_path
    return str(Path(config.disk_path) / f"dp{rank}")
