"""Crowds of requests on vLLM's real scheduler: what they load, which blocks they take, and who comes first."""

import os
import random
import time
from pathlib import Path

import pytest

from kvloft.plan.disk_pacing import DiskPacing

from .engine import BLOCK, Engine, Shape
from .symbols import VOCAB, Spec

PACE = float(os.environ.get("TEST_PACE", "1"))
HERD = 8
PREFIX_BLOCKS = 20


def spec(name: str, ids: tuple[int, ...], max_tokens: int = 4) -> Spec:
    return Spec(name, ids, max_tokens, ids)


def prefix(num_blocks: int, salt: int = 0) -> tuple[int, ...]:
    pick = random.Random(salt)
    return tuple(pick.randrange(3, VOCAB) for _ in range(num_blocks * BLOCK))


def herd_of(engine: Engine) -> tuple[int, int, int]:
    """Tokens loaded, the most blocks in use, and steps, of a herd that shares a prefix which is in host memory only."""
    engine.add(spec("first", (*prefix(PREFIX_BLOCKS), 3)))
    engine.run()
    engine.reset(running=False, connector=False)
    for i in range(HERD):
        engine.add(spec(f"r{i}", (*prefix(PREFIX_BLOCKS), 4 + i, 5, 6, 7, 8)))
    most = steps = 0
    engine.external.clear()
    pool = engine.scheduler.kv_cache_manager.block_pool
    while engine.unfinished:
        engine.step()
        steps += 1
        most = max(most, engine.shape.num_blocks - 1 - pool.get_num_free_blocks())
    engine.run()
    engine.check()
    engine.assert_at_rest()
    return sum(tokens for _, tokens, _ in engine.external), most, steps


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_blocks", [256, 64])
def test_a_herd_with_one_prefix_loads_it_once(folder: Path, num_blocks: int, is_async: bool) -> None:
    shape = Shape(
        async_scheduling=is_async, caching=True, num_blocks=num_blocks, max_seqs=HERD, max_batched_tokens=64, host_frames=200
    )
    engine = Engine(folder, shape, 1)
    loaded, most, _ = herd_of(engine)
    engine.close()
    assert loaded <= 1.1 * PREFIX_BLOCKS * BLOCK
    assert most <= PREFIX_BLOCKS + 3 * HERD


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_on_disk_are_served_in_their_order_and_hold_up_no_save(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Many more of them than host memory holds, behind a request that runs and saves what it generates."""
    monkeypatch.setattr(DiskPacing, "pays", lambda *_, **__: True)  # symbols are computed faster than any disk reads them
    num_prompts, num_blocks, frames = 30, 16, 200  # the disk takes some 970
    shape = Shape(async_scheduling=is_async, caching=True, num_blocks=90, max_seqs=4, max_batched_tokens=64, host_frames=frames)
    engine = Engine(folder, shape, 1, tmp_path)
    prompts = [prefix(num_blocks, salt) for salt in range(1, num_prompts + 1)]
    for i, prompt in enumerate([*prompts, *(prefix(num_blocks, 100 + i) for i in range(13))]):  # the last fill host memory
        engine.add(spec(f"before{i}", (*prompt, 3), 1))
        engine.run()
        assert engine.half._store.flush(60.0 * PACE)
    engine.reset(running=False, connector=False)
    engine.external.clear()
    engine.core.counters.clear()
    engine.add(spec("runs", (3, 4, 5), 300))
    engine.step()
    for i, prompt in enumerate(prompts):
        engine.add(spec(f"r{i}", (*prompt, 3, 4), 8))
    most_pinned = 0
    for _ in range(20_000):
        if not engine.unfinished:
            break
        engine.step()
        most_pinned = max(most_pinned, engine.core._admission.turns.waiting.num_units)
        time.sleep(0.0002)
    engine.run()
    engine.check()
    served = [(req_id, tokens) for req_id, tokens, is_resumed in engine.external if tokens and not is_resumed]
    places = [int(req_id[1:]) for req_id, _ in served]
    assert sorted(places) == list(range(num_prompts))
    # Of those that have their turn at once, the one whose reads end first goes first: no other overtakes.
    at_once = frames // 2 // num_blocks
    assert all(abs(place - nth) < at_once for nth, place in enumerate(places)), places
    assert all(tokens == num_blocks * BLOCK for _, tokens in served)
    assert most_pinned <= frames // 2
    assert not engine.core.counters["save_dropped_chunks"]
    engine.assert_at_rest()
    engine.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_loads_for_which_there_is_no_seat_preempt_no_request(folder: Path, is_async: bool) -> None:
    """vLLM admits loads beyond its seats, and cannot preempt them."""
    shape = Shape(async_scheduling=is_async, caching=True, num_blocks=220, max_seqs=4, max_batched_tokens=64, host_frames=800)
    engine = Engine(folder, shape, 1)
    prompts = [prefix(12, salt) for salt in range(24)]
    for i, prompt in enumerate(prompts):
        engine.add(spec(f"before{i}", (*prompt, 3), 1))
        engine.run()
    engine.reset(running=False, connector=False)
    engine.external.clear()
    for i, prompt in enumerate(prompts):
        engine.add(spec(f"r{i}", (*prompt, 3, 4), 96))
    engine.run()
    engine.check()
    assert not any(is_resumed for _, _, is_resumed in engine.external)
    assert sum(tokens for _, tokens, _ in engine.external) == len(prompts) * 12 * BLOCK
    engine.assert_at_rest()
    engine.close()
