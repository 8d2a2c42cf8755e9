"""The e348 encoding in numpy, as defined in docs/design/compression.md. This module is the oracle
for csrc/e348.cu and shares no code with it.

`python tests/model/e348.py --write` writes tests/vectors/e348.json, and `--check` checks that
the file is up to date.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

VECTORS = Path(__file__).parents[1] / "vectors" / "e348.json"
TILE, LANES = 4096, 32
MAX_NIBBLES, MAX_BYTES = 1728, 255


class Tile(NamedTuple):
    """A record and its table entry without the offset."""

    top: int
    num_nibbles: int
    num_bytes: int
    is_raw: bool
    record: bytes

    def entry(self, offset: int) -> int:
        kind = 0xFFF if self.is_raw else 0
        return offset | self.top << 24 | kind << 32 | self.num_nibbles << 44 | self.num_bytes << 56


def in_code_order(words: np.ndarray) -> np.ndarray:
    """Reorder 2,048 values from page order to [lane, half, word, parity], the order of escapes and
    of code bits.
    """
    rows = words.reshape(2, 2, 2, LANES, 8)  # half, parity, row of the pair, lane, word of the row
    return np.ascontiguousarray(rows.transpose(3, 0, 2, 4, 1)).reshape(LANES, 2, 16, 2)


def in_page_order(ordered: np.ndarray) -> np.ndarray:
    """Invert `in_code_order`."""
    return np.ascontiguousarray(
        ordered.reshape(LANES, 2, 2, 8, 2).transpose(1, 4, 2, 0, 3)
    ).reshape(-1)


def padded(values: np.ndarray) -> np.ndarray:
    whole = np.zeros(TILE // 2, values.dtype)
    whole[: len(values)] = values
    return whole


def nibble_of(exponent: int, top: int) -> int:
    below = (top - exponent) % 256
    if exponent == 0:
        return 14
    if below >= 251:
        return 255 - below
    return below - 2 if below < 16 else 15


def encode_tile(tile: bytes, *, is_bf16: bool = True) -> Tile:
    raw = Tile(0, 0, 0, True, tile)
    if not is_bf16:
        return raw
    words = np.frombuffer(tile, "<u2")
    rotated = (words << 1 | words >> 15).astype(np.uint16)
    exponents, low = (rotated >> 8).astype(np.int64), (rotated & 255).astype(np.uint8)
    nonzero = exponents[exponents != 0]
    top = (int(nonzero.sum()) // len(nonzero) + 3) % 256 if len(nonzero) else 0
    is_there = in_code_order(padded(np.ones(len(words), bool)))
    ordered = in_code_order(padded(exponents))
    codes = np.where(is_there, np.minimum((top - ordered) % 256, 7), 0)
    escaped = ordered[codes == 7]
    nibbles = [nibble_of(int(exponent), top) for exponent in escaped]
    singles = [
        int(exponent) for exponent, nibble in zip(escaped, nibbles, strict=True) if nibble == 15
    ]
    num_pairs = -(-len(tile) // 1024)
    # low bytes: [pair, lane, row of the pair, word of the row]
    planes = [padded(low).reshape(4, 2, LANES, 8).transpose(0, 2, 1, 3)[:num_pairs].tobytes()]
    by_pair = codes.transpose(1, 3, 0, 2).reshape(4, LANES, 16)  # [pair, lane, word]
    planes.append(
        ((by_pair & 3) << 2 * np.arange(16)).sum(axis=2).astype("<u4")[:num_pairs].tobytes()
    )
    bits = (codes >> 2).reshape(LANES, 2, 32).transpose(1, 0, 2)  # [half, lane, bit]
    planes.append((bits << np.arange(32)).sum(axis=2).astype("<u4")[: -(-num_pairs // 2)].tobytes())
    shifted = [*nibbles, *[0] * (-len(nibbles) % 8)]
    planes.append(bytes(shifted[i] | shifted[i + 1] << 4 for i in range(0, len(shifted), 2)))
    record = b"".join(planes) + bytes(singles)
    record += bytes(-len(record) % 16)
    if len(nibbles) > MAX_NIBBLES or len(singles) > MAX_BYTES or len(record) >= len(tile):
        return raw._replace(top=top)
    return Tile(top, len(nibbles), len(singles), False, record)


def record_bytes(entry: int, num_bytes: int) -> int:
    """Return the record size of a tile with ``num_bytes`` bytes."""
    if entry >> 32 & 0xFFF == 0xFFF:
        return num_bytes
    num_pairs, num_nibbles = -(-num_bytes // 1024), entry >> 44 & 0xFFF
    size = 640 * num_pairs + 128 * -(-num_pairs // 2) + 4 * -(-num_nibbles // 8) + (entry >> 56)
    return -(-size // 16) * 16


def decode_tile(entry: int, record: bytes, num_bytes: int) -> bytes:
    top, num_nibbles = entry >> 24 & 255, entry >> 44 & 0xFFF
    if entry >> 32 & 0xFFF == 0xFFF:
        return record[:num_bytes]
    num_pairs = -(-num_bytes // 1024)
    num_halves = -(-num_pairs // 2)
    at = 512 * num_pairs
    low = np.zeros((4, LANES, 2, 8), np.uint16)
    low[:num_pairs] = np.frombuffer(record, np.uint8, at).reshape(num_pairs, LANES, 2, 8)
    low_codes = np.zeros((4, LANES), np.int64)
    low_codes[:num_pairs] = np.frombuffer(record, "<u4", num_pairs * LANES, at).reshape(
        num_pairs, LANES
    )
    at += 128 * num_pairs
    high_codes = np.zeros((2, LANES), np.int64)
    high_codes[:num_halves] = np.frombuffer(record, "<u4", num_halves * LANES, at).reshape(
        num_halves, LANES
    )
    at += 128 * num_halves
    codes = (
        (low_codes[:, :, None] >> 2 * np.arange(16) & 3)
        .reshape(2, 2, LANES, 16)
        .transpose(2, 0, 3, 1)
    )
    codes = codes + ((high_codes[:, :, None] >> np.arange(32) & 1) << 2).transpose(1, 0, 2).reshape(
        LANES, 2, 16, 2
    )
    exponents = (top - codes) % 256
    packed = np.frombuffer(record, np.uint8, -(-num_nibbles // 8) * 4, at)
    nibbles = (
        np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:num_nibbles].astype(np.int64)
    )
    at += len(packed)
    singles = iter(record[at:])
    values = [
        next(singles)
        if nibble == 15
        else 0
        if nibble == 14
        else (top + 1 + nibble if nibble < 5 else top - 2 - nibble) % 256
        for nibble in nibbles.tolist()
    ]
    exponents[codes == 7] = values
    rotated = in_page_order(exponents).astype(np.uint16) << 8 | low.transpose(0, 2, 1, 3).reshape(
        -1
    )
    return (rotated >> 1 | rotated << 15).astype("<u2").tobytes()[:num_bytes]


Tiles = Sequence[tuple[int, bool]]
"""The tiles of a chunk: the size of each tile in bytes, and True if the tile contains bf16."""


def tiles_of(
    page_bytes: Sequence[int], num_blocks: int, are_bf16: Sequence[bool] | None = None
) -> Tiles:
    kinds = are_bf16 or [True] * len(page_bytes)
    pages = [
        (page, kind)
        for _ in range(num_blocks)
        for page, kind in zip(page_bytes, kinds, strict=True)
    ]
    return [(min(TILE, page - at), kind) for page, kind in pages for at in range(0, page, TILE)]


def encode_part(payload: bytes, tiles: Tiles) -> bytes:
    """Return the table and the records in the order of the tiles."""
    table_bytes = -(-8 * len(tiles) // 16) * 16
    entries, records, at, offset = [], [], 0, 0
    for num_bytes, is_bf16 in tiles:
        tile = encode_tile(payload[at : at + num_bytes], is_bf16=is_bf16)
        entries.append(tile.entry(offset))
        records.append(tile.record)
        at += num_bytes
        offset += len(tile.record) // 16
    return np.array(entries, "<u8").tobytes().ljust(table_bytes, b"\0") + b"".join(records)


def decode_part(part: bytes, tiles: Tiles) -> bytes:
    table_bytes = -(-8 * len(tiles) // 16) * 16
    entries = np.frombuffer(part, "<u8", len(tiles)).tolist()
    pages = []
    for entry, (num_bytes, _) in zip(entries, tiles, strict=True):
        begin = table_bytes + (entry & 0xFFFFFF) * 16
        pages.append(decode_tile(entry, part[begin : begin + 2 * TILE], num_bytes))
    return b"".join(pages)


def with_exponents(rng: np.random.Generator, exponents: np.ndarray) -> np.ndarray:
    noise = rng.integers(0, 256, len(exponents))
    return ((noise & 128) << 8 | exponents << 7 | noise & 127).astype("<u2")


def gaussian(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return normally distributed bf16 values. Their magnitudes resemble those of real KV."""
    return (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2")


def mostly(rng: np.random.Generator, count: int, share: float, value: int) -> np.ndarray:
    return np.where(rng.random(count) < share, np.uint16(value), gaussian(rng, count)).astype("<u2")


Words = Callable[[np.random.Generator, int], np.ndarray]
SAMPLES: dict[str, Words] = {
    "gaussian": gaussian,
    "scaled by head": lambda rng, n: with_exponents(
        rng, np.clip(118 - rng.geometric(0.45, n) - np.arange(n) // 64 % 5, 1, 254)
    ),
    "random words": lambda rng, n: rng.integers(0, 65536, n).astype("<u2"),
    "zeros": lambda _, n: np.zeros(n, "<u2"),
    "negative zeros": lambda _, n: np.full(n, 0x8000, "<u2"),
    "5 % zeros": lambda rng, n: mostly(rng, n, 0.05, 0),
    "half zeros": lambda rng, n: mostly(rng, n, 0.5, 0),
    "NaN payloads": lambda rng, n: (rng.integers(0, 65536, n) | 0x7F81).astype("<u2"),
    "infinities": lambda rng, n: mostly(rng, n, 0.01, 0xFF80),
    "denormals": lambda rng, n: with_exponents(rng, np.zeros(n, np.int64)),
    "smallest exponents": lambda rng, n: with_exponents(rng, rng.integers(0, 4, n)),
    "largest exponents": lambda rng, n: with_exponents(rng, rng.integers(251, 256, n)),
    "both ends": lambda rng, n: with_exponents(rng, rng.choice([0, 1, 255], n)),
    "outliers": lambda rng, n: mostly(rng, n, 0.02, 0x4F12),
    "every exponent": lambda rng, n: with_exponents(
        rng, np.where(rng.random(n) < 0.1, rng.integers(0, 256, n), 120)
    ),
    "float16": lambda rng, n: rng.standard_normal(n).astype("<f2").view("<u2"),
    "one value": lambda _, n: np.full(n, 0x3F80, "<u2"),
}


def make_vectors() -> dict[str, object]:
    rng = np.random.default_rng(348)
    cases = []
    for name, words in SAMPLES.items():
        tile = words(rng, 512 if name != "gaussian" else 2048).tobytes()
        cases.append((name, tile))
    cases += [
        (f"gaussian, {size} bytes", gaussian(rng, size // 2).tobytes())
        for size in (16, 1040, 2048, 2560, 3072)
    ]
    return {
        "cases": [
            {
                "name": name,
                "tile": tile.hex(),
                "entry": f"{made.entry(0):016x}",
                "record": made.record.hex() if not made.is_raw else None,
            }
            for name, tile in cases
            for made in [encode_tile(tile)]
        ]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write tests/vectors/e348.json")
    what.add_argument(
        "--check", action="store_true", help="exit 1 if tests/vectors/e348.json differs"
    )
    made = json.dumps(make_vectors(), indent=0) + "\n"
    if parser.parse_args().write:
        VECTORS.write_text(made, encoding="utf-8")
        return 0
    return int(VECTORS.read_text(encoding="utf-8") != made)


if __name__ == "__main__":
    sys.exit(main())
