"""The oracle for tags: a slow second implementation of docs/design/frames.md in plain integers.

The oracle shares no code with kvloft, must not import kvloft, and derives the constants from their
names. `python tests/model/tag.py --write` writes tests/vectors/tag.json, and `--check` checks that
the file is up to date.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

VECTORS = Path(__file__).parents[1] / "vectors" / "tag.json"
WORDS = 2**64


def _constant(name: str) -> int:
    return int.from_bytes(blake3(b"kvloft tag v1 " + name.encode()).digest()[:8], "little") | 1


CONSTANTS = {name: _constant(name) for name in ("A", "B", "C", "M1", "M2")}


def rotate_right(x: int, by: int) -> int:
    """Rotate a 64-bit word right by ``by``."""
    return x // 2**by + x % 2**by * 2 ** (64 - by)


def spread(x: int) -> int:
    """Apply the steps of `mix` that precede the first multiplication."""
    return x ^ rotate_right(x, 17) ^ rotate_right(x, 36)


def mix(x: int) -> int:
    x = spread(x) * CONSTANTS["M1"] % WORDS
    x = (x ^ x // 2**29) * CONSTANTS["M2"] % WORDS
    return x ^ x // 2**32


def tag_of(payload: bytes, page_bytes: Sequence[int], num_blocks: int) -> int:
    """Return the tag of ``num_blocks`` blocks, each with one page of every size in
    ``page_bytes``.
    """
    total = at = 0
    for page, size in enumerate(list(page_bytes) * num_blocks):
        for word, begin in enumerate(range(at, at + size, 8)):
            value = int.from_bytes(payload[begin : min(begin + 8, at + size)], "little")
            position = (page * CONSTANTS["A"] + word * CONSTANTS["B"] + CONSTANTS["C"]) % WORDS
            total += mix(value ^ position)
        at += size
    assert at == len(payload)
    return total % WORDS


def _case(name: str, payload: bytes, page_bytes: Sequence[int], num_blocks: int) -> dict[str, Any]:
    tag = f"{tag_of(payload, page_bytes, num_blocks):016x}"
    return {
        "name": name,
        "page_bytes": list(page_bytes),
        "num_blocks": num_blocks,
        "payload": payload.hex(),
        "tag": tag,
    }


def make_vectors() -> dict[str, Any]:
    """Return the constants and all cases with their expected values, as JSON values."""
    count, noise = bytes(range(256)), blake3(b"kvloft tag vectors").digest(length=960)
    cases = [
        _case("nothing", b"", [], 0),
        _case("one word of zeros", bytes(8), [8], 1),
        _case("one byte", b"\x01", [1], 1),
        _case("counting, one page", count, [256], 1),
        _case("counting, four blocks", count, [64], 4),
        _case("counting, pages that end inside a word", count, [100, 28], 2),
        _case("ones", b"\xff" * 96, [32], 3),
        _case("signs of fp32", bytes.fromhex("00000080") * 32, [64], 2),
        _case("signs of bf16", bytes.fromhex("0080") * 64, [64], 2),
        _case("noise, many planes", noise, [16, 32, 48, 64], 6),
        _case("noise, odd pages", noise[:945], [1, 7, 8, 9, 164], 5),
        _case("noise, an empty plane", noise[:120], [24, 0, 16], 3),
    ]
    return {
        "constants": {name: f"{value:016x}" for name, value in CONSTANTS.items()},
        "cases": cases,
    }


def render(vectors: dict[str, Any]) -> str:
    """Format one case per line so that a diff shows which case differs."""
    lines = ",\n".join(json.dumps(case) for case in vectors["cases"])
    return f'{{"constants": {json.dumps(vectors["constants"])}, "cases": [\n{lines}\n]}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write tests/vectors/tag.json")
    what.add_argument(
        "--check", action="store_true", help="exit 1 if tests/vectors/tag.json differs"
    )
    wanted = render(make_vectors())
    if parser.parse_args(argv).write:
        VECTORS.write_text(wanted, encoding="utf-8")
        return 0
    return int(VECTORS.read_text(encoding="utf-8") != wanted)


if __name__ == "__main__":
    sys.exit(main())
