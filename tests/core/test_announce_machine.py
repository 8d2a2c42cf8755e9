"""Property test: checks which blocks subscribers to KV events have recorded after any sequence of
requests, added and removed chunks, lost keys, resets and late subscriptions.

The store is a model, so a chunk's tiers can change between any two lookups. One subscriber listens
from the start. Other subscribers join later and trust every event. The oracle: once the announcer
is idle, subscribers have recorded exactly the stored chunks that fit into the book (`Book`). The
announcer must become idle even while requests continue (`calm`), and after any number of lost keys.
"""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from announced import describe, hash_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvloft.plan import announcer as announcing
from kvloft.plan.announcer import Announcer
from kvloft.plan.kv_events import DISK, HOST, TIERS, Removed, Stored
from kvloft.seam.shape import CacheShape, GroupShape

SLICE, PENDING = 3, 4
SHAPE = CacheShape(
    (
        GroupShape(1, 4, kind="window", reach=2),
        GroupShape(2, 2),
        GroupShape(4, kind="state"),
        GroupShape(4, kind="window", reach=7),
    )
)
SIZE, STATE = SHAPE.unit_tokens, 2
PROMPTS = [
    tuple(digit for unit in units for digit in (unit,) * SIZE)
    for units in ((1, 1, 1), (1, 2, 1), (2,), (1, 1, 2, 2))
]
Key = tuple[int, tuple[int, ...]]
"""A key of the model: a group and the prefix."""


