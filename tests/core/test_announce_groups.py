"""Tests that replayed KV events match lookups in the real store.

The models have multiple KV cache groups, including sliding-window and Mamba groups, with blocks of
equal or different sizes. The oracle looks up every prefix or, in sliding-window groups, the blocks
that a hit can need.
"""

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from announced import FRAME, NAMESPACE, PACE, Prompt, describe, hash_of, seal

from kvloft import _core
from kvloft.plan.announcer import Announcer
from kvloft.plan.kv_events import DISK, HOST, Stored
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.store import groups_of

SHAPES = {
    "one size": (
        GroupShape(2, kind="window", reach=3),
        GroupShape(2),
        GroupShape(2, kind="state"),
        GroupShape(2),
        GroupShape(2, kind="local", reach=6),
    ),
    "several": (
        GroupShape(2, 6, kind="window", reach=5),
        GroupShape(4, 3),
        GroupShape(6, 2),
        GroupShape(6, 2, kind="window", reach=20),
        GroupShape(4, 3, kind="window", reach=1),
    ),
    "only windows": (
        GroupShape(2, 2, kind="window", reach=2),
        GroupShape(4, 1, kind="window", reach=9),
    ),
}
MAX_CHUNKS = 7
Place = tuple[int, bytes]
"""A KV cache group and the hash of a block."""


class World:
    """A store with few frames and slots, and a subscriber that fails on contradictory events."""

    def __init__(self, seed: int, groups: tuple[GroupShape, ...], disk: str) -> None:
        self.rng, self.shape = random.Random(seed), CacheShape(groups)
        self.size = self.shape.unit_tokens
        self.states = [nth for nth, group in enumerate(groups) if group.kind == "state"]
        halves = [tuple(self.rng.choices((1, 2), k=self.size)) for _ in range(3)]
        self.prompts = [
            sum(self.rng.choices(halves, k=self.rng.randint(1, MAX_CHUNKS)), ()) for _ in range(20)
        ]
        self.store = _core.Session(
            frame_bytes=FRAME,
            namespace=NAMESPACE,
            host_bytes=24 * FRAME,
            disk_path=disk,
            disk_bytes=60 * FRAME,
            disk_threads=2,
            groups=groups_of(self.shape),
        )
        self.arena = _core.Arena.open(self.store.arena_path, size_bytes=self.store.arena_sizes[0])
        self.store.watch(16)
        self.announcer = Announcer(self.store, self.shape, describe)
        prefixes = {prompt[:end] for prompt in self.prompts for end in range(1, len(prompt) + 1)}
        self.named = {hash_of(prefix): prefix for prefix in prefixes}
        self.told: dict[int, set[Place]] = {HOST: set(), DISK: set()}
        self.noted: set[tuple[int, Prompt]] = set()
        self.num_removed, self.seen = 0, set[int]()

    def chain(self, prompt: Prompt) -> _core.KeyChain:
        chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=self.size)
        chain.append_tokens(list(prompt))
        return chain

    def save(self) -> None:
        """Save as the scheduler side does: the blocks of all groups, and the state at the end of
        the prompt.
        """
        prompt = self.rng.choice(self.prompts)
        num_chunks, live, chain = (
            len(prompt) // self.size,
            SimpleNamespace(prompt=prompt),
            self.chain(prompt),
        )
        start = self.rng.choice([0, 0, num_chunks - 1])
        tables = [
            list(range(1, len(prompt) // group.block_tokens + 1)) for group in self.shape.groups
        ]
        row: Any = (chain, list(prompt), len(prompt), start, num_chunks, tables)
        (batches,), _ = self.store.reserve([row])
        reserved = [
            batches,
            *self.store.reserve_states([(chain, nth, num_chunks - 1, 9) for nth in self.states]),
        ]
        for batch in (found for found in reserved if found):
            for chunk in batch:
                seal(self.arena, chunk)
            self.store.settle(batch.tickets())
        self.announcer.note(live, chain, range(start, num_chunks))
        self.announcer.note_states(live, chain, num_chunks)  # type: ignore[arg-type]
        ends = [prompt[: self.size * (nth + 1)] for nth in range(start, num_chunks)]
        others = [nth for nth in range(len(self.shape.groups)) if nth not in self.states]
        self.noted |= {(group, end) for end in ends for group in others} | {
            (group, prompt) for group in self.states
        }

    def discard(self) -> None:
        prompt = self.rng.choice(self.prompts)
        nth, group = (
            self.rng.randrange(len(prompt) // self.size),
            self.rng.randrange(len(self.shape.groups)),
        )
        self.store.discard([self.chain(prompt).key(nth, self.shape.number_of(group))])

    def hear(self) -> None:
        for event in self.announcer.take():
            known, size = self.told[event.tier], self.shape.groups[event.group].block_tokens
            is_stored = isinstance(event, Stored)
            for each in (
                (block.hash for block in event.blocks)
                if isinstance(event, Stored)
                else event.hashes
            ):
                assert ((event.group, each) in known) != is_stored, "announced twice"
                (known.add if is_stored else known.remove)((event.group, each))
                self.num_removed += not is_stored
            before = None
            for block in event.blocks if isinstance(event, Stored) else ():
                prefix = self.named[block.hash]
                assert tuple(block.token_ids) == prefix[-size:], (
                    "the block has the size of a different group"
                )
                assert block.parent == (hash_of(prefix[:-size]) if len(prefix) > size else None)
                assert before in (None, block.parent), "the event contains more than one run"
                before = block.hash

    def rest(self) -> None:
        deadline = time.monotonic() + 30 * PACE
        while self.store.stats()["frames_reserved"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert self.store.flush(30 * PACE)
        for _ in range(10):
            self.hear()
        host, stored = set(self.there(0)), set(self.there(1))
        assert self.told[HOST] == host and self.told[HOST] | self.told[DISK] == stored
        self.seen |= {group for group, _ in stored}

    def there(self, tier: int) -> Iterator[Place]:
        """Return the blocks of requested prompts that a hit can need and that lookups find in host
        memory (0) or in any tier (1).
        """
        for nth, prefix in self.noted:
            group, chain, num_chunks = (
                self.shape.groups[nth],
                self.chain(prefix),
                len(prefix) // self.size,
            )
            ((_, tiers),), _ = self.store.changes(
                [chain.key(num_chunks - 1, self.shape.number_of(nth))], 0
            )
            found = tiers & 1 if tier == 0 else tiers & 3
            first = max(
                len(prefix) - self.size, len(prefix) - group.reach if group.kind == "window" else 0
            )
            for end in range(len(prefix), first, -group.block_tokens) if found else ():
                yield nth, hash_of(prefix[:end])


@pytest.mark.parametrize("groups", SHAPES.values(), ids=SHAPES)
def test_the_replayed_index_matches_the_store_for_each_group(
    groups: tuple[GroupShape, ...], tmp_path: Any
) -> None:
    world = World(5, groups, str(tmp_path / "disk"))
    for nth in range(1, 601):
        world.rng.choices((world.save, world.discard, world.hear), (6, 1, 4))[0]()
        if nth % 100 == 0:
            world.rest()
    assert world.num_removed > 100 and world.seen == set(range(len(groups))), (
        "too few blocks removed, or none in some group"
    )
    one = world.chain((1,) * world.size)
    for num_chunks in (0, 2):  # no chunks, or more chunks than are known
        world.announcer.note_states(SimpleNamespace(prompt=(1,) * world.size), one, num_chunks)  # type: ignore[arg-type]
    world.announcer.withdraw()
    world.hear()
    assert not world.told[HOST] | world.told[DISK]
    world.store.close()
