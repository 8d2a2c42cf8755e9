"""Publishes KV events for the blocks in the store.

The store reports the tiers that hold each key (`Session.changes`). For each chunk, the announcer
keeps the announced tiers and this engine's hashes of the chunk's blocks. An event is the
difference between the reported and the announced tiers, so the next report corrects a missed
change. Chunks of different prefixes can share blocks. A block is announced with the first chunk
that contains it and removed with the last.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from kvloft.plan.kv_events import TIERS, Block, Event, EventLog
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import KeyChain, Session
from kvloft.seam.views import LiveRequest

MAX_WAITING = 1 << 16
"""Maximum number of changed keys in the store's queue (2 MiB). An overflow causes a new lookup of
all chunks.
"""
MAX_CHUNKS = 1 << 18
"""Maximum number of tracked chunks. A chunk takes about 0.7 KiB, plus 0.5 KiB for each block after
the first and 4 bytes per token. Beyond this limit, the least recent chunks are withdrawn.
"""
SLICE = 2048
"""Maximum number of chunk lookups per step."""

Describe = Callable[[LiveRequest, int, int, int], Sequence[Block]]
"""A function that takes (request, block_tokens, begin, end) and returns blocks [begin, end) of the
request, or an empty sequence if other processes cannot compute these blocks' hashes.
"""


@dataclass(slots=True, eq=False)
class _Chunk:
    blocks: Sequence[Block]
    group: int
    parent: bytes | None
    """Key of the chunk that this chunk depends on: the main group's chunk of the same or previous
    unit.
    """
    where: int = 0
    """Bit mask of the announced tiers, as last reported by the store."""


class Announcer:
    """Announces the chunks in ``store`` as blocks of their group's block size.

    The caller must have called ``store.watch``. With ``is_shared``, other engines can save to the
    store, and the store can become unavailable, so a removed chunk can reappear without a save by
    this engine.
    """

    def __init__(
        self,
        store: Session,
        shape: CacheShape,
        describe: Describe,
        *,
        is_shared: bool = False,
        max_chunks: int = MAX_CHUNKS,
    ) -> None:
        self._store, self._describe, self._max_chunks = store, describe, max_chunks
        self._is_shared = is_shared
        self._groups, self._main = shape.groups, shape.main
        self._numbers = list(map(shape.number_of, range(len(shape.groups))))
        self._states = [nth for nth, group in enumerate(shape.groups) if group.kind == "state"]
        others = [nth for nth, group in enumerate(shape.groups) if group.kind != "state"]
        self._others = sorted(others, key=lambda nth: nth != shape.main)
        """All groups except state groups. The main group is first."""
        self._known: dict[bytes, _Chunk] = {}
        """Chunks by key. Parents precede children, because some routers drop blocks announced
        before their parent.
        """
        self._children: dict[bytes, int] = {}
        """Number of known chunks that depend on each parent, by the parent's key."""
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        """Known keys that have no children or were recorded again as the end of a prefix. The least
        recent key is first.
        """
        self._to_look_up: OrderedDict[bytes, None] = OrderedDict()
        """Known keys from recent requests, in order and without duplicates."""
        self._round: list[bytes] = []
        """Keys that a full comparison still has to look up, in reverse order. Some keys may no
        longer be known. These keys are looked up before ``_to_look_up``.
        """
        self._must_look_up_all = self._is_over = False
        self._log = EventLog()

    # -- requests -------------------------------------------------------------------------------

    def note(self, live: LiveRequest, chain: KeyChain, units: range) -> None:
        """Record that the chunks of ``units`` belong to ``live``. Their saves may still fail."""
        self._note(live, chain, self._others, units, units.start)

    def note_states(self, live: LiveRequest, chain: KeyChain, num_units: int) -> None:
        """Record the states after the first ``num_units`` units of ``live``, if they have keys."""
        if 0 < num_units <= chain.num_blocks:
            self._note(live, chain, self._states, range(num_units - 1, num_units), num_units)

    def _note(
        self,
        live: LiveRequest,
        chain: KeyChain,
        groups: Sequence[int],
        units: range,
        num_above: int,
    ) -> None:
        """Record chunks. The parent of the first chunk is the main group's chunk for unit
        ``num_above - 1``.
        """
        if self._is_over:
            return
        found = self._find_chunks(live, chain, groups, units, num_above)
        # Only the line above can fail, so an error leaves all records unchanged.
        for key, chunk in found.items():
            if key not in self._known:
                self._known[key] = chunk
                if chunk.parent is not None:
                    self._children[chunk.parent] = self._children.get(chunk.parent, 0) + 1
        self._to_look_up.update(dict.fromkeys(found))
        self._note_recent(found)
        while len(self._known) > self._max_chunks:
            key, _ = self._recent.popitem(last=False)
            if key not in self._children:  # otherwise, the key is removed after its last child
                self._move(self._forget(key), 0)

    def _find_chunks(
        self,
        live: LiveRequest,
        chain: KeyChain,
        groups: Sequence[int],
        units: range,
        num_above: int,
    ) -> dict[bytes, _Chunk]:
        """Return the chunks of ``units``, up to but not including the first chunk whose blocks
        cannot be described.
        """
        found: dict[bytes, _Chunk] = {}
        above = chain.key(num_above - 1, self._numbers[self._main]) if num_above else None
        for unit, nth in product(units, groups):
            key = chain.key(unit, self._numbers[nth])
            if (chunk := self._known.get(key)) is None:
                group = self._groups[nth]
                end = (unit + 1) * group.blocks_per_unit
                begin = end - group.kept_blocks
                if not (blocks := self._describe(live, group.block_tokens, begin, end)):
                    break
                chunk = _Chunk(blocks, nth, above)
            found[key] = chunk
            if nth == self._main:
                above = key
        return found

    def _note_recent(self, found: dict[bytes, _Chunk]) -> None:
        """Mark the chunks in ``found`` as the most recent. A prefix's last chunk is removed first,
        because other prefixes can share the earlier chunks.
        """
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
        self._to_look_up.pop(key, None)
        if (parent := chunk.parent) is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._known and parent not in self._recent:
                    self._recent[parent] = None
                    self._recent.move_to_end(parent, last=False)
        return chunk

    # -- events ---------------------------------------------------------------------------------

    def take(self) -> list[Event]:
        """Look up at most `SLICE` chunks, and return the events since the last call, in order."""
        if self._is_over:
            return self._log.take()
        if self._must_look_up_all and not self._round:
            self._must_look_up_all, self._round = False, self._all()
        keys = self._round[: -SLICE - 1 : -1]
        del self._round[-SLICE:]
        num_recent = min(SLICE - len(keys), len(self._to_look_up))
        keys += [self._to_look_up.popitem(last=False)[0] for _ in range(num_recent)]
        rows, lost = self._store.changes(keys, SLICE)
        self._must_look_up_all |= lost
        for key, where in rows:
            if (chunk := self._known.get(key)) is None:
                continue
            self._move(chunk, where)
            if not (where or self._is_shared):
                self._forget(key)
        return self._log.take()

    def repeat(self) -> None:
        """Reannounce all blocks, because subscribers have dropped their records."""
        self._log.restart()
        for chunk in self._known.values():
            chunk.where = 0
        self._must_look_up_all, self._round = False, self._all()

    def withdraw(self, lost: Sequence[Event] = ()) -> None:
        """Announce the removal of every block and stop. This is called when kvloft stops offering
        tokens.

        ``lost`` holds events that were taken but possibly never published.
        """
        if not self._is_over:
            self._log.add_again(lost)
        self._is_over = True
        self._log.leave_all()
        self._known.clear()
        self._children.clear()
        self._recent.clear()
        self._to_look_up.clear()
        self._round.clear()

    def _all(self) -> list[bytes]:
        """Return all known keys in reverse order.

        Returns a list, because building a dict with 2^18 keys would delay a step by 0.1 s.
        """
        return list(reversed(self._known))

    def _move(self, chunk: _Chunk, where: int) -> None:
        """Log the events for ``chunk``, which is now in the tiers given by ``where``."""
        for tier in TIERS:
            if (chunk.where ^ where) & tier:
                change = self._log.enter if where & tier else self._log.leave
                change(tier, chunk.group, chunk.blocks)
        chunk.where = where
