"""Reference implementations that share no code with the kernels: tags are computed word by word,
and payloads page by page.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "tag.json").read_text(encoding="utf-8")
)
_C = {name: int(digits, 16) for name, digits in VECTORS["constants"].items()}


def mix(x: np.ndarray) -> np.ndarray:
    """Apply the function `mix` of docs/design/frames.md to an array of uint64."""
    with np.errstate(over="ignore"):
        x = (
            x
            ^ (x >> np.uint64(17) | x << np.uint64(47))
            ^ (x >> np.uint64(36) | x << np.uint64(28))
        )
        x = x * np.uint64(_C["M1"])
        x = (x ^ x >> np.uint64(29)) * np.uint64(_C["M2"])
        return x ^ x >> np.uint64(32)


def page_sum(page: np.ndarray, number: int, first_word: int = 0) -> int:
    """Return the sum of the tag terms for page ``number`` of a payload.

    ``page`` holds the page's bytes, starting at word ``first_word``.
    """
    padded = np.zeros(-(-len(page) // 8) * 8, np.uint8)
    padded[: len(page)] = page
    words = padded.view("<u8")
    with np.errstate(over="ignore"):
        at = np.arange(first_word, first_word + len(words), dtype=np.uint64) * np.uint64(_C["B"])
        at += np.uint64((number * _C["A"] + _C["C"]) % 2**64)
    return int(mix(words ^ at).sum(dtype=np.uint64))


def chunk_tag(payload: np.ndarray, page_bytes: Sequence[int], num_blocks: int) -> int:
    total, at, number = 0, 0, 0
    for _ in range(num_blocks):
        for size in page_bytes:
            total += page_sum(payload[at : at + size], number)
            at += size
            number += 1
    assert at == len(payload)
    return total % 2**64
