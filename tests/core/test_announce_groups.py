"""What is announced of several KV cache groups, replayed, is what the real store answers of each: windows and states, too."""

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from announced import BLOCK, FRAME, MAX_BLOCKS, NAMESPACE, PACE, Prompt, describe, hash_of

from kvloft import _core
from kvloft.plan.announce import DISK, HOST, Announcer, Stored
from kvloft.plan.groups import GroupedChunks
from kvloft.seam.batch import Tables
from kvloft.seam.shape import CacheShape, GroupShape

WINDOW = GroupShape(BLOCK, kind="window", reach=3)
SHAPE = CacheShape((WINDOW, GroupShape(BLOCK), GroupShape(BLOCK, kind="state"), GroupShape(BLOCK)))
STATE, NUM_GROUPS = 2, len(SHAPE.groups)
Place = tuple[int, bytes]
"""A group and the hash of a block."""


class World:
    """A store with few frames and slots, and a subscriber, for whom an event that contradicts what it was told is an error."""

    def __init__(self, seed: int, disk: str) -> None:
        self.rng = random.Random(seed)
        self.prompts = [tuple(self.rng.choices((1, 2), k=BLOCK * self.rng.randint(1, MAX_BLOCKS))) for _ in range(20)]
        self.store = _core.Session(
            frame_bytes=FRAME, namespace=NAMESPACE, host_bytes=24 * FRAME, disk_path=disk, disk_bytes=60 * FRAME, disk_threads=2
        )
        self.arena = _core.Arena.open(self.store.arena_path, frame_bytes=FRAME, num_frames=self.store.num_frames)
        self.store.watch(16)
        self.announcer, self.groups = Announcer(self.store, SHAPE, describe), GroupedChunks(self.store, SHAPE)
        self.told: dict[int, set[Place]] = {HOST: set(), DISK: set()}
        self.noted: set[tuple[int, Prompt]] = set()
        self.num_removed = 0

    def chain(self, prompt: Prompt) -> _core.KeyChain:
        chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=BLOCK)
        chain.append_tokens(list(prompt))
        return chain

    def save(self) -> None:
        """As the scheduler half does: all groups' blocks, and the state at the prompt's end."""
        prompt = self.rng.choice(self.prompts)
        num_blocks, live, chain = len(prompt) // BLOCK, SimpleNamespace(prompt=prompt), self.chain(prompt)
        start = self.rng.choice([0, 0, num_blocks - 1])
        table = Tables([list(range(1, num_blocks + 1))] * NUM_GROUPS, SHAPE.main)
        row: Any = (chain, list(prompt), len(prompt), start, num_blocks, 0, table, 0)
        (batches,), _ = self.groups.reserve_all([row])
        (states,) = self.groups.reserve_states([(chain, STATE, num_blocks, 9)])
        for batch in (chunks for found in (batches, states) if found for _, chunks in found.batches):
            for chunk in batch:
                spec = {"offset": 0, "part_bytes": FRAME, "key": chunk.key, "layout": b"l" * 32, "page_bytes": [64], "rank": 0}
                self.arena.seal(chunk.frame, {**spec, "num_blocks": 1})
            self.store.settle(batch.tickets())
        self.announcer.note(live, row)  # type: ignore[arg-type]
        self.announcer.note_states(live, chain, num_blocks)  # type: ignore[arg-type]
        ends = [prompt[: BLOCK * (nth + 1)] for nth in range(start, num_blocks)]
        self.noted |= {(group, end) for end in ends for group in range(NUM_GROUPS) if group != STATE} | {(STATE, prompt)}

    def discard(self) -> None:
        prompt = self.rng.choice(self.prompts)
        nth, group = self.rng.randrange(len(prompt) // BLOCK), self.rng.randrange(NUM_GROUPS)
        self.store.discard([self.chain(prompt).key(nth, SHAPE.number_of(group))])

    def hear(self) -> None:
        for event in self.announcer.take():
            known = self.told[event.tier]
            is_stored = isinstance(event, Stored)
            for each in (block.hash for block in event.blocks) if isinstance(event, Stored) else event.hashes:
                assert ((event.group, each) in known) != is_stored, "told twice"
                (known.add if is_stored else known.remove)((event.group, each))
                self.num_removed += not is_stored

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
        assert {group for group, _ in stored} == set(range(NUM_GROUPS)), "some of each group"

    def there(self, tier: int) -> Iterator[Place]:
        """What lookups find in host (0) or anywhere (1) of what requests had."""
        for group, prefix in self.noted:
            chain, num_blocks = self.chain(prefix), len(prefix) // BLOCK
            if SHAPE.groups[group].kind == "full":
                found = self.store.lookup(chain, SHAPE.number_of(group))[tier] == num_blocks
            else:
                found = self.store.lookup_attached(chain, [(group + 1, num_blocks - 1, num_blocks)])[0][tier] == b"\1"
            if found:
                yield group, hash_of(prefix)


def test_the_replayed_index_is_what_the_store_answers_of_each_group(tmp_path: Any) -> None:
    world = World(5, str(tmp_path / "disk"))
    for nth in range(1, 601):
        world.rng.choices((world.save, world.discard, world.hear), (6, 1, 4))[0]()
        if nth % 100 == 0:
            world.rest()
    assert world.num_removed > 100
    for num_blocks in (0, 2):  # nothing was loaded, or more than is known
        world.announcer.note_states(SimpleNamespace(prompt=(1, 1)), world.chain((1, 1)), num_blocks)  # type: ignore[arg-type]
    world.announcer.withdraw()
    world.hear()
    assert not world.told[HOST] | world.told[DISK]
    world.store.close()
