"""Tests the values derived from the settings before a store exists: chunk sizes, and the directory
of each engine.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvloft.config.table import Config
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.store import disk_path_of
from kvloft.transfer.frames import E348, RAW, part_bytes_for
from kvloft.vllm import shape as shape_module
from kvloft.vllm.scheduler_half import tiers_text
from kvloft.vllm.shape import (
    cache_shape,
    draft_limit,
    encoding_of,
    group_shape,
    has_draft_kv,
    lookahead,
    num_replicas,
)


def parts_of(shape: CacheShape) -> tuple[int, ...]:
    return tuple(group.part_bytes for group in shape.groups)


def shape_of(block_tokens: int, blocks_per_unit: int, frame_bytes: int) -> CacheShape:
    return CacheShape((GroupShape(block_tokens, blocks_per_unit, part_bytes=frame_bytes),))


def engine(num_ranks: int, *, method: str | None = None, num_stages: int = 1) -> Any:
    speculative = SimpleNamespace(method=method) if method else None
    parallel = SimpleNamespace(
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=num_stages,
        world_size=num_ranks * num_stages,
    )
    return SimpleNamespace(parallel_config=parallel, speculative_config=speculative)


MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
HEADS = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_ranks_share_a_part_if_vllm_reports_that_they_hold_the_same_bytes(num_ranks: int) -> None:
    config = SimpleNamespace(kv_tp_replicas=num_ranks)
    assert num_replicas(engine(num_ranks), config) == num_ranks
    assert num_replicas(engine(num_ranks, method="mtp"), config) == num_ranks
    assert num_replicas(engine(num_ranks, method="mtp", num_stages=2), config) == 1


@pytest.mark.parametrize(
    ("specs", "method", "expected"),
    [
        ([MLA, MLA], None, 8),
        ([MLA, HEADS], None, 1),
        ([HEADS, HEADS], None, 1),
        ([MLA, MLA], "eagle3", 1),
    ],
)
def test_without_a_report_only_latents_are_the_same_on_all_ranks(
    specs: list[Any], method: str | None, expected: int
) -> None:
    layers = {f"layer{number}": spec for number, spec in enumerate(specs)}
    group = SimpleNamespace(
        layer_names=list(layers), kv_cache_spec=SimpleNamespace(kv_cache_specs=layers)
    )
    config = SimpleNamespace(kv_cache_groups=[group])
    assert num_replicas(engine(8, method=method), config) == expected


def test_replicas_read_the_part_that_the_first_of_them_writes() -> None:
    shape = CacheShape((GroupShape(16, part_bytes=8192),), num_ranks=4, num_replicas=2)
    assert [shape.shard_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [shape.is_writer(rank) for rank in range(4)] == [True, False, True, False]
    assert (shape.frame_bytes(0), shape.num_ranks) == (16384, 4)
    with pytest.raises(ValueError, match="rank 4"):
        shape.shard_of(4)
    with pytest.raises(ValueError, match="num_ranks=3"):
        CacheShape((GroupShape(16),), num_ranks=3, num_replicas=2)


def stage(*groups: tuple[Any, Sequence[str]]) -> Any:
    """Return the config of a rank, with the spec and the layers of each group on the rank."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for spec, names in groups
        ]
    )


@pytest.mark.parametrize("layers", [("ab", "cde"), ("abc", "de"), ("a", "bcde")])
def test_the_largest_pipeline_stage_decides_how_large_a_part_is(layers: tuple[str, ...]) -> None:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    engine, ranks = pipeline(), [stage((spec, names)) for names in layers for _ in range(2)]
    for rank in ranks:
        rank.kv_tp_replicas = 2
    shape = cache_shape(engine, ranks)
    assert parts_of(shape) == (part_bytes_for(max(map(len, layers)) * spec.page_size_bytes),)
    assert [shape.shard_of(rank) for rank in range(4)] == [0, 0, 1, 1], (
        "two ranks of a stage hold the same KV"
    )
    own = [cache_shape(engine, [rank]) for rank in ranks]
    alike = [tuple(replace(group, part_bytes=0) for group in each.groups) for each in (*own, shape)]
    assert len(set(alike)) == 1, "all ranks must choose the same chunks"
    assert max(parts_of(each) for each in own) == parts_of(shape)


