"""Runs the tests of multiple KV cache groups on the emulated GPU."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_groups as on_gpu
from emulated_gpu import EmulatedKernels, Gpu, emulated
from gpu_support import per_layer, turned

from kvloft.transfer.cuda import mover
from kvloft.transfer.layout import without_pages
from kvloft.transfer.movers import MoverSettings


@pytest.fixture(autouse=True, params=range(3))
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with emulated(request.param) as gpu:
        yield gpu


test_bytes_of_every_group_come_back = on_gpu.test_bytes_of_every_group_come_back
test_groups_may_have_different_numbers_of_blocks_in_a_chunk = (
    on_gpu.test_groups_may_have_different_numbers_of_blocks_in_a_chunk
)
test_a_chunk_of_more_blocks_than_its_kinds_frames_hold_is_not_copied = (
    on_gpu.test_a_chunk_of_more_blocks_than_its_kinds_frames_hold_is_not_copied
)
test_a_block_is_not_loaded_into_for_one_group_before_it_was_saved_for_another = (
    on_gpu.test_a_block_is_not_loaded_into_for_one_group_before_it_was_saved_for_another
)
test_an_error_in_one_group_is_reported_and_others_are_loaded = (
    on_gpu.test_an_error_in_one_group_is_reported_and_others_are_loaded
)
test_a_damaged_trailer_of_a_group_without_pages_is_reported = (
    on_gpu.test_a_damaged_trailer_of_a_group_without_pages_is_reported
)


def test_groups_with_equal_or_no_pages_are_one_kind_and_share_a_mover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of one kind have the same pages and number of blocks per chunk.

    Equal digests are not sufficient.
    """
    made: list[Any] = []
    monkeypatch.setattr(mover, "Kernels", lambda layout, *_, **__: EmulatedKernels(layout))
    monkeypatch.setattr(
        mover,
        "CudaMover",
        lambda kinds, *_, **more: made.append((kinds, more["kind_of"], more["blocks_per_chunk"])),
    )
    monkeypatch.setattr(mover.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(mover.torch.cuda, "get_device_name", lambda _: "a GPU")
    paged = per_layer(2, 8, 4096)
    elsewhere = per_layer(2, 8, 4096)
    nothing = without_pages(paged.layout())
    layouts = [
        nothing,
        *(each.layout() for each in (paged, paged, turned(paged), elsewhere, paged)),
        nothing,
    ]
    make = mover.prepare(layouts, [1, 1, 3, 2, 1, 2, 1], MoverSettings())
    memory = SimpleNamespace(memory=SimpleNamespace(part_bytes=4096))
    window: Any = SimpleNamespace(raw=memory, raw_class=0, compact=None, compact_class=0)
    make([window] * len(layouts))
    ((kinds, kind_of, blocks_per_chunk),) = made
    assert list(kind_of.values()) == [0, 1, 2, 3, 4, 5, 0]
    assert list(blocks_per_chunk) == [1, 1, 3, 2, 1, 2], (
        "all chunks of a kind must have the same number of blocks"
    )
    assert [layout for layout, _ in kinds] == [
        nothing,
        layouts[1],
        layouts[2],
        layouts[3],
        layouts[4],
        layouts[5],
    ]
