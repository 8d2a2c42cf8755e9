"""Tests many simultaneous requests with vLLM's real scheduler: their loads, blocks and order."""

import random
from pathlib import Path

import pytest

from kvloft.plan.disk_pacing import DiskPacing

from .engine import Engine
from .machine import MODEL
from .shape import Shape
from .symbols import VOCAB, Spec

BLOCK = 4
HERD = 8
PREFIX_BLOCKS = 20


def spec(name: str, ids: tuple[int, ...], max_tokens: int = 4) -> Spec:
    return Spec(name, ids, max_tokens, ids)


def prefix(num_blocks: int, salt: int = 0) -> tuple[int, ...]:
    pick = random.Random(salt)
    return tuple(pick.randrange(3, VOCAB) for _ in range(num_blocks * BLOCK))


def serve_before(engine: Engine, prompts: list[tuple[int, ...]]) -> None:
    """Run the prompts one after another, then clear vLLM's own cache."""
    for i, prompt in enumerate(prompts):
        engine.add(spec(f"before{i}", (*prompt, 3), 1))
        engine.run()
        assert engine.store is not None
        engine.store.settle_disk()
    engine.reset(running=False, connector=False)
    engine.admissions.clear()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_blocks", [256, 64])
def test_a_herd_with_one_prefix_loads_it_once(num_blocks: int, is_async: bool) -> None:
    shape = Shape(
        async_scheduling=is_async,
        num_blocks=num_blocks,
        max_seqs=HERD,
        max_batched_tokens=64,
        host_frames=200,
    )
    engine = Engine(MODEL, shape, 1)
    serve_before(engine, [prefix(PREFIX_BLOCKS)])
    for i in range(HERD):
        engine.add(spec(f"r{i}", (*prefix(PREFIX_BLOCKS), 4 + i, 5, 6, 7, 8)))
    most = 0
    pool = engine.scheduler.kv_cache_manager.block_pool
    while engine.unfinished:
        engine.step()
        most = max(most, num_blocks - 1 - pool.get_num_free_blocks())
    engine.settle()
    engine.close()
    assert sum(tokens for _, tokens, _ in engine.admissions) <= 1.1 * PREFIX_BLOCKS * BLOCK
    assert most <= PREFIX_BLOCKS + 3 * HERD


@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_on_disk_are_served_in_their_order_and_hold_up_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Sends requests that need more than the available host memory, while an earlier request keeps
    running and saving its output.
    """
    monkeypatch.setattr(DiskPacing, "always_pays", True)  # computing symbols takes no time
    num_prompts, num_blocks, frames = 30, 16, 200  # the disk holds about 970 chunks
    shape = Shape(
        async_scheduling=is_async,
        num_blocks=90,
        max_seqs=4,
        max_batched_tokens=64,
        host_frames=frames,
        has_disk=True,
    )
    engine = Engine(MODEL, shape, 1, tmp_path)
    assert engine.store is not None
    prompts = [prefix(num_blocks, salt) for salt in range(1, num_prompts + 1)]
    serve_before(
        engine, [*prompts, *(prefix(num_blocks, 100 + i) for i in range(13))]
    )  # the last prompts fill the host memory
    engine.core.counters.clear()
    engine.store.patience = 3
    engine.add(spec("runs", (3, 4, 5), 300))
    engine.step()
    for i, prompt in enumerate(prompts):
        engine.add(spec(f"r{i}", (*prompt, 3, 4), 8))
    pinned = []
    while engine.unfinished:
        engine.step()
        pinned.append(engine.core._admission.turns.waiting.num_units)
    served = [
        (req_id, tokens)
        for req_id, tokens, is_resumed in engine.admissions
        if tokens and not is_resumed
    ]
    places = [int(req_id[1:]) for req_id, _ in served]
    assert sorted(places) == list(range(num_prompts))
    # Among the requests that wait at the same time, the request whose reads complete first runs
    # first. Requests further back in the queue do not overtake these requests.
    at_once = frames // 2 // num_blocks
    assert all(abs(place - nth) < at_once for nth, place in enumerate(places)), places
    assert all(tokens == num_blocks * BLOCK for _, tokens in served)
    assert num_blocks < max(pinned) <= frames // 2
    assert not engine.core.counters["save_dropped_chunks"]
    engine.settle()
    engine.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_loads_for_which_there_is_no_seat_preempt_no_request(is_async: bool) -> None:
    """vLLM admits more loads than it has running slots, and cannot preempt requests with loads."""
    shape = Shape(
        async_scheduling=is_async,
        num_blocks=220,
        max_seqs=4,
        max_batched_tokens=64,
        host_frames=800,
    )
    engine = Engine(MODEL, shape, 1)
    prompts = [prefix(12, salt) for salt in range(24)]
    serve_before(engine, prompts)
    for i, prompt in enumerate(prompts):
        engine.add(spec(f"r{i}", (*prompt, 3, 4), 96))
    engine.settle()
    assert not any(is_resumed for _, _, is_resumed in engine.admissions)
    assert sum(tokens for _, tokens, _ in engine.admissions) == len(prompts) * 12 * BLOCK
    engine.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_rate_of_prompts_is_measured_through_vllms_hooks(is_async: bool) -> None:
    """vLLM calls no hook at the end of most empty steps, so plans and reports carry a number."""
    engine = Engine(MODEL, Shape(async_scheduling=is_async), 1)
    pacing = engine.core._admission.disk.pacing
    assert not pacing._longest_step
    engine.add(spec("r", prefix(8, 1), 3))
    while engine.unfinished:
        engine.step()
    assert pacing._longest_step, "no step was measured"
    assert not pacing._steps, "the end of a step was not matched with its beginning"
    engine.settle()
    engine.close()