def test_a_stage_may_have_no_layer_of_a_group() -> None:
    kv: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**kv), SlidingWindowSpec(sliding_window=33, **kv)
    ranks = [stage((window, "ab"), (full, "")), stage((window, "c"), (full, "def"))]
    shape = cache_shape(pipeline(2, 1), ranks)
    assert [group.kind for group in shape.groups] == ["window", "full"]
    sizes = [2 * window.page_size_bytes, 3 * full.page_size_bytes]
    assert parts_of(shape) == tuple(map(part_bytes_for, sizes))


def test_layers_of_one_group_that_differ_in_size_are_added_up() -> None:
    """vLLM passes a single page size to the scheduler, but the page size of every layer to each
    rank. kvloft uses the sizes that the ranks receive.
    """
    kv: Any = {"block_size": 16, "num_kv_heads": 1, "dtype": torch.float32}
    specs: Any = {
        "a": FullAttentionSpec(head_size=32, **kv),
        "b": FullAttentionSpec(head_size=128, **kv),
    }
    ranks = [stage((UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs), "ab"))]
    assert parts_of(cache_shape(pipeline(1, 1), ranks)) == (
        part_bytes_for(sum(spec.page_size_bytes for spec in specs.values())),
    )


BF16 = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
FP8 = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.uint8)


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape_module, "current_platform", SimpleNamespace(is_cuda=lambda: True))


