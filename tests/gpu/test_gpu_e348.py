"""Compares encoded shards on a GPU with the numpy oracle (bits, tags and records) for many kinds of
content, page sizes, widths and damage.
"""

import os
import random
from collections.abc import Sequence

import e348
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

from gpu_support import (
    Frames,
    Paged,
    block_outermost,
    copies_of,
    load,
    make_mover,
    mixed,
    one_buffer,
    part_bytes_for,
    per_layer,
    save,
    trailers_of,
)
from kernels_oracle import chunk_tag
from test_gpu_mover import check_load, check_partial_loads, check_unregistered, random_chunks

NUM_FAULTS = int(os.environ.get("KV_NUM_FAULTS", "10000"))
ORACLE_TILES = 300
"""Number of tiles per test whose records are compared with the oracle."""
LAYOUTS = {
    "pages_of_4k": lambda: per_layer(5, 29, 4096),
    "pages_of_6k": lambda: one_buffer(3, 31, 6 << 10),
    "pages_of_18k": lambda: one_buffer(3, 23, 18 << 10),
    "pages_of_64k": lambda: block_outermost(3, 17, 64 << 10),
    "pages_of_2m": lambda: block_outermost(1, 7, 2 << 20),
    "pages_of_1k": lambda: per_layer(3, 29, 1024, gap=16),
    "pages_of_odd_rows": lambda: per_layer(3, 29, 4096 + 1552),
    "mixed": lambda: some_bf16(mixed(23, [18432, 8448, 2048, 528]), [True, False, True, False]),
}


def some_bf16(paged: Paged, are_bf16: Sequence[bool]) -> Paged:
    paged.are_bf16 = are_bf16
    return paged


def bf16(name: str) -> Paged:
    """Return paged KV in which all planes are bfloat16, unless the layout specifies otherwise."""
    paged = LAYOUTS[name]()
    return paged if paged.are_bf16 else some_bf16(paged, [True] * len(paged.planes))


