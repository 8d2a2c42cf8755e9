"""Announces which blocks the store has, as KV events.

The store reports where keys are now (`Session.changes`). The announcer remembers what it has
announced, and the blocks of each chunk in the engine's own hashes; an event is the difference.
Missed changes are therefore corrected by the next report. Chunks of different prefixes can share
blocks: a block is stored once, and removed with the last chunk that contains it.
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
"""Changed keys that wait in the store (2 MiB). With more, all chunks are looked up again."""
MAX_CHUNKS = 1 << 18
"""Chunks that are remembered: some 0.7 KiB each, 0.5 KiB for each further block, and 4 bytes per
token. Older ones are no longer announced.
"""
SLICE = 2048
"""Chunks looked up per step."""

Describe = Callable[[LiveRequest, int, int, int], Sequence[Block]]
"""(request, block_tokens, begin, end): its blocks [begin, end), if others know their hashes."""


@dataclass(slots=True, eq=False)
class _Chunk:
    blocks: Sequence[Block]
    group: int
    parent: bytes | None
    """The chunk that this one needs: the one before, or the main group's of this unit."""
    where: int = 0
    """Tiers that the store reported last, as announced."""


class Announcer:
    """The announced chunks of ``store``, whose changes must be watched. Chunks are announced as
    blocks of their group's size.

    ``is_shared``: other engines save to the store, or it can be unavailable, so a chunk that left
    can return without a request.
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
        """Groups whose chunks hold tokens, the main one first."""
        self._known: dict[bytes, _Chunk] = {}
        """In the order of requests: some routers drop blocks announced before their parent."""
        self._children: dict[bytes, int] = {}
        """By parent: the number of known chunks that need it."""
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        """Known keys without children, and others requested after theirs; the oldest first."""
        self._to_look_up: OrderedDict[bytes, None] = OrderedDict()
        """Known keys of recent requests, each once, in their order."""
        self._round: list[bytes] = []
        """Keys to look up in a full comparison, before the recent ones; the next one is last. Some
        may have been removed by now.
        """
        self._must_look_up_all = self._is_over = False
        self._log = EventLog()

    # -- requests -------------------------------------------------------------------------------

    def note(self, live: LiveRequest, chain: KeyChain, units: range) -> None:
        """``live`` has the chunks of ``units``: they are in the store, or may be saved to it."""
        self._note(live, chain, self._others, units, units.start)

    def note_states(self, live: LiveRequest, chain: KeyChain, num_units: int) -> None:
        """``live`` has the states after its first ``num_units`` units, if they have keys."""
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
        """Note chunks whose first parent is the main group's last of ``num_above`` units."""
        if self._is_over:
            return
        found = self._find_chunks(live, chain, groups, units, num_above)
        # Nothing from here on can fail: an error leaves all records as they were.
        for key, chunk in found.items():
            if key not in self._known:
                self._known[key] = chunk
                if chunk.parent is not None:
                    self._children[chunk.parent] = self._children.get(chunk.parent, 0) + 1
        self._to_look_up.update(dict.fromkeys(found))
        self._note_recent(found)
        while len(self._known) > self._max_chunks:
            key, _ = self._recent.popitem(last=False)
            if key not in self._children:  # else it returns to the front after its last child
                self._move(self._forget(key), 0)

    def _find_chunks(
        self,
        live: LiveRequest,
        chain: KeyChain,
        groups: Sequence[int],
        units: range,
        num_above: int,
    ) -> dict[bytes, _Chunk]:
        """Return the chunks of ``units``, up to the first that other processes cannot use."""
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
        """Make chunks the most recent ones. A prefix loses its end first, however many steps added
        it, because other prefixes can begin like it.
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
        """Return the events since the last call, in order. Looks up at most `SLICE` chunks."""
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
        """Announce all blocks again: subscribers have dropped what they knew."""
        self._log.restart()
        for chunk in self._known.values():
            chunk.where = 0
        self._must_look_up_all, self._round = False, self._all()

    def withdraw(self, lost: Sequence[Event] = ()) -> None:
        """Announce that every block is gone, and nothing afterwards: the cache offers nothing from
        now on.

        ``lost``: events that were taken and may not have been published.
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
        """Return all known keys, as a list: a dict of 2^18 keys would delay a step by 0.1 s."""
        return list(reversed(self._known))

    def _move(self, chunk: _Chunk, where: int) -> None:
        """Log that ``chunk`` is in the tiers ``where`` now."""
        for tier in TIERS:
            if (chunk.where ^ where) & tier:
                change = self._log.enter if where & tier else self._log.leave
                change(tier, chunk.group, chunk.blocks)
        chunk.where = where
