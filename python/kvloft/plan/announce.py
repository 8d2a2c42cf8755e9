"""KV events: which blocks others are told that the store has or has no more, so that a router can send a prompt where its KV is.

The store says where keys are now (`Session.changes`); what of them was told is kept here, with the blocks that each chunk stands
for, in the engine's own hashes. So what comes out is the difference: however many changes were missed, the next answers mend it.
Chunks of different prefixes can share blocks; a block is stored once, and removed with the last chunk that has it.
It must not know vLLM, nor what an event looks like.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from kvloft.seam.shape import CacheShape
from kvloft.seam.store import KeyChain, Session
from kvloft.seam.views import LiveRequest

HOST, DISK = TIERS = (1, 2)
"""Tiers as `Session.changes` adds them up; with another number where a chunk is coming to host memory."""
MAX_WAITING = 1 << 16
"""Keys that wait in the store to be taken (2 MiB); more make everything be looked at again."""
MAX_CHUNKS = 1 << 18
"""Chunks whose blocks are known, each some 0.7 KiB, 0.5 for each further block, and 4 bytes a token; of the oldest others are told
no more."""
SLICE = 2048
"""Chunks looked at in one step."""


class Block(NamedTuple):
    """One block of a prefix, in the engine's hashes."""

    hash: bytes
    parent: bytes | None
    token_ids: array[int]
    adapter: Any = None
    """What its hash depends on beside tokens: of the whole prefix, and of this block (``extra``)."""
    extra: Any = None


class Stored(NamedTuple):
    """These blocks, each the parent of the next, are in ``tier`` now."""

    tier: int
    blocks: list[Block]
    group: int = 0
    """Which KV cache group keeps them."""


class Removed(NamedTuple):
    """The blocks with these hashes have left ``tier``."""

    tier: int
    hashes: list[bytes]
    group: int = 0


Event = Stored | Removed
Describe = Callable[[LiveRequest, int, int, int], Sequence[Block]]
"""Blocks of so many tokens each, [begin, end) of a request; none, where others could make nothing of them."""


class _Group(NamedTuple):
    """One KV cache group: its number in the keys, and how its blocks lie in those that keys are counted in."""

    nth: int
    number: int | None
    block_tokens: int
    per_unit: int
    not_kept: int
    """The first ones of each, which no prefix needs."""


@dataclass(slots=True, eq=False)
class _Chunk:
    blocks: Sequence[Block]
    group: int
    parent: bytes | None
    """The chunk that others need before this one is of use to them: the one before it, or the main group's beside it."""
    where: int = 0
    """What the store said last, and others know of tiers."""


