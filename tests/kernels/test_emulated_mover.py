"""The tests of saves and loads on the emulated GPU: layouts, routes, partial loads, ranks, pinning and bad copies. Needs no GPU."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_mover as on_gpu
from emulated_gpu import Gpu, emulated


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.mark.parametrize("route", on_gpu.ROUTES)
@pytest.mark.parametrize("layout", ["per_layer_8", "one_byte_pages", "odd_mix"])
def test_round_trip_is_bitwise(layout: str, route: str) -> None:
    on_gpu.test_round_trip_is_bitwise(layout, route, 3)


test_partial_loads_write_only_what_they_want = on_gpu.test_partial_loads_write_only_what_they_want
test_ranks_stay_in_their_part = on_gpu.test_ranks_stay_in_their_part
test_frames_not_pinned_yet_are_loaded_and_not_saved_to = on_gpu.test_frames_not_pinned_yet_are_loaded_and_not_saved_to
test_copies_outside_the_arena_are_failures_not_writes = on_gpu.test_copies_outside_the_arena_are_failures_not_writes
