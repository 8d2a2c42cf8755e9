"""Tests the guarantees of the store on which the scheduler side and the worker side rely.

The tests use `kvloft._core` without a disk.
"""

import ctypes
import os
import subprocess
import sys

import pytest
from batches import frames, reserve, tiers

from kvloft import _core
from kvloft.errors import ConfigError, StoreError

NAMESPACE = bytes(32)
FRAME = 4096


def make_store(num_frames: int, **kwargs: object) -> _core.Session:
    return _core.Session(
        frame_bytes=FRAME, host_bytes=num_frames * FRAME, namespace=NAMESPACE, **kwargs
    )  # type: ignore[arg-type]


def chain_of(*token_ids: int) -> _core.KeyChain:
    """Build a chain with blocks of one token each."""
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(list(token_ids))
    return chain


def save(store: _core.Session, chain: _core.KeyChain, start: int, stop: int) -> int:
    rows, _ = reserve(store, chain, start, stop)
    return store.settle([row[0] for row in rows])[0]


def balance(store: _core.Session) -> None:
    stats = store.stats()
    assert (
        stats["frames_reserved"] + stats["frames_visible"] + stats["frames_free"]
        == stats["frames_total"]
    )  # I8


def test_committed_chunks_are_found_and_leased() -> None:
    store = make_store(8)
    chain = chain_of(1, 2, 3)
    assert store.lookup(chain) == (0, 0)
    rows, dropped = reserve(store, chain, 0, 3)
    assert dropped == 0
    assert [row[2:] for row in rows] == [(chain.key(i), i) for i in range(3)]
    assert store.lookup(chain) == (0, 0)  # I3
    assert store.settle([row[0] for row in rows])[0] == 3
    assert store.lookup(chain) == (3, 3)
    assert store.lookup(chain_of(1, 2, 4)) == (2, 2)
    lease = store.acquire(chain_of(1, 2, 4))
    assert lease.poll() == (2, 0)
    assert frames(lease) == [row[1:] for row in rows[:2]] and tiers(lease) == {"host": 2}
    assert store.stats()["pins"] == 2
    lease.release()
    lease.release()
    assert store.stats()["pins"] == 0
    assert frames(lease) == []
    balance(store)


def test_aborted_save_frees_its_frame() -> None:
    store = make_store(2)
    rows, dropped = reserve(store, chain_of(1, 2, 3), 0, 3)
    assert (len(rows), dropped) == (2, 1)
    store.abort([row[0] for row in rows])
    store.abort([row[0] for row in rows])
    assert store.settle([row[0] for row in rows])[0] == 0
    stats = store.stats()
    assert (stats["frames_free"], stats["entries"], stats["write_leases"]) == (2, 0, 0)


def test_a_full_store_evicts_leaves_and_never_pinned_ones() -> None:
    store = make_store(3)
    assert save(store, chain_of(1, 2, 3), 0, 3) == 3
    lease = store.acquire(chain_of(1, 2))
    assert save(store, chain_of(1, 9), 0, 2) == 1
    assert store.lookup(chain_of(1, 2, 3)) == (2, 2)
    assert (
        save(store, chain_of(7, 8), 0, 2) == 1
    )  # only the frame of block 9 can be evicted, because the prefix is pinned
    assert store.lookup(chain_of(1, 2, 3)) == (2, 2)
    del lease
    assert save(store, chain_of(7, 8), 0, 2) == 1
    assert store.lookup(chain_of(7, 8)) == (2, 2)
    assert store.lookup(chain_of(1, 2, 3)) == (1, 1)
    balance(store)


def test_discard_takes_descendants_and_keeps_pinned_frames_until_released() -> None:
    store = make_store(4)
    chain = chain_of(1, 2, 3)
    save(store, chain, 0, 3)
    lease = store.acquire(chain)
    assert store.discard([chain.key(1), chain.key(1), bytes(32)]) == 2
    assert store.lookup(chain) == (1, 1)
    assert len(frames(lease)) == 3
    assert save(store, chain, 1, 3) == 1  # one frame was free
    lease.release()
    assert save(store, chain, 1, 3) == 1
    assert store.stats()["frames_visible"] == 3
    balance(store)


def test_clear_voids_reservations_and_removes_pinned_chunks() -> None:
    store = make_store(4)
    chain = chain_of(1, 2, 3)
    save(store, chain, 0, 2)
    lease = store.acquire(chain)
    rows, _ = reserve(store, chain, 2, 3)
    store.clear()
    assert store.lookup(chain) == (0, 0)
    assert store.stats()["frames_free"] == 1
    assert store.settle([row[0] for row in rows])[0] == 0
    lease.release()
    stats = store.stats()
    assert (stats["frames_free"], stats["entries"], stats["pins"]) == (4, 0, 0)


def test_out_of_order_commits_become_visible_with_their_parent() -> None:
    store = make_store(4)
    chain = chain_of(1, 2, 3)
    first, second, third = (row[0] for row in reserve(store, chain, 0, 3)[0])
    assert store.settle([third])[0] == 0
    assert store.settle([second])[0] == 0
    assert store.lookup(chain) == (0, 0)
    assert store.settle([first])[0] == 3
    assert store.lookup(chain) == (3, 3)


