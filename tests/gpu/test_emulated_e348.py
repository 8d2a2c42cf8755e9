"""Encoded parts on the emulated GPU: widths, raw parts, pinning, parts without room. Needs no GPU."""

from collections.abc import Iterator

import e348
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_e348 as on_gpu
from emulated_gpu import Gpu, emulated


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(autouse=True)
def few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "ORACLE_TILES", 20)


@pytest.mark.parametrize("share", [0.0, 0.6, 0.7, 1.0])
@pytest.mark.parametrize("layout", ["pages_of_6k", "mixed", "pages_of_1k"])
def test_any_width_comes_back(layout: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloft.transfer.cuda.encoding.SHARE", share)
    on_gpu.check_round_trip(on_gpu.bf16(layout), "outliers", 3, ring=(2, 300 << 10))


@pytest.mark.parametrize("sample", e348.SAMPLES)
def test_any_content_comes_back(sample: str) -> None:
    on_gpu.check_round_trip(on_gpu.bf16("pages_of_6k"), sample, 2)


test_parts_saved_raw_are_loaded_with_encoded_ones = on_gpu.test_parts_saved_raw_are_loaded_with_encoded_ones
test_an_encoded_part_is_a_miss_where_parts_are_raw = on_gpu.test_an_encoded_part_is_a_miss_where_parts_are_raw
test_chunks_that_do_not_fit_their_parts_are_not_saved = on_gpu.test_chunks_that_do_not_fit_their_parts_are_not_saved
test_partial_loads_write_only_what_they_want = on_gpu.test_partial_loads_write_only_what_they_want
test_frames_not_pinned_yet_are_loaded_and_not_saved_to = on_gpu.test_frames_not_pinned_yet_are_loaded_and_not_saved_to
test_ranks_stay_in_their_part = on_gpu.test_ranks_stay_in_their_part
