"""What the scheduler half makes of its settings before it has a store: chunk sizes, and whose directory is whose."""

from types import SimpleNamespace

import pytest

from kvloft.config import Config
from kvloft.errors import ConfigError
from kvloft.plan import Geometry
from kvloft.vllm.scheduler_half import _disk_path, choose_geometry


def test_chunks_are_whole_blocks_or_refused() -> None:
    assert choose_geometry(Config(chunk_tokens=64), 32, 4096) == Geometry(32, 2)
    for tokens in (16, 48, 65):
        with pytest.raises(ConfigError, match=f"chunk_tokens={tokens}"):
            choose_geometry(Config(chunk_tokens=tokens), 32, 4096)


def test_each_data_parallel_engine_has_a_directory_of_its_own() -> None:
    config = Config(disk_path="/cache")
    alone = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, data_parallel_index=0)
    assert _disk_path(config, alone) == "/cache"
    assert _disk_path(Config(), alone) is None
    assert _disk_path(config, SimpleNamespace(data_parallel_size=2, data_parallel_rank=0, data_parallel_index=1)) == "/cache/dp1"
    assert _disk_path(config, SimpleNamespace(data_parallel_size=2, data_parallel_rank=1)) == "/cache/dp1"