class Chain:
    """A chain whose keys identify their group and prefix."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt, self.num_blocks = prompt, len(prompt) // SIZE

    def key(self, nth: int, number: int | None) -> Any:
        return (number - 1 if number is not None else SHAPE.main), self.prompt[: (nth + 1) * SIZE]


class Store:
    """Records the tiers of each key, and the most recent changes."""

    def __init__(self, capacity: int) -> None:
        self.where: dict[Any, int] = {}
        self.pending = set[Any]()
        """Chunks that are being saved. Each chunk belongs to a request."""
        self.capacity, self.waiting, self.has_lost, self.num_asked = capacity, list[Any](), False, 0

    def put(self, key: Any, where: int) -> None:
        if where != self.where.get(key, 0):
            self.where[key] = where
            self.tell(key)

    def tell(self, key: Any) -> None:
        self.waiting.append(key)
        self.has_lost |= len(self.waiting) > self.capacity
        del self.waiting[: -self.capacity]

    def say(self, key: Any) -> int:
        return self.where.get(key, 0) | PENDING * (key in self.pending)

    def changes(self, asked: list[Any], limit: int) -> tuple[list[tuple[Any, int]], bool]:
        assert len(asked) <= limit
        self.num_asked += len(asked)
        lost, self.has_lost = self.has_lost, False
        if lost:
            self.waiting.clear()  # all keys have been looked up
        told, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return [(key, self.say(key)) for key in [*asked, *told]], lost


class Book(dict[Key, tuple[int, int]]):
    """The largest set of chunks that can be announced if the store keeps all chunks.

    The least recent leaf, by row and position, is dropped first. The chunks before a leaf are at
    least as recent as the leaf.
    """

    def note(self, keys: list[Key], nth_row: int, most: int) -> None:
        self.update({key: (nth_row, -place) for place, key in enumerate(keys)})
        while len(self) > most:
            inner = {parent(key) for key in self}
            leaf = min((key for key in self if key not in inner), key=self.__getitem__)
            used = self.pop(leaf)
            if (above := parent(leaf)) in self:
                self[above] = max(self[above], used)


def parent(key: Key) -> Key | None:
    """Return the parent of a chunk: in the main group, the preceding chunk; in other groups, the
    main group's chunk of the same prefix.
    """
    group, prefix = key
    above = prefix[:-SIZE] if group == SHAPE.main else prefix
    return (SHAPE.main, above) if above else None


def blocks_of(key: Key) -> set[tuple[int, bytes]]:
    """Return the group and hash of each block of a chunk, excluding blocks that no hit needs."""
    nth, prefix = key
    group = SHAPE.groups[nth]
    first = len(prefix) - (min(group.reach, SIZE) if group.kind == "window" else SIZE)
    return {(nth, hash_of(prefix[:end])) for end in range(len(prefix), first, -group.block_tokens)}


class Subscriber:
    """A subscriber to KV events.

    If ``is_first``, the subscriber has received every event, so a contradictory event is an error.
    """

    def __init__(self, *, is_first: bool) -> None:
        self.is_first, self.known = is_first, {tier: set[tuple[int, bytes]]() for tier in TIERS}

    def hear(self, events: list[Any]) -> None:
        for event in events:
            known = self.known[event.tier]
            if not isinstance(event, Stored):
                gone = {(event.group, each) for each in event.hashes}
                assert not self.is_first or gone <= known, "removed, but was not present"
                assert len(gone) == len(event.hashes)
                known -= gone
                continue
            for block, before in zip(event.blocks, [None, *event.blocks], strict=False):
                assert len(block.token_ids) == SHAPE.groups[event.group].block_tokens
                assert before is None or before.hash == block.parent, (
                    "the event contains more than one run"
                )
                assert not self.is_first or (event.group, block.hash) not in known, (
                    "announced twice"
                )
                known.add((event.group, block.hash))


class Machine(RuleBasedStateMachine):
    """The lifetime of an engine until it withdraws its events."""

    @initialize(
        capacity=st.sampled_from((1, 4, 100)),
        most=st.sampled_from((2, 9, 1000)),
        shared=st.booleans(),
    )
    def begin(self, capacity: int, most: int, shared: bool) -> None:
        self.store, self.most, self.is_shared, self.is_over = Store(capacity), most, shared, False
        self.book, self.num_rows = Book(), 0
        store: Any = self.store
        self.announcer = Announcer(store, SHAPE, describe, is_shared=shared, max_chunks=most)
        self.subscribers = [Subscriber(is_first=True)]
        self.noted = OrderedDict[Key, None]()

    def note(self, prompt: tuple[int, ...], start: int, stop: int) -> None:
        """Call `note` as the scheduler side does, then start to save the chunks that are not in
        host memory.
        """
        chain: Any = Chain(prompt)
        live: Any = SimpleNamespace(prompt=prompt)
        self.announcer.note(live, chain, range(start, stop))
        others = [
            SHAPE.main,
            *(nth for nth in range(len(SHAPE.groups)) if nth not in (STATE, SHAPE.main)),
        ]
        rows: list[list[Key]] = [
            [(nth, prompt[: SIZE * end]) for end in range(start + 1, stop + 1) for nth in others]
        ]
        if stop == chain.num_blocks:
            self.announcer.note_states(live, chain, stop)
            rows.append([(STATE, prompt)])
        for keys in rows:
            self.num_rows += 1
            self.book.note(keys, self.num_rows, self.most)
            for key in keys:
                self.noted[key] = None
                self.noted.move_to_end(key)
                # Includes chunks on disk, which can be evicted in the meantime.
                if not self.store.where.get(key, 0) & HOST:
                    self.store.pending.add(key)

    @rule(prompt=st.sampled_from(PROMPTS), bounds=st.tuples(st.integers(0, 3), st.integers(1, 4)))
    def request(self, prompt: tuple[int, ...], bounds: tuple[int, int]) -> None:
        num_chunks = len(prompt) // SIZE
        stop = min(bounds[1], num_chunks)
        self.note(prompt, min(bounds[0], stop - 1), stop)

    @rule(data=st.data())
    @precondition(lambda self: self.store.pending)
    def commit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.store.pending)))
        self.store.pending.discard(key)
        self.store.put(key, self.store.where.get(key, 0) | HOST)

    @rule(data=st.data())
    @precondition(lambda self: self.store.pending)
    def drop(self, data: st.DataObject) -> None:
        """Simulate a chunk without a frame, or a failed save.

        The store reports this only if the chunk is in no tier.
        """
        key = data.draw(st.sampled_from(sorted(self.store.pending)))
        self.store.pending.discard(key)
        if not self.store.where.get(key, 0):
            self.store.tell(key)

    @rule(data=st.data(), where=st.sampled_from((0, 0, *TIERS, 3)))
    @precondition(lambda self: any(self.store.where.values()))
    def move(self, data: st.DataObject, where: int) -> None:
        """Move a chunk to disk or back, or remove it (evicted, discarded or damaged)."""
        self.store.put(
            data.draw(
                st.sampled_from(sorted(key for key, tiers in self.store.where.items() if tiers))
            ),
            where,
        )

    @rule(data=st.data(), where=st.sampled_from(TIERS))
    @precondition(lambda self: self.is_shared and self.noted)
    def come_from_another_engine(self, data: st.DataObject, where: int) -> None:
        self.store.put(data.draw(st.sampled_from(sorted(self.noted))), where)

    @rule()
    def clear(self) -> None:
        for key in self.store.where:
            self.store.put(key, 0)

    @rule()
    def step(self) -> None:
        events = self.announcer.take()
        for subscriber in self.subscribers:
            subscriber.hear(events)

    @rule()
    def forget(self) -> None:
        """Simulate vLLM's report that all blocks were removed."""
        self.announcer.repeat()
        for subscriber in self.subscribers:
            subscriber.known = {tier: set() for tier in TIERS}

    @rule()
    def join(self) -> None:
        self.subscribers.append(Subscriber(is_first=False))

    @rule(is_busy=st.booleans())
    def calm(self, is_busy: bool) -> None:
        """Run until the announcer must be idle, even if requests continue (``is_busy``)."""
        for _ in range(3 + 3 * -(-min(len(self.noted), self.most) // SLICE)):
            if is_busy and self.noted:
                prompt = next(reversed(self.noted))[1]
                pending = set(self.store.pending)
                self.note(prompt, len(prompt) // SIZE - 1, len(prompt) // SIZE)
                self.store.pending = pending
            self.step()
        # After removals, the announcer has more space for records than the model has.
        last = (
            []
            if self.is_over
            else self.book
            if self.is_shared or len(self.noted) <= self.most
            else []
        )
        for tier in TIERS:
            here = [key for key, where in self.store.where.items() if where & tier]
            may = (
                set().union(*(blocks_of(key) for key in here if key in self.noted))
                if not self.is_over
                else set()
            )
            must = set().union(*(blocks_of(key) for key in here if key in last))
            assert must <= self.subscribers[0].known[tier] <= may
            assert all(subscriber.known[tier] <= may for subscriber in self.subscribers)
        if not self.is_shared:
            asked = self.announcer._known.keys() - self.announcer._to_look_up.keys()
            assert all(map(self.store.say, asked)), (
                "still waiting for chunks that will never appear"
            )

    @rule()
    def withdraw(self) -> None:
        self.announcer.withdraw()
        self.is_over = True

    @invariant()
    def is_bounded(self) -> None:
        if hasattr(self, "announcer"):
            known, recent = self.announcer._known.keys(), self.announcer._recent.keys()
            assert self.announcer._to_look_up.keys() <= known and recent <= known
            inner = {parent(key) for key in known} - {None}
            assert known - inner <= recent and self.announcer._children.keys() == inner
            assert len(known) <= self.most and (
                not self.is_shared or self.is_over or known == self.book.keys()
            )


def test_subscribers_always_know_the_stored_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "SLICE", SLICE)
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=4 * settings().max_examples)
    )  # each step is short


def test_a_chunk_that_leaves_the_disk_during_its_save_is_announced_after_it() -> None:
    store: Any = Store(9)
    announcer = Announcer(store, SHAPE, describe)
    told = []
    store.put((SHAPE.main, PROMPTS[2]), DISK)
    store.pending.add((SHAPE.main, PROMPTS[2]))
    announcer.note(SimpleNamespace(prompt=PROMPTS[2]), Chain(PROMPTS[2]), range(1))  # type: ignore[arg-type]
    for where in (DISK, 0, HOST):
        store.put((SHAPE.main, PROMPTS[2]), where)
        told += [(type(event), event.tier) for event in announcer.take()]
    assert told == [(Stored, DISK), (Removed, DISK), (Stored, HOST)]
