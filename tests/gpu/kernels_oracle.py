"""Plain references for the kernels: a tag word by word, a payload page by page. Shares no code with what it checks."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TAG_RS = Path(__file__).resolve().parents[2] / "rust/core/src/tag.rs"


def tag_constants(text: str) -> dict[str, int]:
    """A, B, C, M1, M2 as written in tag.rs or tag.cuh."""
    found = re.findall(r"\b(?:kTag)?(A|B|C|M1|M2)\b(?:: u64)? = 0x([0-9a-f_]+)", text)
    return {name: int(digits.replace("_", ""), 16) for name, digits in found}


_C = tag_constants(TAG_RS.read_text())


def page_sum(page: np.ndarray, number: int, first_word: int = 0) -> int:
    """The terms of one page (uint8), `number` in payload order, or of what of it begins with its word ``first_word``."""
    padded = np.zeros(-(-len(page) // 8) * 8, np.uint8)
    padded[: len(page)] = page
    words = padded.view("<u8")
    with np.errstate(over="ignore"):
        at = np.arange(first_word, first_word + len(words), dtype=np.uint64) * np.uint64(_C["B"])
        at += np.uint64((number * _C["A"] + _C["C"]) % 2**64)
        x = words ^ at
        x ^= x >> np.uint64(32)
        x *= np.uint64(_C["M1"])
        x ^= x >> np.uint64(29)
        x *= np.uint64(_C["M2"])
        x ^= x >> np.uint64(32)
        return int(x.sum(dtype=np.uint64))


def chunk_tag(payload: np.ndarray, page_bytes: Sequence[int], num_blocks: int) -> int:
    total, at, number = 0, 0, 0
    for _ in range(num_blocks):
        for size in page_bytes:
            total += page_sum(payload[at : at + size], number)
            at += size
            number += 1
    assert at == len(payload)
    return total % 2**64


def payload_of(planes: Sequence[tuple[np.ndarray, int, int, int]], blocks: Sequence[int]) -> np.ndarray:
    """Pages of ``blocks``: planes are (buffer uint8, offset, block_stride, page_bytes)."""
    pages = [
        buffer[offset + block * stride : offset + block * stride + size]
        for block in blocks
        for buffer, offset, stride, size in planes
    ]
    return np.concatenate(pages)