def fill(paged: Paged, sample: str | e348.Words, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    words_of = e348.SAMPLES[sample] if isinstance(sample, str) else sample
    for buffer in paged.buffers:
        words = words_of(rng, len(buffer) // 2)
        buffer.copy_(torch.from_numpy(words.view(np.uint8).copy()))


def tiles_of(paged: Paged, num_blocks: int) -> e348.Tiles:
    return e348.tiles_of([plane[3] for plane in paged.planes], num_blocks, paged.are_bf16)


def encoded_frames(paged: Paged, num_frames: int, num_blocks: int, **ranks: int) -> Frames:
    return Frames(
        num_frames,
        part_bytes_for(paged.block_bytes * num_blocks + 8 * len(tiles_of(paged, num_blocks)) + 16),
        **ranks,
    )


def check_part(
    part: np.ndarray, payload: bytes, tiles: e348.Tiles, encoded_bytes: int, num_tiles: int
) -> None:
    """Check that the shard's records have no gaps or overlaps, and that the first ``num_tiles``
    records equal the oracle's records and decode to ``payload``.
    """
    table_bytes = -(-8 * len(tiles) // 16) * 16
    entries = part[: 8 * len(tiles)].view("<u8").tolist()
    at, spans = 0, []
    for i, (entry, (num_bytes, is_bf16)) in enumerate(zip(entries, tiles, strict=True)):
        offset, size = entry & 0xFFFFFF, e348.record_bytes(entry, num_bytes)
        spans.append((offset * 16, size))
        if i < num_tiles:
            want = e348.encode_tile(payload[at : at + num_bytes], is_bf16=is_bf16)
            assert entry == want.entry(offset), (i, hex(entry), hex(want.entry(offset)))
            record = part[table_bytes + 16 * offset :][:size].tobytes()
            assert record[: len(record) - 15] == want.record[: len(record) - 15], (
                i
            )  # padding is undefined
            assert e348.decode_tile(entry, record, num_bytes) == payload[at : at + num_bytes]
        at += num_bytes
    end = 0
    for begin, size in sorted(spans):
        assert begin == end
        end += size
    assert encoded_bytes == table_bytes + end


def check_round_trip(
    paged: Paged, sample: str | e348.Words, blocks_per_chunk: int, *, seed: int = 0, **route
) -> float:
    """Save, check and load all chunks.

    Returns the size of the encoded shards as a fraction of the payload.
    """
    num_frames = paged.num_blocks + 3
    frames = encoded_frames(paged, num_frames, blocks_per_chunk)
    mover = make_mover(paged, frames, blocks_per_chunk, encodes=True, **route)
    fill(paged, sample, seed)
    before = paged.snapshot()
    places, chunks = random_chunks(paged, blocks_per_chunk, num_frames, seed)
    copies = copies_of(places, chunks)
    done = save(mover, copies)
    assert sorted(done.saved) == [copy.ticket for copy in copies] and not done.failed
    trailers, page_bytes = trailers_of(frames.memory), [plane[3] for plane in paged.planes]
    budget, stored, raw = ORACLE_TILES, 0, 0
    for frame, blocks in zip(places, chunks, strict=True):
        payload, tiles = paged.payload(blocks).cpu().numpy(), tiles_of(paged, len(blocks))
        assert int(trailers[frame]["tag"]) == chunk_tag(payload, page_bytes, len(blocks))
        assert int(trailers[frame]["encoding"]) == 1
        check_part(
            frames.parts[frame],
            payload.tobytes(),
            tiles,
            int(trailers[frame]["encoded_bytes"]),
            budget,
        )
        budget = max(0, budget - len(tiles))
        stored, raw = stored + int(trailers[frame]["encoded_bytes"]), raw + len(payload)
    for frame in set(range(num_frames)) - set(places):
        assert (frames.raw[frame] == 0xA5).all(), "a wrong frame was written"
    for now, then in zip(paged.buffers, before, strict=True):
        assert torch.equal(now, then), "a save changed its source"
    check_load(paged, mover, copies, before, seed)
    mover.close()
    return stored / raw


@pytest.mark.parametrize("sample", e348.SAMPLES)
def test_any_content_round_trips(sample: str) -> None:
    check_round_trip(bf16("pages_of_18k"), sample, 2)


@pytest.mark.parametrize("share", [0.0, 0.6, 0.7, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_page_size_and_width_round_trips(
    layout: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With share 0.6, kernels write and read part of each chunk in host memory."""
    monkeypatch.setattr("kvloft.transfer.cuda.encoding.SHARE", share)
    for sample in ("gaussian", "random words"):
        check_round_trip(
            bf16(layout),
            sample,
            1 if layout == "pages_of_2m" else 3,
            ring=(2, 9 << 20),
            num_ctas=20,
        )


@pytest.mark.parametrize(
    ("sample", "most"),
    [
        ("gaussian", 0.70),
        ("5 % zeros", 0.72),
        ("half zeros", 0.83),
        ("zeros", 0.69),
        ("random words", 1.003),
    ],
)
def test_sizes_are_those_of_the_format(sample: str, most: float) -> None:
    assert check_round_trip(bf16("pages_of_64k"), sample, 1) <= most


@pytest.mark.skipif(
    "KV_SMOLLM2" not in os.environ,
    reason="needs real keys and values: KV_SMOLLM2=FILE, written by tests/gpu/smollm2.py",
)
@pytest.mark.parametrize("page_kib", [4, 6, 18, 64])
def test_real_keys_and_values_come_back_and_take_71_percent(page_kib: int) -> None:
    """vLLM's pages for this model are 6 KiB: the K or V of 16 tokens in one layer."""
    words = np.load(os.environ["KV_SMOLLM2"]).reshape(-1)
    num_planes = 60 if page_kib == 6 else 10
    paged = one_buffer(num_planes, 2 * len(words) // (num_planes * page_kib << 10), page_kib << 10)
    paged.are_bf16 = [True] * num_planes
    share = check_round_trip(paged, lambda _, count: words[:count], 1)
    print(f"pages of {page_kib} KiB: {share:.4f} of raw")
    assert share <= 0.71


def test_parts_saved_raw_and_with_any_width_are_loaded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = bf16("pages_of_18k")
    frames = encoded_frames(paged, 20, 3)
    copies = copies_of(range(7), [[block, block + 7, block + 14] for block in range(7)])
    fill(paged, "outliers")
    before = paged.snapshot()
    for nth, (encodes, share) in enumerate([(False, 0.7), (True, 0.65), (True, 0.9)]):
        monkeypatch.setattr("kvloft.transfer.cuda.encoding.SHARE", share)
        mover = make_mover(paged, frames, 3, encodes=encodes)
        assert len(save(mover, copies[nth::3]).saved) == len(copies[nth::3])
        mover.close()
    monkeypatch.setattr("kvloft.transfer.cuda.encoding.SHARE", 0.7)
    mover = make_mover(paged, frames, 3, encodes=True)
    check_load(paged, mover, copies, before, seed=1)
    mover.close()


def test_an_encoded_part_is_a_miss_for_raw_readers() -> None:
    paged = bf16("pages_of_4k")
    frames = encoded_frames(paged, 10, 1)
    copies = copies_of(range(6), [[block] for block in range(6)])
    fill(paged, "gaussian")
    mover = make_mover(paged, frames, 1, encodes=True)
    save(mover, copies)
    mover.close()
    mover = make_mover(paged, frames, 1)
    done = load(mover, copies)
    assert {problem for _, problem in done.loads[0].bad_keys} == {
        "layout"
    } and done.bad_blocks == set(range(6))
    mover.close()


def test_chunks_that_do_not_fit_their_parts_are_not_saved() -> None:
    """Shards have less space than a raw payload needs, so chunks of noise do not fit.

    The bytes after a shard must not change.
    """
    paged = bf16("pages_of_4k")
    frames = Frames(12, part_bytes_for(paged.block_bytes * 3) - 4096, 0, 2)
    copies = copies_of(range(9), [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(9)])
    fill(paged, "gaussian")
    for buffer in paged.buffers:
        pages = buffer.view(paged.num_blocks, -1)
        for copy in copies[::3]:
            pages[list(copy.blocks)] = torch.randint(
                0, 256, (3, 4096), dtype=torch.uint8, device=buffer.device
            )
    mover = make_mover(paged, frames, 3, encodes=True)
    done = save(mover, copies)
    assert done.failed == [copy.ticket for copy in copies[::3]]
    assert done.saved == [copy.ticket for copy in copies if copy not in copies[::3]]
    assert (frames.raw[:, 1] == 0xA5).all()
    done = load(mover, copies)
    assert done.loads[0].bad_keys == tuple((copy.key, "unsealed") for copy in copies[::3])
    mover.close()


def test_partial_loads_write_only_their_blocks() -> None:
    paged = bf16("pages_of_6k")
    mover = make_mover(paged, encoded_frames(paged, 6, 7), 7, encodes=True)
    fill(paged, "outliers")
    check_partial_loads(paged, mover)
    mover.close()


def test_unregistered_frames_are_loaded_but_not_used_by_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels must not access unregistered frames, so their shards are copied whole."""
    monkeypatch.setattr("kvloft.transfer.cuda.encoding.SHARE", 0.65)
    paged = bf16("pages_of_18k")
    frames = encoded_frames(paged, 20, 1)
    fill(paged, "outliers")
    mover, copies = check_unregistered(paged, frames, monkeypatch, encodes=True)
    frames.parts[:, :800] = 0xFF  # table entries that point past the end of the shard
    assert len(load(mover, copies).loads[0].bad_keys) == 15
    mover.close()


def test_ranks_stay_in_their_part() -> None:
    paged = bf16("pages_of_18k")
    frames = encoded_frames(paged, 12, 1, rank=1, num_ranks=3)
    fill(paged, "random words")
    mover = make_mover(paged, frames, 1, encodes=True)
    copies = copies_of([3, 4, 5, 6, 9], [[5], [2], [15], [0], [7]])
    assert len(save(mover, copies).saved) == 5
    assert (np.delete(frames.raw, 1, axis=1) == 0xA5).all()
    assert not load(mover, copies).bad_blocks
    mover.close()


def damage(part: np.ndarray, size: int, table_bytes: int, rng: random.Random) -> None:
    """Damage a shard of ``size`` bytes, often in its table."""
    kind = rng.choice(
        ("bit", "bit", "entry", "entry bit", "swap", "noise", "zero", "ones", "truncate")
    )
    at = rng.randrange(size)
    if kind == "bit":
        part[at] ^= 1 << rng.randrange(8)
    elif kind == "entry bit":
        part[rng.randrange(table_bytes)] ^= 1 << rng.randrange(8)
    elif kind == "entry":
        entry = rng.randrange(table_bytes // 8) * 8
        part[entry : entry + 8] = np.frombuffer(rng.randbytes(8), np.uint8)
    elif kind == "swap":
        one, two = (rng.randrange(table_bytes // 8) * 8 for _ in range(2))
        first = part[one : one + 8].copy()
        part[one : one + 8] = part[two : two + 8]
        part[two : two + 8] = first
    else:
        end = min(size, at + rng.choice([16, 256, 4096]))
        noise = np.frombuffer(rng.randbytes(end - at), np.uint8)
        part[at : size if kind == "truncate" else end] = {
            "noise": noise,
            "zero": 0,
            "ones": 0xFF,
            "truncate": 0x5A,
        }[kind]


@pytest.mark.parametrize("layout", ["pages_of_6k", "mixed"])
def test_damage_is_a_miss_or_has_no_effect(layout: str) -> None:
    """Damage must cause neither a fault nor a wrong byte with a matching tag."""
    num_chunks = 50
    paged = bf16(layout)
    paged = some_bf16(mixed(2 * num_chunks, [plane[3] for plane in paged.planes]), paged.are_bf16)
    frames = encoded_frames(paged, num_chunks, 1)
    mover = make_mover(paged, frames, 1, encodes=True)
    fill(paged, "every exponent")
    saved = [buffer.view(2 * num_chunks, -1)[:num_chunks].clone() for buffer in paged.buffers]
    save(mover, copies_of(range(num_chunks), [[block] for block in range(num_chunks)]))
    sizes = trailers_of(frames.memory)["encoded_bytes"].tolist()
    good, table_bytes = frames.raw.copy(), 8 * len(tiles_of(paged, 1))
    copies = copies_of(range(num_chunks), [[num_chunks + block] for block in range(num_chunks)])
    assert not load(mover, copies).bad_blocks
    rng, injected, missed = random.Random(7), 0, 0
    while injected < NUM_FAULTS // 2:
        frames.raw[:] = good
        hurt = [i for i in range(num_chunks) if rng.random() < 0.97]
        for i in hurt:
            damage(frames.parts[i], sizes[i], table_bytes, rng)
        done = load(mover, copies)
        bad = {int(block) - num_chunks for block in done.bad_blocks}
        assert bad <= set(hurt)
        fine = [i for i in range(num_chunks) if i not in bad]
        for buffer, then in zip(paged.buffers, saved, strict=True):
            assert torch.equal(buffer.view(2 * num_chunks, -1)[num_chunks:][fine], then[fine])
        injected += len(hurt)
        missed += len(bad)
    assert missed > 0.5 * injected
    print(
        f"{layout}: {injected} damaged parts, {missed} misses, the others decoded to the same bytes"
    )
    mover.close()
