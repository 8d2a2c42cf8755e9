"""Damages frames at random, 10,000 times. Loads must detect all damage by tags or trailers."""

import os
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

from gpu_support import Frames, copies_of, load, make_mover, part_bytes_for, per_layer, save

NUM_FAULTS = int(os.environ.get("KV_NUM_FAULTS", "10000"))
KINDS = ("bit", "swap", "stale", "skip", "truncate", "shift", "zero")


def damage(
    kind: str, part: np.ndarray, old: np.ndarray, pages: int, page: int, rng: random.Random
) -> None:
    """Change the payload in ``part`` as a failure of the given kind would.

    ``old`` is the frame's earlier content, which belonged to another chunk.
    """
    size = pages * page
    one, two = rng.sample(range(pages), 2)
    if kind == "bit":
        part[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "swap":
        first = part[one * page : one * page + page].copy()
        part[one * page : one * page + page] = part[two * page : two * page + page]
        part[two * page : two * page + page] = first
    elif kind == "stale":
        part[:size] = old[:size]
    elif kind == "skip":
        part[one * page : one * page + page] = old[one * page : one * page + page]
    elif kind == "truncate":
        cut = rng.randrange(size)
        part[cut:size] = old[cut:size]
    elif kind == "shift":
        by = rng.choice([1, 2, 4, 8, 16, page])
        part[:size] = np.roll(part[:size], by)
    else:
        part[one * page : one * page + page] = 0


def test_every_injected_fault_is_caught() -> None:
    layers, page, num_chunks = 4, 2048, 100
    paged = per_layer(layers, 2 * num_chunks + 1, page)
    frames = Frames(num_chunks, part_bytes_for(2 * paged.block_bytes))
    mover = make_mover(paged, frames, 2)
    paged.randomize(1)
    blocks = [[2 * i, 2 * i + 1] for i in range(num_chunks)]
    save(mover, copies_of(range(num_chunks), blocks))
    old = frames.raw.copy()[:, 0]
    paged.randomize(2)
    copies = copies_of(range(num_chunks), blocks, first_key=5000)
    save(mover, copies)
    good = frames.raw.copy()
    assert not load(mover, copies).bad_blocks
    rng = random.Random(7)
    caught = injected = 0
    counts = dict.fromkeys(KINDS, 0)
    while injected < NUM_FAULTS:
        frames.raw[:] = good
        hurt = set()
        for i in range(num_chunks):
            if rng.random() < 0.02:
                continue  # intact chunks detect a check that always fails
            kind = rng.choice(KINDS)
            damage(kind, frames.parts[i], old[i], layers * 2, page, rng)
            if not np.array_equal(frames.parts[i], good[i, 0]):
                hurt.add(i)
                counts[kind] += 1
        done = load(mover, copies)
        found = {
            int.from_bytes(key, "little") - 5000
            for key, problem in done.loads[0].bad_keys
            if problem == "tag"
        }
        assert found == hurt, (sorted(hurt - found), sorted(found - hurt))
        assert done.bad_blocks == {b for i in hurt for b in blocks[i]}
        injected += len(hurt)
        caught += len(found)
    print(f"faults injected {injected}, caught {caught}, by kind {counts}")
    mover.close()


def test_damaged_trailers_are_caught() -> None:
    paged = per_layer(2, 64, 1024)
    frames = Frames(64, part_bytes_for(paged.block_bytes))
    mover = make_mover(paged, frames, 1)
    paged.randomize(1)
    copies = copies_of(range(64), [[i] for i in range(64)])
    save(mover, copies)
    good = frames.raw.copy()
    rng = random.Random(1)
    for _ in range(10):
        frames.raw[:] = good
        for i in range(64):
            frames.parts[i, -128 + rng.randrange(96)] ^= 1 << rng.randrange(8)
        assert len(load(mover, copies).loads[0].bad_keys) == 64
    mover.close()
