"""Tests that an engine opens the correct store."""

import tempfile
from pathlib import Path

from kvloft import _core
from kvloft.config.table import Config
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.store import arena_of, open_store

SHAPE = CacheShape((GroupShape(16), GroupShape(16, kind="window", reach=31)))


def test_a_server_supports_several_groups_with_equal_frames() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        path = str(Path(folder) / "run" / "a.sock")
        server = _core.Server(path, host_bytes=8 * SHAPE.frame_bytes(0))
        store = open_store(Config(server=path), SHAPE, bytes(32), "", disk_path=None)
        arena = arena_of(store, SHAPE)
        assert arena is not None
        assert (arena.groups, arena.size_bytes) == (SHAPE.groups, 8 * 4096)
        store.close()
        server.close()
