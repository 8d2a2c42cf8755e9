"""Checks that, for every vLLM layout, the planes derived from strides contain exactly the bytes of
each block, and that unknown layouts are rejected.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged_kv import ORDERS, Sizes, block_addresses, carve, random_bytes, storage_bytes

from kvloft.transfer.layout import LayoutError, PagedLayout, read_layout

primes = st.sampled_from([1, 2, 3, 5, 7])


def plane_addresses(layout: PagedLayout, block: int) -> list[tuple[int, int]]:
    """Return (storage, offset) for every byte of a block in the planes, in payload order."""
    return [
        (plane.storage.data_ptr(), plane.offset + block * plane.block_stride + i)
        for plane in layout.planes
        for i in range(plane.page_bytes)
    ]


def true_addresses(
    caches: dict[str, torch.Tensor], num_blocks: int, block: int
) -> list[tuple[int, int]]:
    found: dict[tuple[int, int], None] = {}
    for tensor in caches.values():
        place = tensor.untyped_storage().data_ptr()
        found.update(((place, int(at)), None) for at in block_addresses(tensor, num_blocks, block))
    return list(found)


@given(
    order=st.sampled_from(ORDERS),
    layers=primes,
    blocks=primes,
    heads=primes,
    tokens=primes,
    content=primes,
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    offset=st.sampled_from([0, 3]),
)
def test_planes_name_exactly_each_blocks_bytes(
    order: str,
    layers: int,
    blocks: int,
    heads: int,
    tokens: int,
    content: int,
    dtype: torch.dtype,
    offset: int,
) -> None:
    caches = carve(order, Sizes(layers, blocks, heads, tokens, content, dtype), offset=offset)
    layout = read_layout(caches, blocks)
    for block in range(blocks):
        assert plane_addresses(layout, block) == true_addresses(caches, blocks, block)
    assert layout.block_bytes == layers * heads * tokens * content * dtype.itemsize
    assert sum(layout.page_bytes) == layout.block_bytes


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC"])
@pytest.mark.parametrize("ratio", [2, 4])
def test_kernel_blocks_are_grouped_into_the_engines_blocks(order: str, ratio: int) -> None:
    """Dimension 0 contains num_blocks * ratio kernel blocks."""
    caches = carve(order, Sizes(blocks=6 * ratio))
    layout = read_layout(caches, 6)
    for block in range(6):
        assert sorted(plane_addresses(layout, block)) == sorted(true_addresses(caches, 6, block))


def test_key_and_value_outermost_become_planes() -> None:
    """Tests the old shape (2, B, N, H, D)."""
    tensor = random_bytes(2 * 7 * 5 * 3 * 4).view(2, 7, 5, 3, 4).transpose(0, 1)
    layout = read_layout({"layer": tensor}, 7)
    assert layout.page_bytes == (60, 60)
    assert plane_addresses(layout, 4) == true_addresses({"layer": tensor}, 7, 4)


def test_one_latent_head_is_one_page_a_layer() -> None:
    """Tests MLA: [B, N, C], or [B, 1, N, C] with any stride of the single head."""
    flat = random_bytes(6 * 5 * 7)
    for tensor in (
        flat.view(6, 5, 7),
        flat.view(6, 1, 5, 7),
        flat.as_strided((6, 1, 5, 7), (35, 1, 7, 1)),
    ):
        layout = read_layout({"layer": tensor}, 6)
        assert layout.page_bytes == (35,)
        assert plane_addresses(layout, 5) == true_addresses({"layer": tensor}, 6, 5)


def test_separate_tensors_a_layer_in_the_order_they_were_registered() -> None:
    caches = {
        name: random_bytes(7 * 12, seed).view(7, 3, 4) for seed, name in enumerate(["b", "a", "c"])
    }
    layout = read_layout(caches, 7)
    assert [plane.storage.data_ptr() for plane in layout.planes] == [
        t.data_ptr() for t in caches.values()
    ]


def test_layers_that_share_their_kv_are_taken_once() -> None:
    caches = carve("LBHNC", Sizes())
    shared = caches | {
        "shares.0": caches["layer.0"],
        "shares.2": caches["layer.2"].view(torch.int16),
    }
    assert read_layout(shared, 7).planes == read_layout(caches, 7).planes


def test_padded_pages_keep_their_distance() -> None:
    tensor = random_bytes(7 * 64).as_strided((7, 2, 5, 3), (64, 15, 3, 1))
    (plane,) = read_layout({"layer": tensor}, 7).planes
    assert (plane.page_bytes, plane.block_stride) == (30, 64)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.empty(0, 2, 5, 3), "empty"),
        (torch.zeros(8, 2, 5, 3), "not a multiple"),
        (torch.zeros(2, 5, 3), "not a multiple"),
        (torch.zeros(7, 2, 5, 4)[..., :3], "not contiguous"),
        (torch.zeros(7, 2, 6, 3)[:, :, ::2], "not contiguous"),
        (torch.zeros(500).as_strided((7, 2, 5, 3), (10, 15, 3, 1)), "overlapping"),
        (torch.zeros(500).as_strided((7, 2, 5, 3), (0, 15, 3, 1)), "overlapping"),
        (torch.zeros(1).expand(7, 2, 5, 3), "not contiguous|overlapping"),
        (carve("BHLNC", Sizes())["layer.1"], "not contiguous"),
    ],
)
def test_tensors_without_pages_are_rejected_by_name(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(LayoutError, match=what) as caught:
        read_layout({"model.layers.0.attn": tensor}, 7)
    assert "model.layers.0.attn" in str(caught.value)


def test_a_model_without_layers_is_rejected() -> None:
    with pytest.raises(LayoutError, match="no KV tensor"):
        read_layout({}, 7)


def test_digest_depends_on_the_layout_inside_pages_only() -> None:
    def digest(order: str = "LBHNC", fingerprint: str = "x", **changes: int) -> bytes:
        sizes = Sizes(**changes)
        return read_layout(carve(order, sizes), sizes.blocks, fingerprint).digest

    different = [
        digest(),
        digest("LBNHC"),
        digest("LHBNC"),
        digest(fingerprint="y"),
        digest(layers=4),
        digest(heads=3),
        digest(tokens=4),
        digest(content=4),
        digest(heads=5, tokens=2),
    ]
    for one, other in itertools.combinations(different, 2):
        assert one != other
    assert digest() == digest(blocks=11), "the pool size must not change the layout"
    assert digest() == digest("BLHNC"), "the order of pages must not change the layout"


def test_planes_keep_the_memory_alive() -> None:
    caches = carve("LBHNC", Sizes())
    expected = storage_bytes(caches["layer.1"])[block_addresses(caches["layer.1"], 7, 3)].copy()
    layout = read_layout(caches, 7)
    caches.clear()
    plane = layout.planes[1]
    flat = torch.empty(0, dtype=torch.uint8).set_(plane.storage).numpy()
    begin = plane.offset + 3 * plane.block_stride
    np.testing.assert_array_equal(flat[begin : begin + plane.page_bytes], expected)


def test_planes_say_which_of_them_are_bf16() -> None:
    """Each plane has the dtype of its tensor, even within one layer."""
    caches = {
        "a": torch.zeros(4, 2, 8, dtype=torch.bfloat16),
        "b": [torch.zeros(4, 16, dtype=torch.bfloat16), torch.zeros(4, 16, dtype=torch.float32)],
        "c": torch.zeros(4, 16, dtype=torch.float16),
        "d": torch.zeros(4, 16, dtype=torch.uint8),
    }
    assert [plane.is_bf16 for plane in read_layout(caches, 4).planes] == [
        True,
        True,
        False,
        False,
        False,
    ]
