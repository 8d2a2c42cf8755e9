"""Checks that trailers written for many frames in one call match docs/design/frames.md, byte by
byte.
"""

import mmap
import struct

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from kvloft.transfer.cuda.trailers import Trailers
from kvloft.transfer.frames import FrameMemory

PART, FRAMES, BLOCK = 8192, 6, 1000


def memory(rank: int = 0, num_ranks: int = 1) -> tuple[FrameMemory, np.ndarray]:
    buffer = np.frombuffer(mmap.mmap(-1, FRAMES * PART * num_ranks), np.uint8)
    buffer[:] = 0xA5
    frames = FrameMemory(
        buffer.ctypes.data,
        buffer.nbytes,
        PART * num_ranks,
        PART * num_ranks,
        PART * rank,
        PART,
        rank,
        buffer,
    )
    return frames, buffer.reshape(FRAMES, num_ranks, PART)


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 3)])
def test_sealed_trailer_is_as_documented_and_nothing_else_changes(
    rank: int, num_ranks: int
) -> None:
    frames, raw = memory(rank, num_ranks)
    layout, keys = b"L" * 32, [b"a" * 32, b"b" * 32]
    Trailers(frames, layout=layout, block_bytes=BLOCK).seal(
        np.array([4, 1]),
        b"".join(keys),
        np.array([2**63 + 5, 7], dtype=np.uint64),
        np.array([3, 1]),
    )
    for frame, key, tag, blocks in ((4, keys[0], 2**63 + 5, 3), (1, keys[1], 7, 1)):
        size = blocks * BLOCK
        want = struct.pack(
            "<8s32s32sQQIIQI20x", b"KVLOFT03", key, layout, tag, size, blocks, rank, size, 0
        )
        assert raw[frame, rank, -128:].tobytes() == want
        raw[frame, rank, -128:] = 0xA5
    assert (raw == 0xA5).all()


def test_each_wrong_field_has_its_name() -> None:
    frames, raw = memory()
    trailers = Trailers(frames, layout=b"L" * 32, block_bytes=BLOCK)
    every = np.arange(FRAMES)
    keys, blocks = [bytes([i]) * 32 for i in range(FRAMES)], np.full(FRAMES, 2)
    trailers.seal(every, b"".join(keys), np.ones(FRAMES, np.uint64), blocks)
    assert trailers.read(every, b"".join(keys), blocks)[1] == {}
    for frame, at in ((0, 0), (1, 8), (2, 40), (3, 80), (4, 88), (5, 92)):
        raw[frame, 0, PART - 128 + at] ^= 1
    _, found = trailers.read(every, b"".join(keys), blocks)
    assert found == {0: "unsealed", 1: "key", 2: "layout", 3: "shape", 4: "shape", 5: "shape"}
    trailers.seal(every, b"".join(keys), np.ones(FRAMES, np.uint64), blocks)
    for frame, at in ((0, 96), (1, 103), (2, 104), (3, 107), (4, 108), (5, 127)):
        raw[frame, 0, PART - 128 + at] ^= 1
    assert trailers.read(every, b"".join(keys), blocks)[1] == dict.fromkeys(range(4), "shape")


def test_the_tag_of_a_kernel_that_copied_nothing_is_damage() -> None:
    frames, _ = memory()
    for block_bytes, found in ((BLOCK, {1: "tag"}), (0, {})):
        trailers = Trailers(frames, layout=b"L" * 32, block_bytes=block_bytes)
        keys, blocks = b"a" * 32 + b"b" * 32, np.array([1, 1])
        trailers.seal([0, 1], keys, np.array([1, 0], np.uint64), blocks)
        assert trailers.read([0, 1], keys, blocks)[1] == found


def test_an_encoded_part_is_no_damage_to_a_reader_of_raw_parts() -> None:
    """Other readers can decode the part, so it must not be discarded."""
    frames, _ = memory()
    encoded(frames).seal(
        np.array([0]), b"k" * 32, np.ones(1, np.uint64), np.array([1]), np.ones(1, np.uint64)
    )
    trailers = Trailers(frames, layout=b"L" * 32, block_bytes=BLOCK)
    assert trailers.read(np.array([0]), b"k" * 32, np.array([1]))[1] == {0: "layout"}


def encoded(frames: FrameMemory) -> Trailers:
    return Trailers(frames, layout=b"L" * 32, block_bytes=BLOCK, block_tiles=1)


