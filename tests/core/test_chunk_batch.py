"""Tests that `_core.ChunkBatch` matches `chunk_batch.Chunks` after any split, sort, join and
transfer, and rejects invalid batches.
"""

import pickle
import struct

import pytest
from batches import batch_of, batch_of_groups
from chunk_batch import Chunk, Chunks
from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core
from kvloft.errors import ConfigError
from kvloft.seam.batch import ChunkCopy


@st.composite
def batches(draw: st.DrawFn, is_save: bool | None = None, size: int | None = None) -> Chunks:
    """Generate chunks in arbitrary frames, all with the same number of blocks.

    Loads can omit some blocks at either end.
    """
    is_save = draw(st.booleans()) if is_save is None else is_save
    size = draw(st.integers(1, 4)) if size is None else size
    chunks = []
    for nth in range(draw(st.integers(0, 8))):
        first = 0 if is_save else draw(st.integers(0, size - 1))
        behind = 0 if is_save else draw(st.integers(0, size - 1 - first))
        num = size - first - behind
        blocks = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num, max_size=num))
        frame, key = draw(st.integers(0, 2**28 - 1)), draw(st.binary(min_size=32, max_size=32))
        ticket = draw(st.integers(0, 2**60)) if is_save else -1
        chunks.append(
            Chunk(frame, key, size, first, tuple(blocks), ticket + nth if is_save else -1)
        )
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
def test_a_batch_equals_its_chunks(
    model: Chunks, begin: int | None, end: int | None, step: int | None
) -> None:
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


@given(
    st.tuples(st.booleans(), st.integers(1, 3)).flatmap(
        lambda how: st.lists(batches(*how), max_size=4)
    )
)
def test_batches_are_joined(models: list[Chunks]) -> None:
    model = Chunks(chunk for each in models for chunk in each)
    real = _core.ChunkBatch.concat([batch_of(each) for each in models])
    assert_same(real, model)


@given(batches(), batches())
def test_batches_are_equal_if_their_chunks_are(a: Chunks, b: Chunks) -> None:
    assert (batch_of(a) == batch_of(b)) == (a == b)
    assert batch_of(a) != tuple(a)


@given(
    model=batches(True).filter(len),
    column=st.integers(0, 3),
    num_bytes=st.integers(1, 40),
    is_cut=st.booleans(),
)
def test_columns_that_were_cut_or_grew_are_no_batch(
    model: Chunks, column: int, num_bytes: int, is_cut: bool
) -> None:
    ((group, *parts),), tickets = model.columns()
    columns = [*parts, tickets]
    columns[column] = (
        columns[column][:-num_bytes] if is_cut else columns[column] + b"\1" * num_bytes
    )
    if column == 3 and not columns[3]:
        return  # without tickets, the batch is a load
    if column == 2 and len(columns[2]) % (4 * len(model)) == 0 and columns[2]:
        return  # chunks of a different size
    with pytest.raises(ConfigError):
        _core.ChunkBatch([(group, *columns[:3])], columns[3])  # type: ignore[list-item]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), batches(True).filter(len)),
        max_size=4,
        unique_by=lambda group: group[0],
    )
)
def test_chunks_of_several_groups_are_one_batch(groups: list[tuple[int, Chunks]]) -> None:
    batch = batch_of_groups(groups)
    every = [chunk for _, chunks in groups for chunk in chunks]
    assert (list(batch), batch.tickets()) == (every, [chunk.ticket for chunk in every])
    assert pickle.loads(pickle.dumps(batch)) == batch
    each = batch.by_group()
    assert [(group, tuple(own)) for group, own in each] == [
        (group, tuple(chunks)) for group, chunks in groups
    ]
    assert all(
        own == batch_of(chunks, group)
        for (group, own), (_, chunks) in zip(each, groups, strict=True)
    )
    assert [own for _, own in batch.by_frame().by_group()] == [own.by_frame() for _, own in each]


@pytest.mark.parametrize("blocks", [(), (-1,), (-1, -1), (5, -1, 6), (-2,), (5, -2), (-(2**31),)])
def test_blocks_that_are_not_one_run_are_no_chunk(blocks: tuple[int, ...]) -> None:
    """A chunk with nothing to copy would never be reported.

    Null blocks are neither copied nor reported.
    """
    part = (0, bytes(4), bytes(32), struct.pack(f"<{len(blocks)}i", *blocks))
    with pytest.raises(ConfigError, match="not contiguous"):
        _core.ChunkBatch([part], b"")


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk(4, bytes(32), 2, 0, (9, 9)), "frame"),
        (Chunk(2**28 - 1, bytes(32), 2, 0, (9, 9)), "frame"),
        (Chunk(3, bytes(32), 2, 0, (10, 9)), "paged KV"),
        (Chunk(3, bytes(32), 2, 1, (2**31 - 1,)), "paged KV"),
    ],
)
def test_a_copy_outside_arena_frame_or_paged_kv_is_refused(chunk: Chunk, words: str) -> None:
    limits = {"num_frames": 4, "num_blocks": 10, "blocks_per_chunk": 2}
    fine = Chunk(3, bytes(32), 2, 1, (9,))
    batch_of([fine]).check(**limits)
    with pytest.raises(ConfigError, match=words):
        batch_of([fine, chunk]).check(**limits)
    for size in (1, 3):
        with pytest.raises(ConfigError, match="different block counts"):
            batch_of([fine]).check(**limits | {"blocks_per_chunk": size})
