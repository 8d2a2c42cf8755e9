"""The tests of several KV cache groups on the emulated GPU. Needs no GPU."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_groups as on_gpu
from emulated_gpu import Gpu, emulated


@pytest.fixture(autouse=True, params=range(3))
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with emulated(request.param) as gpu:
        yield gpu


test_bytes_of_every_group_come_back = on_gpu.test_bytes_of_every_group_come_back
test_a_block_is_not_loaded_into_for_one_group_before_it_was_saved_for_another = (
    on_gpu.test_a_block_is_not_loaded_into_for_one_group_before_it_was_saved_for_another
)
test_what_is_wrong_in_one_group_is_told_and_the_others_arrive = on_gpu.test_what_is_wrong_in_one_group_is_told_and_the_others_arrive