class Announcer:
    """What others know of ``store``, which must be watched. Each group's chunks are told as blocks of that group's size.

    ``is_shared``: other engines save to it, or it may be away for a while, so a chunk that left may come back without a request.
    """

    def __init__(
        self, store: Session, shape: CacheShape, describe: Describe, *, is_shared: bool = False, max_chunks: int = MAX_CHUNKS
    ) -> None:
        self._store, self._describe, self._max_chunks = store, describe, max_chunks
        self._is_shared = is_shared
        groups = [_group(shape, nth) for nth in range(len(shape.groups))]
        self._main = groups[shape.main]
        self._states = [group for group in groups if shape.groups[group.nth].kind == "state"]
        others = [group for group in groups if shape.groups[group.nth].kind != "state"]
        self._others = sorted(others, key=lambda group: group is not self._main)
        self._known: dict[bytes, _Chunk] = {}
        """In the order in which requests brought them, the beginning of a prefix first: some routers drop what has no parent."""
        self._children: dict[bytes, int] = {}
        """By parent: known chunks that hang on it."""
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        """Known keys, least recently requested first: all without children, and others that were requested after theirs."""
        self._to_ask: OrderedDict[bytes, None] = OrderedDict()
        """Known keys, each once, in their order: those that requests bring meanwhile hold nothing up."""
        self._round: list[bytes] = []
        """Keys that are asked about because everything is, before those, the next one last. Some may have left the book."""
        self._must_ask_all = self._is_over = False
        self._holders: dict[int, Counter[tuple[int, bytes]]] = {tier: Counter() for tier in TIERS}
        """By tier, group and block: chunks there that have it."""
        self._events: list[Event] = []

    def note(self, live: LiveRequest, chain: KeyChain, units: range) -> None:
        """``live`` has the chunks of ``units``: they are in the store, or may come to it."""
        self._note(live, chain, self._others, [(unit, unit + 1) for unit in units], units.start)

    def note_states(self, live: LiveRequest, chain: KeyChain, num_blocks: int) -> None:
        """The same of the states behind its first ``num_blocks`` blocks, if they have keys."""
        if 0 < num_blocks <= chain.num_blocks:
            self._note(live, chain, self._states, [(num_blocks - 1, num_blocks)], num_blocks)

    def _note(
        self, live: LiveRequest, chain: KeyChain, groups: Sequence[_Group], chunks: Iterable[tuple[int, int]], num_above: int
    ) -> None:
        """``num_above``: blocks of the prefix on whose last chunk the first of these hangs."""
        found: dict[bytes, _Chunk] = {}
        above = chain.key(num_above - 1, self._main.number) if num_above else None
        for (begin, end), group in () if self._is_over else product(chunks, groups):
            key, per_unit = chain.key(end - 1, group.number), group.per_unit
            if (chunk := self._known.get(key)) is None:
                blocks = self._describe(live, group.block_tokens, begin * per_unit + group.not_kept, end * per_unit)
                if not blocks:
                    break
                chunk = _Chunk(blocks, group.nth, above)
            found[key] = chunk
            if group is self._main:
                above = key
        # Nothing from here on can fail: an error leaves the book as it was.
        for key, chunk in found.items():
            if key not in self._known:
                self._known[key] = chunk
                if chunk.parent is not None:
                    self._children[chunk.parent] = self._children.get(chunk.parent, 0) + 1
        self._to_ask.update(dict.fromkeys(found))
        self._line_up(found)
        while len(self._known) > self._max_chunks:
            key, _ = self._recent.popitem(last=False)
            if key not in self._children:  # if it is, it comes back before all others with the last of those
                self._move(self._forget(key), 0)

    def _line_up(self, found: dict[bytes, _Chunk]) -> None:
        """These are the most recent. A prefix loses its end first, however many steps brought it: others begin as it does."""
        inner = {chunk.parent for chunk in found.values() if chunk.parent is not None}
        for parent in inner:
            self._recent.pop(parent, None)
        for key in reversed(found):
            if key not in inner:
                self._recent[key] = None
                self._recent.move_to_end(key)

    def _forget(self, key: bytes) -> _Chunk:
        chunk = self._known.pop(key)
        self._recent.pop(key, None)
        self._to_ask.pop(key, None)
        if (parent := chunk.parent) is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._known and parent not in self._recent:
                    self._recent[parent] = None
                    self._recent.move_to_end(parent, last=False)
        return chunk

    def take(self) -> list[Event]:
        """What is to be told since the last call, in order. It asks the store about `SLICE` chunks at most."""
        if self._is_over:
            return self._told()
        if self._must_ask_all and not self._round:
            self._must_ask_all, self._round = False, self._all()
        asked = self._round[: -SLICE - 1 : -1]
        del self._round[-SLICE:]
        asked += [self._to_ask.popitem(last=False)[0] for _ in range(min(SLICE - len(asked), len(self._to_ask)))]
        rows, lost = self._store.changes(asked, SLICE)
        self._must_ask_all |= lost
        for key, where in rows:
            if (chunk := self._known.get(key)) is None:
                continue
            self._move(chunk, where)
            if not (where or self._is_shared):
                self._forget(key)
        return self._told()

    def repeat(self) -> None:
        """Others forgot all that they were told: what is there is told again."""
        self._events.clear()  # what was still to be taken back
        for chunk in self._known.values():
            chunk.where = 0
        self._holders = {tier: Counter() for tier in TIERS}
        self._must_ask_all, self._round = False, self._all()

    def withdraw(self, lost: Iterable[Event] = ()) -> None:
        """The cache offers nothing from now on: retract what was announced, and announce nothing more.

        ``lost``: events that were taken, and that others may not have heard.
        """
        if not self._is_over:
            self._events += [event for event in lost if isinstance(event, Removed)]
        self._is_over = True
        for tier in TIERS:
            for group, each in self._holders[tier]:
                self._leave(tier, group, each)
        self._known.clear()
        self._children.clear()
        self._recent.clear()
        self._to_ask.clear()
        self._round.clear()
        self._holders = {tier: Counter() for tier in TIERS}

    def _all(self) -> list[bytes]:
        """Of all chunks, as ``_round`` has them: a list, for a dict of a full book's would hold up a step for 0.1 s."""
        return list(reversed(self._known))

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _move(self, chunk: _Chunk, where: int) -> None:
        for tier in TIERS:
            if (chunk.where ^ where) & tier:
                (self._come if where & tier else self._go)(tier, chunk)
        chunk.where = where

    def _come(self, tier: int, chunk: _Chunk) -> None:
        holders, group = self._holders[tier], chunk.group
        for block in chunk.blocks:
            holders[group, block.hash] += 1
            if holders[group, block.hash] > 1:
                continue
            match self._events[-1:]:
                case [Stored(of, [*_, last] as run, whose)] if (of, whose, last.hash) == (tier, group, block.parent):
                    run.append(block)
                case _:
                    self._events.append(Stored(tier, [block], group))

    def _go(self, tier: int, chunk: _Chunk) -> None:
        holders, group = self._holders[tier], chunk.group
        for block in chunk.blocks:
            holders[group, block.hash] -= 1
            if not holders[group, block.hash]:
                del holders[group, block.hash]
                self._leave(tier, group, block.hash)

    def _leave(self, tier: int, group: int, hash_: bytes) -> None:
        match self._events[-1:]:
            case [Removed(of, hashes, whose)] if (of, whose) == (tier, group):
                hashes.append(hash_)
            case _:
                self._events.append(Removed(tier, [hash_], group))


def _group(shape: CacheShape, nth: int) -> _Group:
    group = shape.groups[nth]
    num_given_up = group.blocks_per_unit - group.kept_blocks
    return _Group(nth, shape.number_of(nth), group.block_tokens, group.blocks_per_unit, num_given_up)
