"""Tests encoded shards on the emulated GPU: widths, raw shards, registration, and chunks that do
not fit.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import e348
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import test_gpu_e348 as on_gpu
from batches import batch_of
from emulated_gpu import EmulatedKernels, Gpu, emulated
from gpu_support import copies_of, make_mover

from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import SavePlan
from kvloft.transfer.cuda import mover
from kvloft.transfer.cuda.kernels import KernelError
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.movers import MoverSettings


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Gpu]:
    with emulated() as gpu:
        yield gpu


@pytest.fixture(autouse=True)
def few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "ORACLE_TILES", 20)


@pytest.mark.parametrize("share", [0.0, 0.6, 0.7, 1.0])
@pytest.mark.parametrize("layout", ["pages_of_6k", "mixed", "pages_of_1k"])
def test_any_width_round_trips(layout: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloft.transfer.cuda.encoding.SHARE", share)
    on_gpu.check_round_trip(on_gpu.bf16(layout), "outliers", 3, ring=(2, 300 << 10))


@pytest.mark.parametrize("sample", e348.SAMPLES)
def test_any_content_round_trips(sample: str) -> None:
    on_gpu.check_round_trip(on_gpu.bf16("pages_of_6k"), sample, 2)


test_parts_saved_raw_and_with_any_width_are_loaded_together = (
    on_gpu.test_parts_saved_raw_and_with_any_width_are_loaded_together
)
test_an_encoded_part_is_a_miss_for_raw_readers = (
    on_gpu.test_an_encoded_part_is_a_miss_for_raw_readers
)
test_chunks_that_do_not_fit_their_parts_are_not_saved = (
    on_gpu.test_chunks_that_do_not_fit_their_parts_are_not_saved
)
test_partial_loads_write_only_their_blocks = on_gpu.test_partial_loads_write_only_their_blocks
test_unregistered_frames_are_loaded_but_not_used_by_saves = (
    on_gpu.test_unregistered_frames_are_loaded_but_not_used_by_saves
)
test_ranks_stay_in_their_part = on_gpu.test_ranks_stay_in_their_part


@pytest.mark.parametrize("seed", range(8))
def test_a_rewrite_waits_for_the_kernels_of_every_slot(gpu: Gpu, seed: int) -> None:
    """Each slot has a separate stream for encoding kernels, so the other kernels can still be
    running when the last kernel completes.
    """
    gpu.random.seed(seed)
    paged = on_gpu.bf16("pages_of_6k")
    frames = on_gpu.encoded_frames(paged, 31, 1)
    mover = make_mover(paged, frames, 1, encodes=True, ring=(2, 64 << 10))
    assert mover.save_lane.num_slots == 4 and len(set(mover.save_lane.kernel_streams)) == 4
    on_gpu.fill(paged, "gaussian")
    before = paged.snapshot()
    copies = copies_of(range(31), [[block] for block in range(31)])
    mover.begin_step(())
    mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
    mover.begin_step([BlockId(block) for block in range(31)])
    gpu.compute.enqueue(paged.poison)
    assert len(mover.drain().saved) == 31
    on_gpu.check_load(paged, mover, copies, before, seed)
    mover.close()


def kernels_of(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    *,
    device_encodes: bool,
    compiles: bool = True,
    **options: Any,
) -> list[bool]:
    """Return, for each layout, True if `prepare` selects kernels that encode."""

    def make(layout: PagedLayout, *_: object, encodes: bool = False) -> EmulatedKernels:
        if encodes and not compiles:
            raise KernelError("no such architecture")
        return EmulatedKernels(layout, encodes=encodes)

    made: list[Any] = []
    monkeypatch.setattr(mover, "Kernels", make)
    monkeypatch.setattr(mover, "CudaMover", lambda kinds, *_, **__: made.extend(kinds))
    monkeypatch.setattr(mover, "device_encodes", lambda _: device_encodes)
    monkeypatch.setattr(mover.torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(mover.torch.cuda, "get_device_name", lambda _: "a GPU")
    layouts = [on_gpu.bf16(name).layout() for name in names]
    memory = SimpleNamespace(memory=SimpleNamespace(part_bytes=4096))
    window: Any = SimpleNamespace(raw=memory, raw_class=0, compact=None, compact_class=0)
    mover.prepare(layouts, [1] * len(names), MoverSettings(**options))([window] * len(names))
    return [kernels.encodes for _, kernels in made]


def test_parts_are_encoded_if_settings_device_and_pages_allow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["pages_of_64k", "mixed", "pages_of_2m"]
    chosen = [
        kernels_of(monkeypatch, names, device_encodes=device, encodes=encodes, staging_bytes=size)
        for device, encodes, size in (
            (True, True, 80 << 20),
            (False, True, 80 << 20),
            (True, False, 80 << 20),
            (True, True, 2 << 20),
        )
    ]
    assert chosen == [[True] * 3, [False] * 3, [False] * 3, [True, True, False]]


def test_parts_are_raw_if_the_encoding_kernels_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvloft"):
        found = kernels_of(
            monkeypatch,
            ["pages_of_4k"],
            device_encodes=True,
            compiles=False,
            encodes=True,
            staging_bytes=80 << 20,
        )
    assert found == [False]
    assert (
        "the compression kernels could not be compiled or loaded (no such architecture); storing "
        "KV uncompressed" in caplog.text
    )