@pytest.mark.parametrize(
    ("config", "specs", "expected"),
    [
        (Config(), [BF16], E348),
        (Config(), [FP8], RAW),
        (Config(), [FP8, BF16], E348),
        (Config(compression="off"), [BF16], RAW),
        (Config(gpu_copies="torch"), [BF16], RAW),
    ],
)
def test_parts_are_encoded_if_a_layer_is_bf16(
    config: Config, specs: list[Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda(monkeypatch)
    assert (
        encoding_of([stage(*((spec, [f"layer {i}"]) for i, spec in enumerate(specs)))], config)
        == expected
    )


def test_parts_are_raw_on_cpus() -> None:
    assert encoding_of([stage((BF16, "ab"))], Config()) == RAW


def test_encoded_parts_have_room_for_a_table() -> None:
    """A part's table has one entry per 4 KiB, and one more per layer if K and V are separate."""
    ranks = [stage((BF16, [f"layer {i}" for i in range(32)]))]
    shape, without = (cache_shape(pipeline(1, 1), ranks, encoding) for encoding in (E348, RAW))
    assert (shape.encoding, without.encoding) == (E348, RAW)
    payload = 32 * BF16.page_size_bytes
    assert (
        parts_of(shape)
        == (part_bytes_for(payload, 32 * (BF16.page_size_bytes // 4096 + 1)),)
        > parts_of(without)
    )


def test_encoded_parts_of_each_group_have_room_for_its_table() -> None:
    windows = SlidingWindowSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=33
    )
    ranks = [stage((windows, "ab"), (BF16, "cde"))]
    shape = cache_shape(pipeline(1, 1), ranks, E348)
    assert not shape.is_divisible and shape.encoding == E348
    page = BF16.page_size_bytes
    tiles = page // 4096 + 1
    assert parts_of(shape) == tuple(part_bytes_for(num * page, num * tiles) for num in (2, 3))


def pipeline(num_stages: int = 2, num_ranks: int = 2) -> Any:
    model = SimpleNamespace(
        use_mla=False, get_total_num_kv_heads=lambda: 1, get_total_num_hidden_layers=lambda: 5
    )
    world = num_stages * num_ranks
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=num_stages, tensor_parallel_size=num_ranks, world_size=world
        ),
    )


@pytest.mark.parametrize(
    ("method", "has_kv", "ahead"),
    [
        (None, False, 0),
        ("ngram", False, 0),
        ("draft_model", True, 0),
        ("mtp", True, 1),
        ("dflash", True, 0),
    ],
)
def test_lookahead_follows_the_drafting_method(
    method: str | None, has_kv: bool, ahead: int
) -> None:
    config = SimpleNamespace(
        speculative_config=method and SimpleNamespace(method=method),
        num_prefill_lookahead_tokens=ahead,
    )
    assert (has_draft_kv(config), lookahead(config)) == (has_kv, ahead)


@pytest.mark.parametrize(("draft_len", "limit"), [(None, 59), (50, 45), (70, 59)])
def test_a_drafter_runs_only_as_far_as_its_guesses_fit(draft_len: int | None, limit: int) -> None:
    draft = draft_len and SimpleNamespace(max_model_len=draft_len)
    speculative = SimpleNamespace(
        method="eagle", num_speculative_tokens=3, draft_model_config=draft
    )
    model = SimpleNamespace(max_model_len=64)
    assert draft_limit(SimpleNamespace(speculative_config=speculative, model_config=model)) == limit
    assert draft_limit(SimpleNamespace(speculative_config=None)) is None


def test_the_start_line_is_in_units_and_numbers_as_people_write_them() -> None:
    config = Config(host_size=256 << 20, disk_path="/cache", disk_size=1 << 30)
    assert tiers_text(
        config, shape_of(32, 1, 132 << 10), disk_path="/cache/dp1", size_bytes=0, num_found=1
    ) == (
        "chunks of 32 tokens (1 block, 132 KiB), host 256 MiB, disk /cache/dp1 up "
        "to 1 GiB with 1 chunk found, "
        "eviction adaptive"
    )
    assert tiers_text(
        Config(host_size=3 << 29), shape_of(16, 4, 4096), disk_path=None, size_bytes=0, num_found=0
    ) == ("chunks of 64 tokens (4 blocks, 4 KiB), host 1.5 GiB, no disk, eviction adaptive")
    unequal = CacheShape(
        (
            GroupShape(64, part_bytes=8192),
            GroupShape(32, 2, kind="window", reach=63, part_bytes=8192),
        ),
    )
    assert tiers_text(config, unequal, disk_path=None, size_bytes=0, num_found=0).startswith(
        "chunks of 64 tokens (1 to 2 blocks, 8 KiB), "
    )
    opening = tiers_text(
        config, shape_of(32, 1, 132 << 10), disk_path="/cache", size_bytes=0, num_found=None
    )
    assert "not open yet" in opening
    assert "found" not in opening
    assert "up to 1 GiB with 0 chunks found" in tiers_text(
        config, shape_of(1, 1, 4096), disk_path="/cache", size_bytes=0, num_found=0
    )


def test_each_data_parallel_engine_has_a_separate_directory() -> None:
    config = Config(disk_path="/cache")
    alone = SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, data_parallel_index=0)
    assert disk_path_of(config, alone) == "/cache"
    assert disk_path_of(Config(), alone) is None
    assert (
        disk_path_of(
            config,
            SimpleNamespace(data_parallel_size=2, data_parallel_rank=0, data_parallel_index=1),
        )
        == "/cache/dp1"
    )
    assert (
        disk_path_of(config, SimpleNamespace(data_parallel_size=2, data_parallel_rank=1))
        == "/cache/dp1"
    )


@pytest.mark.parametrize("is_moe", [False, True])
def test_independent_engines_of_vllm_have_separate_paths(is_moe: bool) -> None:
    """As in vLLM's engine process, the config of a dense model describes a single engine, apart
    from the engine's index.
    """
    paths = []
    for index in range(3):
        parallel = ParallelConfig(data_parallel_size=3, data_parallel_size_local=3)
        parallel.data_parallel_index = index
        if is_moe:
            parallel.data_parallel_rank = index
        else:
            parallel.reconfigure_for_independent_dp_rank()
        paths.append(disk_path_of(Config(disk_path="/cache"), parallel))
    assert paths == ["/cache", "/cache/dp1", "/cache/dp2"]


def test_groups_reach_as_far_as_vllm_keeps_their_blocks() -> None:
    kv: Any = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    assert group_shape(FullAttentionSpec(block_size=16, **kv)) == GroupShape(16)
    window = group_shape(SlidingWindowSpec(block_size=16, sliding_window=33, **kv))
    assert window == GroupShape(16, kind="window", reach=32)
    local = group_shape(ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **kv))
    assert local == GroupShape(16, kind="local", reach=64)


