"""Tests how many chunks fit into an arena with and without frames for compressed chunks."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from kvloft import _core
from kvloft.transfer.frames import compact_bytes_for, part_bytes_for

HOST = 2 << 30
# (size of a layer's pages in one block, in bytes; number of layers)
SHAPES = {
    "llama 3.1 8B": (64 << 10, 32),
    "qwen3 32B": (64 << 10, 64),
    "gemma 3 27B, full attention": (128 << 10, 10),
}


def num_held(sizes: list[int], compact: int | None) -> int:
    """Return the number of chunks that fit into host memory."""
    groups = [(None, "full", 1, 1, 1, 0, len(sizes) - 1, compact)]
    store = _core.Session(
        frame_bytes=sizes, host_bytes=HOST, namespace=bytes(32), groups=groups, eviction="lru"
    )
    root = _core.root_key(bytes(32), None, None)
    for prompt in range(1000):
        chain, ids = _core.KeyChain(root, block_tokens=1), [prompt * 100 + i for i in range(50)]
        (chunks,), _ = store.reserve([(chain, ids, 50, 0, 50, [list(range(1, 51))])])
        assert chunks is not None
        store.settle(chunks.tickets())
        if store.stats()["host_evictions"]:
            break
    held = store.stats()["frames_visible"]
    store.close()
    return held


@pytest.mark.parametrize("name", SHAPES)
def test_compressed_chunks_take_less_room(name: str) -> None:
    layer_bytes, num_layers = SHAPES[name]
    payload, num_tiles = layer_bytes * num_layers, num_layers * (layer_bytes // 4096 + 1)
    raw, large = part_bytes_for(payload), part_bytes_for(payload, num_tiles)
    compact = compact_bytes_for(payload, payload, num_tiles)
    assert num_held([compact, large], 0) >= 1.37 * num_held([raw], None)


def test_a_chunk_that_did_not_fit_gets_a_large_frame_the_next_time() -> None:
    sizes = [4096, 8192]
    groups = [(None, "full", 1, 1, 1, 0, 1, 0)]
    store = _core.Session(
        frame_bytes=sizes, host_bytes=64 * 8192, namespace=bytes(32), groups=groups
    )
    root = _core.root_key(bytes(32), None, None)

    def reserve() -> list[int]:
        row = (_core.KeyChain(root, block_tokens=1), [1, 2, 3], 3, 0, 3, [[4, 5, 6]])
        (chunks,), _ = store.reserve([row])
        assert chunks is not None
        found = [size for _, size, batch in chunks.by_size() for _ in batch]
        tickets = [int(ticket) for ticket in chunks.tickets()]
        if reserved:
            assert store.settle(tickets) == (2, 0)
        else:
            saved, misfits = [tickets[0], tickets[2]], [tickets[1]]
            assert store.settle(saved, misfits, misfits) == (1, 0), "a misfit is not a failure"
        reserved.append(len(tickets))
        return found

    reserved: list[int] = []
    assert reserve() == [0, 0, 0]
    assert store.stats()["save_misfit_chunks"] == 1
    assert sorted(reserve()) == [0, 1], "the chunk that did not fit, and the one after it"
    chain = _core.KeyChain(root, block_tokens=1)
    chain.append_tokens([1, 2, 3])
    assert store.lookup(chain) == (3, 3)
    store.close()


def test_kv_that_never_compresses_soon_takes_only_large_frames() -> None:
    store = _core.Session(
        frame_bytes=[4096, 8192],
        host_bytes=1024 * 8192,
        namespace=bytes(32),
        groups=[(None, "full", 1, 1, 1, 0, 1, 0)],
    )
    root = _core.root_key(bytes(32), None, None)
    for nth in range(500):
        row = (_core.KeyChain(root, block_tokens=1), [nth], 1, 0, 1, [[1]])
        (chunks,), _ = store.reserve([row])
        assert chunks is not None
        tickets, ((_, size, _),) = list(chunks.tickets()), chunks.by_size()
        misfits = tickets if size == 0 else []
        store.settle([] if misfits else tickets, misfits, misfits)
    assert 64 <= store.stats()["save_misfit_chunks"] <= 64 + 500 // 64, "only trials may fail"
    store.close()


def test_a_group_that_never_compresses_does_not_affect_another_group() -> None:
    groups = [(None, "full", 1, 1, 1, 0, 1, 0), (1, "full", 1, 1, 1, 0, 3, 2)]
    store = _core.Session(
        frame_bytes=[4096, 8192, 12288, 16384],
        host_bytes=1024 * 16384,
        namespace=bytes(32),
        groups=groups,
    )
    root = _core.root_key(bytes(32), None, None)
    sizes: list[tuple[int, int]] = []
    for nth in range(200):
        row = (_core.KeyChain(root, block_tokens=1), [nth], 1, 0, 1, [[1], [1]])
        (chunks,), _ = store.reserve([row])
        assert chunks is not None
        for group, size, batch in chunks.by_size():
            sizes.append((group, size))
            tickets, is_misfit = list(batch.tickets()), (group, size) == (1, 2)
            store.settle(
                [] if is_misfit else tickets,
                tickets if is_misfit else [],
                tickets if is_misfit else [],
            )
    assert sizes.count((0, 0)) == 200, "the first group always compresses"
    assert 64 <= sizes.count((1, 2)) <= 64 + 200 // 64
    store.close()


def test_a_store_counts_what_its_chunks_would_take_uncompressed(tmp_path: Path) -> None:
    compact, full = 4096, 8192
    store = _core.Session(
        frame_bytes=[(compact, full), (full, full)],
        host_bytes=64 * full,
        namespace=bytes(32),
        groups=[(None, "full", 1, 1, 1, 0, 1, 0)],
        disk_path=str(tmp_path),
        disk_bytes=1 << 24,
    )
    root = _core.root_key(bytes(32), None, None)
    for ids in ([1, 2, 3], [1, 2, 3, 4]):  # at first, the last chunk does not fit
        blocks = [list(range(5, 5 + len(ids)))]
        for _ in range(2):
            row = (_core.KeyChain(root, block_tokens=1), ids, len(ids), 0, len(ids), blocks)
            (chunks,), _ = store.reserve([row])
            if chunks is None:
                continue
            tickets = list(chunks.tickets())
            (_, size, _), *_ = chunks.by_size()
            if len(ids) == 4 and size == 0:
                store.settle([], tickets, tickets)
            else:
                store.settle(tickets)
    assert store.flush(10)
    stats = store.stats()
    assert (stats["host_used_bytes"], stats["host_raw_bytes"]) == (3 * compact + full, 4 * full)
    assert (stats["disk_used_bytes"], stats["disk_raw_bytes"]) == (3 * compact + full, 4 * full)
    store.clear()
    assert store.stats()["host_raw_bytes"] == store.stats()["disk_raw_bytes"] == 0
    store.close()
