"""What the scheduler half makes of its settings before it has a store: chunk sizes, and whose directory is whose."""

from types import SimpleNamespace

import pytest
from vllm.config import ParallelConfig

from kvloft.config import Config
from kvloft.errors import ConfigError
from kvloft.plan import Geometry
from kvloft.vllm.scheduler_half import _disk_path, choose_geometry, tiers_text


def test_chunks_are_whole_blocks_or_refused() -> None:
    assert choose_geometry(Config(chunk_tokens=64), 32, 4096) == Geometry(32, 2)
    for tokens in (16, 48, 65):
        with pytest.raises(ConfigError, match=f"chunk_tokens={tokens}"):
            choose_geometry(Config(chunk_tokens=tokens), 32, 4096)


def test_the_start_line_is_in_units_and_numbers_as_people_write_them() -> None:
    config = Config(host_size=256 << 20, disk_path="/cache", disk_size=1 << 30)
    assert tiers_text(config, Geometry(32, 1), 132 << 10, disk_path="/cache/dp1", num_frames=1985, num_found=1) == (
        "chunks of 32 tokens (1 block, 132 KiB), host 256 MiB in 1985 frames, disk /cache/dp1 up to 1 GiB with 1 chunk found, "
        "eviction lru"
    )
    assert tiers_text(Config(host_size=3 << 29), Geometry(16, 4), 4096, disk_path=None, num_frames=1, num_found=0) == (
        "chunks of 64 tokens (4 blocks, 4 KiB), host 1.5 GiB in 1 frame, no disk, eviction lru"
    )
    assert "up to 1 GiB with 0 chunks found" in tiers_text(
        config, Geometry(1, 1), 4096, disk_path="/cache", num_frames=2, num_found=0
    )


def test_each_data_parallel_engine_has_a_directory_of_its_own() -> None:
    config = Config(disk_path="/cache")
    alone = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, data_parallel_index=0)
    assert _disk_path(config, alone) == "/cache"
    assert _disk_path(Config(), alone) is None
    assert _disk_path(config, SimpleNamespace(data_parallel_size=2, data_parallel_rank=0, data_parallel_index=1)) == "/cache/dp1"
    assert _disk_path(config, SimpleNamespace(data_parallel_size=2, data_parallel_rank=1)) == "/cache/dp1"


@pytest.mark.parametrize("is_moe", [False, True])
def test_engines_that_vllm_makes_independent_have_one_too(is_moe: bool) -> None:
    """As vLLM's engine process does it: a dense model's engine is told that it is the only one, but for its index."""
    paths = []
    for index in range(3):
        parallel = ParallelConfig(data_parallel_size=3, data_parallel_size_local=3)
        parallel.data_parallel_index = index
        if is_moe:
            parallel.data_parallel_rank = index
        else:
            parallel.reconfigure_for_independent_dp_rank()
        paths.append(_disk_path(Config(disk_path="/cache"), parallel))
    assert paths == ["/cache", "/cache/dp1", "/cache/dp2"]
