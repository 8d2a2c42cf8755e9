"""Runs the tests of Mamba states on the emulated GPU, and tests states that vLLM moves or zeroes
before the first hook of a step.
"""

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_states as on_gpu
from batches import batch_of_groups
from emulated_gpu import Gpu, emulated
from test_gpu_states import NUM_BLOCKS, Rig

rig = on_gpu.rig


@pytest.fixture(autouse=True, params=range(2))
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with emulated(request.param) as gpu:
        yield gpu


test_a_states_page_has_its_bytes_in_any_type = on_gpu.test_a_states_page_has_its_bytes_in_any_type
test_states_and_attention_come_back_and_padding_stays_as_it_was = (
    on_gpu.test_states_and_attention_come_back_and_padding_stays_as_it_was
)
test_a_states_frame_is_not_read_as_another_groups = (
    on_gpu.test_a_states_frame_is_not_read_as_another_groups
)


def test_a_state_that_is_moved_before_the_next_hook_comes_behind_the_gather(gpu: Gpu) -> None:
    """vLLM moves or copies a running state into a new block before the connector receives the step.

    The block's previous owner may have finished, so no step reports the block as rewritten.
    """
    rig = Rig("layers outermost", heads_first=True, slot_bytes=6144)
    rig.raw.random_(0, 256)
    before = rig.raw.clone()
    rig.step(saves=rig.batches())
    gpu.compute.enqueue(
        lambda: rig.raw.fill_(0)
    )  # launched before `begin_step`, like vLLM's kernels that move states
    rig.step()
    assert len(rig.mover.drain().saved) == NUM_BLOCKS
    for group, copies in enumerate(rig.copies):
        for copy in copies:
            payload = np.concatenate(
                [before[place].numpy() for place in rig.used(group, copy.blocks[0])]
            )
            assert np.array_equal(rig.frames.parts[copy.frame, : len(payload)], payload)
    rig.mover.close()


def test_a_loaded_state_is_not_overwritten_by_earlier_work_of_its_step(
    gpu: Gpu,
) -> None:
    """In the step that starts the load of a waiting request, vLLM zeroes the request's new blocks
    or copies data into them. The load must run last.
    """
    rig = Rig("blocks outermost", heads_first=False)
    rig.raw.random_(0, 256)
    before = rig.raw.clone()
    rig.step(saves=rig.batches())
    assert rig.mover.drain().saved
    gpu.compute.enqueue(lambda: rig.raw.fill_(0))
    rig.step(
        loads=batch_of_groups(
            (group, list(own)) for group, own in rig.batches().by_group() if group in (1, 2)
        )
    )
    assert not rig.mover.drain().bad_blocks
    gpu.run_until(lambda: gpu.is_idle)
    for group in (1, 2):
        for copy in rig.copies[group]:
            for place in rig.used(group, copy.blocks[0]):
                assert np.array_equal(rig.raw[place].numpy(), before[place].numpy())
    rig.mover.close()