def test_an_encoded_part_has_its_length() -> None:
    frames, raw = memory()
    used = np.array([40, 101], dtype=np.uint64)
    assert (
        encoded(frames).seal(
            np.array([4, 1]),
            b"a" * 32 + b"b" * 32,
            np.array([5, 7], np.uint64),
            np.array([3, 2]),
            used,
        )
        == []
    )
    for frame, key, tag, blocks, size in (
        (4, b"a" * 32, 5, 3, 32 + 640),
        (1, b"b" * 32, 7, 2, 16 + 1616),
    ):
        want = struct.pack(
            "<8s32s32sQQIIQI20x",
            b"KVLOFT03",
            key,
            b"L" * 32,
            tag,
            blocks * BLOCK,
            blocks,
            0,
            size,
            1,
        )
        assert raw[frame, 0, -128:].tobytes() == want
    tags, problems = encoded(frames).read(np.array([4, 1]), b"a" * 32 + b"b" * 32, np.array([3, 2]))
    assert (tags.tolist(), problems) == ([5, 7], {})


def test_encoding_readers_read_both_encodings_and_others_only_raw_parts() -> None:
    frames, raw = memory()
    plain, keys, blocks = (
        Trailers(frames, layout=b"L" * 32, block_bytes=BLOCK),
        b"a" * 32 + b"b" * 32,
        np.array([1, 1]),
    )
    plain.seal(np.array([0]), b"a" * 32, np.array([1], np.uint64), np.array([1]))
    encoded(frames).seal(
        np.array([1]), b"b" * 32, np.array([2], np.uint64), np.array([1]), np.array([3], np.uint64)
    )
    assert encoded(frames).are_raw([0, 1]).tolist() == [True, False]
    assert encoded(frames).read([0, 1], keys, blocks)[1] == {}
    assert plain.read([0, 1], keys, blocks)[1] == {1: "layout"}
    raw[0, 0, -128 + 104] = 2  # an unknown encoding
    raw[1, 0, -128 + 105] = 1
    assert encoded(frames).read([0, 1], keys, blocks)[1] == {0: "shape", 1: "shape"}


def test_records_that_do_not_fit_leave_the_part_unsealed() -> None:
    frames, _ = memory()
    room = (PART - 128) // 16
    keys, blocks, tags = b"a" * 32 + b"b" * 32, np.array([1, 1]), np.ones(2, np.uint64)
    assert encoded(frames).seal([2, 3], keys, tags, blocks, np.array([5, 5], np.uint64)) == []
    assert encoded(frames).seal(
        [2, 3], keys, tags, blocks, np.array([room - 1, room], np.uint64)
    ) == [1]
    assert encoded(frames).read([2, 3], keys, blocks)[1] == {1: "unsealed"}


def test_rust_and_numpy_read_each_others_trailers() -> None:
    core = pytest.importorskip("kvloft._core", reason="kvloft is not built")
    import fcntl
    import os

    from kernels_oracle import chunk_tag

    fd = os.memfd_create("kvloft-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, FRAMES * PART)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    arena = core.Arena.open(f"/proc/self/fd/{fd}", size_bytes=PART * FRAMES)
    frames = FrameMemory(arena.address, FRAMES * PART, PART, PART, 0, PART, 0, arena)
    trailers = Trailers(frames, layout=b"L" * 32, block_bytes=BLOCK)
    raw = np.ndarray(
        (FRAMES, PART),
        np.uint8,
        (__import__("ctypes").c_uint8 * (FRAMES * PART)).from_address(arena.address),
    )
    raw[:, : 3 * BLOCK] = np.random.default_rng(1).integers(
        0, 256, (FRAMES, 3 * BLOCK), dtype=np.uint8
    )
    shape = {
        "offset": 2 * PART,
        "part_bytes": PART,
        "layout": b"L" * 32,
        "page_bytes": [600, 400],
        "rank": 0,
    }
    tag = chunk_tag(raw[2, : 3 * BLOCK], [600, 400], 3)
    trailers.seal(np.array([2]), b"k" * 32, np.array([tag], dtype=np.uint64), np.array([3]))
    assert arena.check({**shape, "key": b"k" * 32, "num_blocks": 3}) is None
    assert arena.seal(
        {**shape, "offset": 4 * PART, "key": b"q" * 32, "num_blocks": 3}
    ) == chunk_tag(raw[4, : 3 * BLOCK], [600, 400], 3)
    tags, problems = trailers.read(np.array([4]), b"q" * 32, np.array([3]))
    assert problems == {} and tags[0] == chunk_tag(raw[4, : 3 * BLOCK], [600, 400], 3)
    os.close(fd)
