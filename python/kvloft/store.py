"""Opens the store of an engine: a store in this process, or that of a server which engines share.

Must not depend on vLLM.
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
    """Return a new session. ``description`` is one line about ``namespace``; ``disk_path`` is this
    engine's directory.

    Raises ConfigError if a setting is wrong.
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
    """Return the KV cache groups as a session takes them."""
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
    """Return the arena for workers to map; None while there is no server."""
    if not (path := store.arena_path):
        return None
    size_bytes, slab_bytes = store.arena_sizes
    return ArenaSpec(path, size_bytes, slab_bytes, shape.groups, store.arena_id, store.lifeline)


def disk_path_of(config: Config, parallel: Any) -> str | None:
    """Return the directory of this data-parallel engine: ``disk_path`` for the first engine, and
    ``dpN`` in it for others. ``parallel`` is vLLM's ParallelConfig.

    Only the index identifies the engine: engines of a dense model are independent, and vLLM resets
    their size to 1 and their rank to 0 (`reconfigure_for_independent_dp_rank`).
    """
    index = getattr(parallel, "data_parallel_index", None)
    rank = parallel.data_parallel_rank if index is None else index
    if config.disk_path is None or rank == 0:
        return config.disk_path
    return str(Path(config.disk_path) / f"dp{rank}")