def test_a_closed_store_misses() -> None:
    store = make_store(2)
    chain = chain_of(1)
    save(store, chain, 0, 1)
    lease = store.acquire(chain)
    store.close()
    assert store.lookup(chain) == (0, 0)
    assert reserve(store, chain_of(2), 0, 1) == ([], 1)
    assert store.acquire(chain).poll() == (0, 0)
    assert lease.poll() == (1, 0)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"host_bytes": 4095}, "host_size"),
        ({"host_bytes": 1 << 60}, "host_size"),
        ({"frame_bytes": 1000}, "frame sizes"),
        ({"frame_bytes": 0}, "frame sizes"),
        ({"eviction": "fifo"}, "eviction"),
        ({"namespace": b"short"}, "namespace"),
    ],
)
def test_bad_settings_are_named(kwargs: dict[str, object], words: str) -> None:
    settings: dict[str, object] = {
        "frame_bytes": FRAME,
        "host_bytes": 8 * FRAME,
        "namespace": NAMESPACE,
        **kwargs,
    }
    with pytest.raises(ConfigError, match=words):
        _core.Session(**settings)  # type: ignore[arg-type]


def test_ranges_outside_the_chain_are_refused() -> None:
    store = make_store(4)
    chain = chain_of(1, 2, 3)
    for start, stop in [(0, 4), (1, 0), (0, 2**32 - 1)]:
        with pytest.raises(ConfigError):
            reserve(store, chain, start, stop)
    balance(store)


def view_of(arena: _core.Arena) -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * arena.size_bytes).from_address(arena.address)


def part(frame: int = 1, **changes: object) -> dict[str, object]:
    return {
        "offset": frame * FRAME,
        "part_bytes": 4096,
        "key": b"k" * 32,
        "layout": b"l" * 32,
        "page_bytes": [100, 28],
        "num_blocks": 2,
        "rank": 3,
        **changes,
    }


def test_seal_and_check_report_the_problem() -> None:
    store = make_store(2)
    arena = _core.Arena.open(store.arena_path, size_bytes=FRAME * 2)
    memory = view_of(arena)
    for i in range(256):
        memory[FRAME + i] = i
    assert arena.check(part()) == "unsealed"
    assert arena.seal(part()) == 0x1E1292E5A29B696D
    assert bytes(memory[FRAME + 3968 : FRAME + 3976]) == b"KVLOFT03"
    assert arena.check(part()) is None
    for change, word in [
        ({"key": b"K" * 32}, "key"),
        ({"layout": b"L" * 32}, "layout"),
        ({"num_blocks": 1}, "shape"),
        ({"rank": 2}, "shape"),
        ({"page_bytes": [128, 128]}, "shape"),
        ({"page_bytes": [28, 100]}, "tag"),
    ]:
        assert arena.check(part(**change)) == word
    memory[FRAME + 255] ^= 1
    assert arena.check(part()) == "tag"
    memory[FRAME + 3968 + 7] = ord("1")  # a part in the first format
    assert arena.check(part()) == "unsealed"


def test_places_outside_the_arena_are_refused() -> None:
    store = make_store(2)
    arena = _core.Arena.open(store.arena_path, size_bytes=FRAME * 2)
    for frame, change in [
        (2, {}),
        (2**32 - 1, {}),
        (1, {"offset": FRAME + 1}),
        (1, {"offset": 2**64 - 1}),
        (1, {"part_bytes": 100}),
        (0, {"part_bytes": 0}),
        (0, {"part_bytes": 2**64 - 1}),
        (1, {"page_bytes": [2000]}),
        (1, {"page_bytes": [2**32 - 1] * 9, "num_blocks": 2**32 - 1}),
    ]:
        for call in (arena.seal, arena.check):
            with pytest.raises(ConfigError):
                call(part(frame, **change))
    for path, num_frames in [(store.arena_path, 3), (store.arena_path, 1)]:
        with pytest.raises(ConfigError):
            _core.Arena.open(path, size_bytes=FRAME * num_frames)
    with pytest.raises(StoreError):
        _core.Arena.open("/proc/self/exe", size_bytes=FRAME * 1)


def test_another_process_sees_and_seals_the_same_frames() -> None:
    store = make_store(2)
    code = (
        "import ctypes, sys; from kvloft import _core\n"
        f"arena = _core.Arena.open(sys.argv[1], size_bytes={FRAME} * 2)\n"
        "memory = (ctypes.c_uint8 * arena.size_bytes).from_address(arena.address)\n"
        "memory[:256] = bytes(range(256))\n"
        "part = dict(offset=0, part_bytes=4096, key=b'k' * 32, layout=b'l' * 32, page_bytes=[100, "
        "28], num_blocks=2, rank=3)\n"
        "arena.seal(part)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, store.arena_path],
        check=True,
        timeout=60 * float(os.environ.get("TEST_PACE", "1")),
    )
    arena = _core.Arena.open(store.arena_path, size_bytes=FRAME * 2)
    assert arena.check(part(0)) is None


def test_memory_that_somebody_could_cut_short_is_no_arena() -> None:
    fd = os.memfd_create("no-arena", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, 2 * 4096)
        with pytest.raises(ConfigError):
            _core.Arena.open(f"/proc/self/fd/{fd}", size_bytes=4096 * 2)
    finally:
        os.close(fd)
