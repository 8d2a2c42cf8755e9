"""`_core.ChunkBatch` is `chunk_batch.Chunks`, however it is cut, sorted, joined and sent; and what is no batch is refused."""

import pickle
import struct

import pytest
from batches import batch_of
from chunk_batch import Chunk, Chunks
from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core
from kvloft.seam.batch import ChunkCopy


@st.composite
def batches(draw: st.DrawFn, is_save: bool | None = None) -> Chunks:
    """Chunks with any frames; of loads, some blocks at either end may be left out."""
    is_save = draw(st.booleans()) if is_save is None else is_save
    chunks = []
    for nth in range(draw(st.integers(0, 8))):
        blocks = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4))
        first, behind = (0, 0) if is_save else (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        frame, key = draw(st.integers(0, 2**32 - 1)), draw(st.binary(min_size=32, max_size=32))
        ticket = draw(st.integers(0, 2**60)) if is_save else -1
        chunks.append(Chunk(frame, key, first + len(blocks) + behind, first, tuple(blocks), ticket + nth if is_save else -1))
    return Chunks(chunks)


def assert_same(real: _core.ChunkBatch, model: Chunks) -> None:
    assert tuple(real) == tuple(model) and len(real) == len(model)
    assert all(type(chunk) is ChunkCopy for chunk in real)
    assert real.columns() == model.columns()
    assert (real.tickets(), real.block_ids()) == (model.tickets(), model.block_ids())
    assert real == batch_of(model)


@given(
    model=batches(),
    begin=st.none() | st.integers(-9, 9),
    end=st.none() | st.integers(-9, 9),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_a_batch_is_what_its_chunks_are(model: Chunks, begin: int | None, end: int | None, step: int | None) -> None:
    real = batch_of(model)
    assert_same(real, model)
    assert_same(real[begin:end:step], model[begin:end:step])
    assert_same(real.by_frame(), model.by_frame())
    assert_same(pickle.loads(pickle.dumps(real)), model)
    for at in range(-len(model), len(model)):
        assert real[at] == model[at]
    for at in (len(model), -len(model) - 1):
        with pytest.raises(IndexError):
            real[at]


@given(st.booleans().flatmap(lambda is_save: st.lists(batches(is_save), max_size=4)))
def test_batches_are_joined(models: list[Chunks]) -> None:
    model = Chunks(chunk for each in models for chunk in each)
    real = _core.ChunkBatch.concat([batch_of(each) for each in models])
    assert_same(real, model)


@given(batches(), batches())
def test_batches_are_equal_where_their_chunks_are(a: Chunks, b: Chunks) -> None:
    assert (batch_of(a) == batch_of(b)) == (a == b)
    assert batch_of(a) != tuple(a)


@given(model=batches(True).filter(len), column=st.integers(0, 4), num_bytes=st.integers(1, 40), is_cut=st.booleans())
def test_columns_that_were_cut_or_grew_are_no_batch(model: Chunks, column: int, num_bytes: int, is_cut: bool) -> None:
    columns = list(model.columns())
    columns[column] = columns[column][:-num_bytes] if is_cut else columns[column] + b"\1" * num_bytes
    if column == 4 and not columns[4]:
        return  # as a load has them
    with pytest.raises(_core.ConfigError):
        _core.ChunkBatch(*columns)


@pytest.mark.parametrize("blocks", [(), (-1,), (-1, -1), (5, -1, 6), (-2,), (5, -2), (-(2**31),)])
def test_blocks_that_are_not_one_run_are_no_chunk(blocks: tuple[int, ...]) -> None:
    """Nothing to copy would never be reported, and a hole is neither copied nor told of."""
    columns = (bytes(4), bytes(32), struct.pack("<I", len(blocks)), struct.pack(f"<{len(blocks)}i", *blocks), b"")
    with pytest.raises(_core.ConfigError, match="one run"):
        _core.ChunkBatch(*columns)


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk(4, bytes(32), 1, 0, (9,)), "frame"),
        (Chunk(2**32 - 1, bytes(32), 1, 0, (9,)), "frame"),
        (Chunk(3, bytes(32), 1, 0, (10,)), "paged KV"),
        (Chunk(3, bytes(32), 1, 0, (2**31 - 1,)), "paged KV"),
        (Chunk(3, bytes(32), 3, 1, (9,)), "more blocks"),
    ],
)
def test_a_copy_outside_arena_frame_or_paged_kv_is_refused(chunk: Chunk, words: str) -> None:
    limits = {"num_frames": 4, "num_blocks": 10, "blocks_per_chunk": 2}
    fine = Chunk(3, bytes(32), 2, 1, (9,))
    batch_of([fine]).check(**limits)
    with pytest.raises(_core.ConfigError, match=words):
        batch_of([fine, chunk]).check(**limits)