@pytest.mark.parametrize("sizes", [(32, 32), (32, 64)])
def test_windows_in_every_layer_are_a_group_that_keeps_a_part(sizes: tuple[int, int]) -> None:
    kv: Any = {"num_kv_heads": 1, "dtype": torch.float32, "block_size": 16, "sliding_window": 33}
    specs = {f"{i}": SlidingWindowSpec(head_size=size, **kv) for i, size in enumerate(sizes)}
    one = (
        specs["0"]
        if len(set(sizes)) == 1
        else UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict(specs))
    )
    engine: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    groups = [SimpleNamespace(kv_cache_spec=one, layer_names=list(specs))]
    shape = cache_shape(engine, [SimpleNamespace(kv_cache_groups=groups)])
    assert shape.groups == (GroupShape(16, kind="window", reach=32, part_bytes=parts_of(shape)[0]),)
    assert (shape.is_divisible, shape.is_dense, shape.main) == (False, False, 0)
    assert parts_of(shape) == (
        part_bytes_for(sum(spec.page_size_bytes for spec in specs.values())),
    )


def test_each_group_has_frames_of_its_own_size() -> None:
    kv: Any = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full, window = (
        FullAttentionSpec(block_size=16, **kv),
        SlidingWindowSpec(block_size=16, sliding_window=32, **kv),
    )
    groups = [
        SimpleNamespace(kv_cache_spec=window, layer_names=["a"]),
        SimpleNamespace(kv_cache_spec=full, layer_names=["b", "c"]),
    ]
    engine: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    shape = cache_shape(engine, [SimpleNamespace(kv_cache_groups=groups)])
    assert (shape.main, shape.groups[1].kind, shape.num_shards) == (1, "full", 2)
    sizes = [window.page_size_bytes, 2 * full.page_size_bytes]
    assert parts_of(shape) == tuple(map(part_bytes_for, sizes))
    assert [shape.size_classes(group) for group in (0, 1)] == [(0, None), (1, None)]


@pytest.mark.parametrize(
    ("sizes", "window", "unit", "counts", "kept"),
    [
        ((64, 32), 64, 64, (1, 2), (1, 2)),
        ((64, 32), 32, 64, (1, 2), (1, 1)),
        ((32, 64), 64, 64, (2, 1), (2, 1)),
        ((32, 48), 200, 96, (3, 2), (3, 2)),
    ],
)
def test_groups_of_shorter_blocks_have_more_of_them_in_a_chunk(
    sizes: tuple[int, int], window: int, unit: int, counts: tuple[int, int], kept: tuple[int, int]
) -> None:
    """All chunks end where vLLM's hits can end.

    If a window is shorter than a unit, a chunk keeps only the blocks within the window.
    """
    kv: Any = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=sizes[0], **kv)
    windows = SlidingWindowSpec(block_size=sizes[1], sliding_window=window, **kv)
    groups = [
        SimpleNamespace(kv_cache_spec=full, layer_names=["a"]),
        SimpleNamespace(kv_cache_spec=windows, layer_names=["b", "c"]),
    ]
    engine: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    shape = cache_shape(engine, [SimpleNamespace(kv_cache_groups=groups)])
    assert (shape.unit_tokens, {group.unit_tokens for group in shape.groups}) == (unit, {unit})
    assert tuple(group.blocks_per_unit for group in shape.groups) == counts
    assert tuple(group.kept_blocks for group in shape.groups) == kept
    sizes = (kept[0] * full.page_size_bytes, kept[1] * 2 * windows.page_size_bytes)
    assert parts_of(shape) == tuple(map(part_bytes_for, sizes))


def test_only_bfloat16_groups_have_frames_for_compressed_chunks() -> None:
    floats = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.float16)
    ranks = [stage((BF16, [f"layer {i}" for i in range(32)]), (floats, "ab"))]
    shape = cache_shape(pipeline(1, 1), ranks, E348)
    encoded, plain = shape.groups
    assert 1.37 < encoded.part_bytes / encoded.compact_bytes < 1.40 and plain.compact_bytes == 0
    assert shape.size_classes(0) == (2, 1) and shape.size_classes(1) == (0, None)
    assert not any(group.compact_bytes for group in cache_shape(pipeline(1, 1), ranks).groups)
