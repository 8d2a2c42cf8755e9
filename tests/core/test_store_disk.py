"""Tests the store with a real directory: chunks survive a restart, and only one process can use the
directory.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from batches import frames, reserve, tiers

from kvloft import _core
from kvloft.errors import ConfigError

LONG_S = 60.0 * float(os.environ.get("TEST_PACE", "1"))
FRAME = 4096
NAMESPACE = b"n" * 32


def make_store(
    path: Path, *, num_frames: int = 8, num_slots: int = 64, **kwargs: object
) -> _core.Session:
    settings: dict[str, object] = {
        "frame_bytes": FRAME,
        "host_bytes": num_frames * FRAME,
        "namespace": NAMESPACE,
        "disk_path": str(path),
        "disk_bytes": (num_slots + 16) * FRAME,
        "description": "a test",
        **kwargs,
    }
    return _core.Session(**settings)  # type: ignore[arg-type]


def chain_of(*token_ids: int) -> _core.KeyChain:
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(list(token_ids))
    return chain


def spec(key: bytes) -> dict[str, object]:
    return {
        "offset": 0,
        "part_bytes": FRAME,
        "key": key,
        "layout": bytes(32),
        "page_bytes": [],
        "num_blocks": 1,
        "rank": 0,
    }


def arena_of(store: _core.Session) -> _core.Arena:
    return _core.Arena.open(store.arena_path, size_bytes=store.arena_sizes[0])


def save(store: _core.Session, chain: _core.KeyChain) -> int:
    arena = arena_of(store)
    rows, _ = reserve(store, chain, 0, chain.num_blocks)
    for _, frame, key, _ in rows:
        arena.seal(spec(key) | {"offset": frame * FRAME})
    return store.settle([row[0] for row in rows])[0]


def settled(lease: _core.ReadLease) -> tuple[int, int]:
    deadline = time.monotonic() + LONG_S
    while lease.poll()[1] and time.monotonic() < deadline:
        time.sleep(0.001)
    return lease.poll()


def load(store: _core.Session, chain: _core.KeyChain) -> int:
    """Load the chain again, verify the content, and return the number of loaded blocks."""
    lease = store.acquire(chain)
    blocks, pending = settled(lease)
    assert pending == 0
    arena = arena_of(store)
    for frame, key, unit in frames(lease):
        assert key == chain.key(unit)
        assert arena.check(spec(key) | {"offset": frame * FRAME}) is None
    return blocks


def test_a_restart_finds_what_was_flushed(tmp_path: Path) -> None:
    chain = chain_of(1, 2, 3, 4, 5)
    store = make_store(tmp_path)
    assert save(store, chain) == 5
    assert store.flush(LONG_S)
    assert store.stats()["disk_used"] == 5
    store.close()
    again = make_store(tmp_path)
    assert again.stats()["disk_recovered"] == 5
    assert again.lookup(chain) == (0, 5)
    assert load(again, chain_of(1, 2, 3, 9)) == 3
    by_tier = tiers(again.acquire(chain))
    assert by_tier.pop("host") == 3 and by_tier.keys() <= {
        "disk"
    }  # the other chunks can already be in host memory
    assert load(again, chain) == 5
    assert again.lookup(chain) == (5, 5)
    again.close()


def test_close_writes_remaining_chunks(tmp_path: Path) -> None:
    chain = chain_of(*range(8))
    store = make_store(tmp_path)
    assert save(store, chain) == 8
    store.close(LONG_S)
    again = make_store(tmp_path)
    assert load(again, chain) == 8
    again.close()


def test_more_than_host_holds_comes_from_disk_as_far_as_frames_go(tmp_path: Path) -> None:
    store = make_store(tmp_path, num_frames=4)
    chains = [chain_of(start, *range(3)) for start in range(100, 110)]
    for chain in chains:
        assert save(store, chain) == 4
        assert store.flush(LONG_S)
    assert store.stats()["host_evictions"] == 36
    for chain in chains:
        assert store.lookup(chain)[1] == 4
        assert load(store, chain) == 4
    pinned = store.acquire(chains[0])
    assert settled(pinned) == (4, 0)
    assert settled(store.acquire(chains[1])) == (
        0,
        0,
    )  # every frame is pinned, so an empty lease is returned without waiting
    store.close()


def test_discarded_and_cleared_chunks_stay_away_after_a_restart(tmp_path: Path) -> None:
    one, two = chain_of(1, 2, 3), chain_of(7, 8)
    store = make_store(tmp_path)
    save(store, one)
    save(store, two)
    assert store.flush(LONG_S)
    assert store.discard([one.key(1)]) == 2
    assert store.flush(LONG_S)
    store.close()
    again = make_store(tmp_path)
    assert (again.lookup(one), again.lookup(two)) == ((0, 1), (0, 2))
    again.clear()
    assert again.stats()["disk_used"] == 0
    again.close(0)
    last = make_store(tmp_path)
    assert (last.lookup(one), last.lookup(two)) == ((0, 0), (0, 0))
    last.close()


def test_a_second_owner_serves_from_host_memory_until_the_first_is_gone(tmp_path: Path) -> None:
    chain = chain_of(1, 2, 3)
    store = make_store(tmp_path)
    save(store, chain)
    second = make_store(tmp_path)
    assert (second.stats()["disk_broken"], second.lookup(chain)) == (1, (0, 0))
    store.close()
    deadline = time.monotonic() + LONG_S
    while second.stats()["disk_broken"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert second.lookup(chain) == (0, 3)
    second.close()


def test_damaged_frames_are_misses_and_are_counted(tmp_path: Path) -> None:
    chain = chain_of(1, 2, 3)
    store = make_store(tmp_path)
    save(store, chain)
    store.close()
    frames = next(tmp_path.glob("*/frames-*.dat"))
    data = bytearray(frames.read_bytes())
    data[FRAME + 7] ^= 1
    frames.write_bytes(data)
    again = make_store(tmp_path)
    assert again.lookup(chain) == (0, 3)
    assert load(again, chain) < 3
    assert again.stats()["disk_verify_failures"] == 1
    assert again.lookup(chain)[1] < 3
    again.close()


@pytest.mark.parametrize("threads", [0, 65])
def test_bad_disk_settings_are_named(tmp_path: Path, threads: int) -> None:
    with pytest.raises(ConfigError, match="disk_threads"):
        make_store(tmp_path, disk_threads=threads)
    with pytest.raises(ConfigError, match="disk_size"):
        make_store(tmp_path, disk_bytes=0)


def test_a_killed_process_leaves_whole_chunks_only(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path\n"
        "from test_store_disk import chain_of, make_store, save\n"
        "store = make_store(Path(sys.argv[1]), num_frames=64)\n"
        "for turn in range(10**6): print(turn, flush=True), save(store, chain_of(turn, 1, 2, 3))\n"
    )
    turns = recovered = 0
    for round_ in range(3):
        args = [
            sys.executable,
            "-c",
            code,
            str(tmp_path),
            str(Path(__file__).parent),
            str(Path(__file__).parents[1] / "model"),
        ]
        with subprocess.Popen(args, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(100):
                process.stdout.readline()
            time.sleep(0.1 + 0.07 * round_)
            process.kill()
            turns = max(
                turns, 100 + process.stdout.read().count(b"\n")
            )  # the number of started reads depends on the machine
        store = make_store(tmp_path, num_frames=64)
        found = [(turn, store.lookup(chain_of(turn, 1, 2, 3))[1]) for turn in range(turns)]
        assert sum(blocks for _, blocks in found) == store.stats()["disk_recovered"] <= 80
        recovered += store.stats()["disk_recovered"]
        for turn, blocks in found:
            if blocks:
                assert load(store, chain_of(turn, 1, 2, 3)) == blocks
        assert store.stats()["disk_verify_failures"] == 0
        store.close(0)
    assert recovered, "nothing was written, so nothing was tested"
