"""Tests that a replay of the real store's KV events matches lookups: after any sequence of steps,
after lost keys, after restarts, and after the announcer has reached its maximum number of chunks.

The store is embedded in the engine or runs in a server (`announced.py`). KV_EVENT_STEPS sets the
number of steps.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from announced import BLOCK, NUM_STEPS, PACE, SharedWorld, World, describe, hash_of

from kvloft.plan import PlanSettings, SchedulerCore
from kvloft.plan import announcer as announcing
from kvloft.plan.announcer import Announcer
from kvloft.plan.kv_events import DISK, HOST, Stored
from kvloft.seam.shape import CacheShape, GroupShape


@pytest.mark.parametrize("kind", [World, SharedWorld], ids=["its own", "a server's"])
@pytest.mark.parametrize("capacity", [3, 1 << 16], ids=["loses keys", "has room"])
def test_the_replayed_index_matches_the_store(
    kind: type[World], capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "SLICE", 5)
    world = kind(10 + capacity, tmp_path, capacity=capacity, slots=40)
    for nth in range(1, NUM_STEPS // 4 + 1):
        world.step()
        if nth % 250 == 0:
            world.rest()
        if nth % 400 == 0:
            world.restart()
    world.rest()
    assert world.num_lost, "clearing also loses keys"
    world.announcer.withdraw()
    world.index.replay(world.announcer.take())
    assert not world.index.tiers[HOST] | world.index.tiers[DISK]
    world.close()


def test_chunks_on_disk_at_start_are_announced_with_their_first_request(
    tmp_path: Path,
) -> None:
    world = World(1, tmp_path, capacity=100, slots=40)
    prompt = max(world.prompts, key=len)
    world.save(prompt, whole=True)
    world.store.settle(world.tickets)
    assert world.store.flush(30 * PACE)
    world.close()
    world.start()
    assert world.announcer.take() == []
    world.save(prompt, whole=True)
    told = world.announcer.take()
    assert [(e.tier, [b.hash for b in e.blocks]) for e in told if isinstance(e, Stored)] == [
        (DISK, [hash_of(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)])
    ]
    world.close()


def test_chunks_that_left_are_not_kept(tmp_path: Path) -> None:
    world = World(3, tmp_path, capacity=100, slots=40)
    for _ in range(2):
        world.save((1, 1), whole=True)
        world.announcer.take()
        world.store.settle(world.tickets)
        world.announcer.take()
    world.store.clear()
    for _ in range(3):
        world.announcer.take()
    assert not world.announcer._known
    world.close()


def test_an_engine_that_stops_offering_retracts_its_events(tmp_path: Path) -> None:
    world = World(4, tmp_path, capacity=100, slots=40)
    core = SchedulerCore(
        world.store,
        lambda _view, _lookahead: world.chain((1, 1)),
        PlanSettings(CacheShape((GroupShape(BLOCK),))),
        clock=time.monotonic,
        announcer=world.announcer,
    )
    world.save(max(world.prompts, key=len), whole=True)
    world.store.settle(world.tickets)
    world.index.replay(world.announcer.take())
    assert world.index.tiers[HOST]
    core.stop()
    world.save(max(world.prompts, key=len), whole=True)
    world.index.replay(world.announcer.take())
    assert not world.index.tiers[HOST] | world.index.tiers[DISK]
    core.stop()
    assert world.announcer.take() == [] and not world.announcer._known
    world.close()


def test_repeated_events_start_at_the_beginning(tmp_path: Path) -> None:
    """A router might drop a block if it does not have the block's parent.

    Later requests repeat only the beginning or only the end of the prompt.
    """
    world = World(6, tmp_path, capacity=100, slots=40)
    longest = max(world.prompts, key=len)
    for prompt in (longest, longest[: 2 * BLOCK]):
        world.save(prompt, whole=True)
        world.store.settle(world.tickets)
        world.tickets.clear()
    num_blocks = len(longest) // BLOCK
    end = world.chain(longest), range(num_blocks - 1, num_blocks)
    live: Any = SimpleNamespace(prompt=longest)
    world.announcer.note(live, *end)
    world.announcer.take()
    world.announcer.repeat()
    world.announcer.note(live, *end)
    told = [
        event
        for event in world.announcer.take()
        if isinstance(event, Stored) and event.tier == HOST
    ]
    assert [block.hash for event in told for block in event.blocks] == [
        hash_of(longest[:end]) for end in range(BLOCK, len(longest) + 1, BLOCK)
    ]
    world.close()


def test_interrupted_repeated_events_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "SLICE", 1)
    world = World(6, tmp_path, capacity=100, slots=40)
    longest = max(world.prompts, key=len)
    world.save(longest, whole=True)
    world.store.settle(world.tickets)
    while not all(chunk.where & HOST for chunk in world.announcer._known.values()):
        world.announcer.take()
    for _ in range(2):
        world.announcer.repeat()
        told = [
            event.blocks[0].hash for event in world.announcer.take() if isinstance(event, Stored)
        ]
        assert told[0] == hash_of(longest[:BLOCK])
    world.close()


def test_of_more_chunks_than_are_kept_the_oldest_are_taken_back(tmp_path: Path) -> None:
    world = World(2, tmp_path, capacity=100, slots=40)
    world.announcer = Announcer(
        world.store, CacheShape((GroupShape(BLOCK),)), describe, max_chunks=2
    )
    for prompt in ((1, 1), (1, 2), (2, 2)):
        world.save(prompt, whole=True)
        world.store.settle(world.tickets)
        world.tickets.clear()
        world.index._of[hash_of(prompt)] = prompt
        world.index.replay(world.announcer.take())
    assert world.index.tiers[HOST] == {hash_of((1, 2)), hash_of((2, 2))}
    world.save((1, 2), whole=True)
    world.save((1, 1), whole=True)
    world.index.replay(world.announcer.take())
    assert world.index.tiers[HOST] == {hash_of((1, 1)), hash_of((1, 2))}, (
        "another request uses the chunk, so it must be announced again"
    )
    longest = max(world.prompts, key=len)
    for _ in range(2):
        world.save(longest, whole=True)
        world.store.settle(world.tickets)
        world.tickets.clear()
        world.index.replay(world.announcer.take())
    assert world.index.tiers[HOST] == {hash_of(longest[:BLOCK]), hash_of(longest[: 2 * BLOCK])}, (
        "the beginning of the prompt is kept, not its end"
    )
    world.close()


def test_chunks_without_a_frame_or_with_a_failed_save_are_not_announced(tmp_path: Path) -> None:
    """These chunks never appear in the store. With little memory, the announcer's records of such
    chunks would accumulate.
    """
    world = World(5, tmp_path, capacity=1000, slots=40)
    for prompt in sorted(world.prompts):
        world.save(prompt, whole=True)
    assert len(world.announcer._known) > len(world.tickets) == 9, "the store has only nine frames"
    assert world.announcer.take() == [] and len(world.announcer._known) == 9, (
        "only reserved chunks can still appear"
    )
    world.store.abort(world.tickets)
    assert world.announcer.take() == [] and not world.announcer._known
    world.close()


@pytest.mark.parametrize(
    ("requests", "kept"),
    [
        ("a0-2 a2-4 a4-5 a5-6 b0-1 b1-3 b0-4", "a0-3 b0-4"),
        ("a0-4 a0-1 a4-5 a5-6 b0-4", "a0-3 b0-4"),
        ("a0-6 b0-1 a0-2 c0-1 d0-4", "a0-2 c0-1 d0-4"),
    ],
    ids=[
        "in pieces",
        "with its beginning requested again meanwhile",
        "its beginning was requested later than its end",
    ],
)
def test_of_a_prompt_the_end_is_taken_back_first(requests: str, kept: str, tmp_path: Path) -> None:
    """Chunked prefill adds a prompt step by step, and other prompts share its prefix."""
    world = World(8, tmp_path, capacity=1000, slots=40)
    announcer = Announcer(world.store, CacheShape((GroupShape(BLOCK),)), describe, max_chunks=7)

    def chunks(text: str) -> list[tuple[Any, Any, range]]:
        rows = [(each[0], range(*map(int, each[1:].split("-")))) for each in text.split()]
        prompts = [(ord(name),) * 6 * BLOCK for name, _ in rows]
        return [
            (SimpleNamespace(prompt=own), world.chain(own), nths)
            for own, (_, nths) in zip(prompts, rows, strict=True)
        ]

    for live, chain, nths in chunks(requests):
        announcer.note(live, chain, nths)
    assert set(announcer._known) == {
        chain.key(nth) for _, chain, nths in chunks(kept) for nth in nths
    }
    assert len(announcer._recent) == len(kept.split()), (
        "stale records would slow down the search for a record to drop"
    )
    world.close()


def test_an_error_about_a_requests_blocks_costs_only_their_events(tmp_path: Path) -> None:
    """For example, a request field that a newer vLLM release adds could cause such an error.

    The error must leave the records intact for the next call.
    """
    world = World(9, tmp_path, capacity=100, slots=40)
    odd = ((1, 1, 1, 1), (1, 1, 2, 2))

    def fails(live: Any, size: int, begin: int, end: int) -> Any:
        if live.prompt == odd[0] and begin:
            raise RuntimeError
        return describe(live, size, begin, end)

    world.announcer = Announcer(world.store, CacheShape((GroupShape(BLOCK),)), fails, max_chunks=1)
    with pytest.raises(RuntimeError):
        world.save(odd[0], whole=True)
    assert not world.announcer._known and world.announcer.take() == []
    world.save(odd[1], whole=True)
    assert set(world.announcer._known) == {world.chain(odd[1]).key(0)}
    world.close()
