"""Checks without a GPU that each frame of each size is inside one piece of registered memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from kvloft.transfer.cuda.registration import pieces_of
from kvloft.transfer.frames import FrameMemory

PAGE = 4096


@given(
    slab=st.integers(1, 60),
    slabs=st.integers(1, 9),
    rest=st.integers(0, 59),
    frame=st.integers(1, 60),
    per_piece=st.integers(1, 4),
)
def test_each_frame_is_in_one_piece(
    slab: int, slabs: int, rest: int, frame: int, per_piece: int
) -> None:
    frame, rest = min(frame, slab), min(rest, slab - 1)
    size = (slab * slabs + rest) * PAGE
    memory = FrameMemory(0, size, slab * PAGE, frame * PAGE, 0, frame * PAGE, 0, None)
    pieces = list(pieces_of(size, per_piece * slab * PAGE))
    assert sum(num_bytes for _, num_bytes in pieces) == size
    for number in range(memory.num_frames):
        start = memory.start(number)
        end = start + memory.frame_bytes
        assert end <= size
        assert any(begin <= start and end <= begin + num for begin, num in pieces)
    per_run = memory.per_slab * (per_piece if memory.is_dense else 1)
    for number in range(1, memory.num_frames):
        if number % per_run:
            assert memory.start(number) == memory.start(number - 1) + memory.frame_bytes, (
                "the frames of a run must be adjacent"
            )
            before, here = (
                next(i for i, (begin, num) in enumerate(pieces) if begin <= at < begin + num)
                for at in (memory.start(number - 1), memory.start(number))
            )
            assert before == here, "a run must be in one piece"
