"""Runs the tests of an arena with compact and large frames on the emulated GPU."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_compact as on_gpu
from emulated_gpu import Gpu, emulated


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


test_chunks_of_both_sizes_are_loaded_together = on_gpu.test_chunks_of_both_sizes_are_loaded_together
test_a_chunk_that_does_not_compress_is_a_misfit_and_fits_a_large_frame = (
    on_gpu.test_a_chunk_that_does_not_compress_is_a_misfit_and_fits_a_large_frame
)
test_a_raw_trailer_in_a_compact_frame_is_a_miss = (
    on_gpu.test_a_raw_trailer_in_a_compact_frame_is_a_miss
)
test_without_kernels_that_compress_every_chunk_is_a_misfit = (
    on_gpu.test_without_kernels_that_compress_every_chunk_is_a_misfit
)
