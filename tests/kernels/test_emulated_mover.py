"""The tests of saves and loads on the emulated GPU: layouts, routes, partial loads, ranks, pinning and bad copies. Needs no GPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_mover as on_gpu
from emulated_gpu import Gpu, emulated
from gpu_support import Frames, copies_of, make_mover, part_bytes_for, per_layer

from kvloft.types import LoadPlan, ReqId


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


def test_after_a_break_loads_say_that_they_failed(gpu: Gpu) -> None:
    """Or their requests would be offered the same again and again. One was under way, one comes later."""
    paged = per_layer(2, 23, 37, offset=3, gap=5)
    mover = make_mover(paged, Frames(8, part_bytes_for(paged.block_bytes)), 1)
    load = LoadPlan(ReqId("r"), 1, copies_of([0, 1], [[3], [4]]))
    mover.submit_loads([load])
    gpu.stop_forever()
    mover.submit_loads([replace(load, load_id=2)])
    done = mover.drain()
    assert [(result.load_id, result.failed, result.bad_keys) for result in done.loads] == [(1, True, ()), (2, True, ())]
    assert done.bad_blocks == {3, 4}
