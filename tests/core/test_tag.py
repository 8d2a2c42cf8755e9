"""Compares tags with the golden vectors and an independent oracle, and tests properties of the
definition.
"""

import json
import sys
from ctypes import c_uint8
from pathlib import Path
from typing import Any

import pytest

from kvloft import _core

sys.path.append(str(Path(__file__).parents[1]))
from model import tag as model

CASES: list[dict[str, Any]] = json.loads(model.VECTORS.read_text(encoding="utf-8"))["cases"]
FRAME = 4096


@pytest.fixture(scope="module")
def arena() -> _core.Arena:
    store = _core.Session(frame_bytes=FRAME, host_bytes=FRAME, namespace=bytes(32))
    return _core.Arena.open(store.arena_path, size_bytes=FRAME * 1)


def test_vectors_match_the_oracle() -> None:
    assert model.render(model.make_vectors()) == model.VECTORS.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_tag(case: dict[str, Any], arena: _core.Arena) -> None:
    payload = bytes.fromhex(case["payload"])
    (c_uint8 * FRAME).from_address(arena.address)[: len(payload)] = list(payload)
    part = {
        "offset": 0,
        "part_bytes": FRAME,
        "key": bytes(32),
        "layout": bytes(32),
        "page_bytes": case["page_bytes"],
        "num_blocks": case["num_blocks"],
        "rank": 0,
    }
    assert arena.seal(part) == int(case["tag"], 16)


def unspread(y: int) -> int:
    """Invert `spread` by applying it 63 times.

    Applied 64 times, `spread` is a sum of rotations by multiples of 64, which is the identity.
    """
    for _ in range(63):
        y = model.spread(y)
    return y


@pytest.mark.parametrize(("top_bits", "fewest_flips"), [(8, 20), (16, 10)])
def test_few_flipped_bits_never_end_in_the_top_bits_alone(top_bits: int, fewest_flips: int) -> None:
    """Weak masks change only the top bits of the product, so the changes of two words often cancel
    out.
    """
    basis = [unspread(1 << bit) for bit in range(64 - top_bits, 64)]
    assert all(
        model.spread(mask) == 1 << bit
        for mask, bit in zip(basis, range(64 - top_bits, 64), strict=True)
    )
    masks = [0]
    for mask in basis:
        masks += [mask ^ other for other in masks]
    assert min(mask.bit_count() for mask in masks[1:]) == fewest_flips
