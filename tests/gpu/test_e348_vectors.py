"""Tests the e348 format: checks the oracle of the GPU tests against golden vectors, and checks the
sizes of shards in staging.
"""

import json
from dataclasses import replace

import e348
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from gpu_support import Paged, one_buffer, per_layer

from kvloft.transfer.cuda.encoding import PartEncoding, can_encode, slot_stride
from kvloft.transfer.cuda.kernels import MAX_BLOCKS, BlockTiles
from kvloft.transfer.cuda.lanes import Tuning
from kvloft.transfer.cuda.pieces import PieceLimits
from kvloft.transfer.frames import FrameMemory, part_bytes_for

VECTORS = json.loads(e348.VECTORS.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", VECTORS, ids=[case["name"] for case in VECTORS])
def test_oracle_makes_the_golden_records(case: dict[str, str]) -> None:
    tile = bytes.fromhex(case["tile"])
    made = e348.encode_tile(tile)
    assert f"{made.entry(0):016x}" == case["entry"]
    record = bytes.fromhex(case["record"] or case["tile"])
    assert made.record == record
    assert e348.decode_tile(int(case["entry"], 16), record, len(tile)) == tile


@given(
    sample=st.sampled_from(sorted(e348.SAMPLES)),
    sizes=st.lists(st.integers(1, 256).map(lambda n: 16 * n), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_oracle_round_trips(sample: str, sizes: list[int], seed: int, data: st.DataObject) -> None:
    tiles = [(size, data.draw(st.booleans())) for size in sizes]
    payload = e348.SAMPLES[sample](np.random.default_rng(seed), sum(sizes) // 2).tobytes()
    part = e348.encode_part(payload, tiles)
    assert len(part) <= -(-8 * len(tiles) // 16) * 16 + len(payload)
    assert e348.decode_part(part, tiles) == payload


def bf16(paged: Paged) -> Paged:
    paged.are_bf16 = [True] * len(paged.planes)
    return paged


def layouts() -> dict[str, Paged]:
    return {
        "bf16": bf16(per_layer(4, 3, 32 << 10)),
        "MLA": bf16(one_buffer(4, 3, 18 << 10)),
        "not bf16": per_layer(4, 3, 32 << 10),
        "misaligned": bf16(per_layer(4, 3, 4096, offset=8)),
        "tiny": bf16(per_layer(4, 3, 512)),
    }


def test_layouts_that_compress_into_a_slot_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpu_support.DEVICE", "cpu")
    found = {name: can_encode(paged.layout(), 2, 1 << 20) for name, paged in layouts().items()}
    assert found == {
        "bf16": True,
        "MLA": True,
        "not bf16": False,
        "misaligned": False,
        "tiny": False,
    }
    whole = layouts()["bf16"].layout()
    assert (
        not can_encode(whole, 9, 1 << 20)
        and not can_encode(whole, 2000, 1 << 40)
        and can_encode(whole, 9, 2 << 20)
    )


def test_an_encoded_part_is_at_most_as_large_as_its_table_can_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpu_support.DEVICE", "cpu")
    layout = bf16(per_layer(4, 3, 256 << 10)).layout()
    num_blocks = (16 << 24) // layout.block_bytes
    assert num_blocks <= MAX_BLOCKS
    assert can_encode(layout, num_blocks * 9 // 10, 1 << 40)
    assert not can_encode(layout, num_blocks, 1 << 40)


def memory_of(part_bytes: int) -> FrameMemory:
    return FrameMemory(1 << 45, 16 * part_bytes, part_bytes, part_bytes, 0, part_bytes, 0, None)


@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_a_width_holds_the_table_and_a_whole_one_everything(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_support.DEVICE", "cpu")
    layout = layouts()["MLA"].layout()
    tiles = e348.tiles_of(layout.page_bytes, num_blocks)
    payload, table = layout.block_bytes * num_blocks, -(-8 * len(tiles) // 16) * 16
    narrow, whole = (
        PartEncoding.of(layout, memory_of(1 << 20), everything=each).width(num_blocks)
        for each in (False, True)
    )
    assert table < narrow < 0.71 * payload and payload + table <= whole <= payload + table + 128
    assert slot_stride(narrow) >= narrow + 4096


def test_slots_hold_more_encoded_chunks_than_raw_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """If encoded pieces transferred fewer bytes than raw pieces, kernels would delay the link."""
    monkeypatch.setattr("gpu_support.DEVICE", "cpu")
    layout = bf16(per_layer(16, 3, 64 << 10)).layout()
    part_bytes = part_bytes_for(layout.block_bytes, 256)
    raw = PieceLimits(BlockTiles.of(layout), 40 << 20, part_bytes, 1, 10)
    encoded = replace(raw, encoding=PartEncoding.of(layout, memory_of(part_bytes)))
    assert (raw.chunks_per_piece, encoded.chunks_per_piece) == (39, 56)


@pytest.mark.parametrize(
    ("chunk_bytes", "num_slots", "slot_bytes"),
    [
        (2 << 20, 4, 20 << 20),
        (3 << 20, 4, 18 << 20),
        (20 << 20, 4, 20 << 20),
        (21 << 20, 2, 40 << 20),
    ],
)
def test_saves_of_encoded_pages_have_twice_the_slots_if_a_chunk_fits_half_of_one(
    chunk_bytes: int, num_slots: int, slot_bytes: int
) -> None:
    halved = Tuning(2, 40 << 20).halved(chunk_bytes)
    assert (halved.num_slots, halved.slot_bytes) == (num_slots, slot_bytes)


def test_parts_contain_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_support.DEVICE", "cpu")
    layout = layouts()["bf16"].layout()
    encoding = PartEncoding.of(layout, memory_of(1 << 20))
    parts = encoding.parts([3, 0], [1, 2], np.array([False, True]))
    assert parts["address"].tolist() == [(1 << 45) + (3 << 20), 1 << 45]
    assert parts["width"].tolist() == [encoding.width(1), encoding.width(2)] and parts[
        "is_raw"
    ].tolist() == [0, 1]
    whole = PartEncoding.of(layout, memory_of(1 << 20), everything=True)
    assert whole.parts([3], [1], None)["address"].tolist() == [0], (
        "kernels must not access unregistered frames"
    )
