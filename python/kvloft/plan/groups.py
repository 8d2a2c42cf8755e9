"""Several KV cache groups as one store: the same questions as of one group, answered for all of them together.

Chunks of full-attention groups hang on each other as the prefix goes on; those of windows, local chunks and states are
attached to one boundary each and come and go on their own. A hit is the deepest boundary at which every group has what it needs.
Without a group of full attention every chunk is attached, and a hit's beginning may be long gone. It must not know vLLM or bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloft.seam.batch import GroupBatches, Tables
from kvloft.seam.ids import BlockId
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.seam.store import KeyChain, ReadLease, Session

Cut = tuple[int, int]
"""Blocks of a group that a chunk has, and how many of them, the last ones, are kept."""
SaveRow = tuple[KeyChain, Sequence[int], int, int, int, int, Any, int]
"""As `Session.reserve_all` takes it; with several groups the table is a `Tables`."""
LOOK_BACK, LOOK_FURTHER = 64, 4
"""Where something is missing, so many chunks more are asked about, and so many times more the next time. Over a server each
question is a round trip."""


class GroupedChunks:
    """What is asked of a `Session` about chunks, of requests whose chunks have a part in each group of ``shape``.

    Tables are `Tables`, batches `GroupBatches`. The first full group has the chain's own keys.
    """

    is_dense: bool
    """Some group keeps all blocks of a prefix: what is not there ends every hit that goes further."""

    def __init__(self, session: Session, shape: CacheShape) -> None:
        self._session, self._groups = session, shape.groups
        self.num_groups = len(shape.groups)
        groups = list(enumerate(shape.groups))
        self._full = [(nth, shape.number_of(nth)) for nth, group in groups if group.kind == "full"]
        self.is_dense = bool(self._full)
        self._attached = [(nth, group) for nth, group in groups if group.kind != "full"]

    # -- what is there --------------------------------------------------------------------------------------------

    def lookup(self, chain: KeyChain) -> tuple[int, int]:
        """Chunks that every full group has, in host and in any tier: no hit is deeper. Without one, all that have keys."""
        found = [self._session.lookup(chain, number) for _, number in self._full] or [(chain.num_blocks, chain.num_blocks)]
        return min(host for host, _ in found), min(stored for _, stored in found)

    def deepest(self, chain: KeyChain, found: tuple[int, int], most: int) -> tuple[int, int]:
        """The deepest boundaries of at most ``most`` chunks at which all groups have what they need, in host and in any tier.

        ``found``: what `lookup` said.
        """
        columns = [_Column(nth + 1, group) for nth, group in self._attached]
        stored = self._deepest(chain, columns, min(found[1], most), 1)
        return self._deepest(chain, columns, min(found[0], stored), 0), stored

    def _deepest(self, chain: KeyChain, columns: Sequence[_Column], boundary: int, tier: int) -> int:
        further = 0
        while boundary:
            unknown = [column for column in columns if not column.has(boundary)]
            if unknown:
                rows = [column.ask(boundary, further) for column in unknown]
                for column, answer in zip(unknown, self._session.lookup_attached(chain, rows), strict=True):
                    column.take_in(*answer)
                further = further * LOOK_FURTHER or LOOK_BACK
            nearest = min((column.nearest(boundary, tier) for column in columns), default=boundary)
            if nearest == boundary:
                break
            boundary = nearest
        return boundary

    # -- loads ----------------------------------------------------------------------------------------------------

    def acquire(self, chain: KeyChain, boundary: int) -> GroupLease:
        """Pin what a prefix of ``boundary`` chunks needs of every group, and read what is not in host."""
        rows = [(nth + 1, group.first_chunk(boundary), boundary) for nth, group in self._attached]
        lease = self._session.acquire_groups(chain, boundary, [number for _, number in self._full], rows)
        parts = [(nth, 0) for nth, _ in self._full] + [(number - 1, first) for number, first, _ in rows]
        return GroupLease(boundary, parts, lease, self._groups, is_dense=self.is_dense)

    # -- saves ----------------------------------------------------------------------------------------------------

    def reserve_all(self, rows: Sequence[SaveRow]) -> tuple[list[GroupBatches | None], list[int]]:
        """As `Session.reserve_all`, with `Tables`, in every group but states; what could not be had counts for full ones, if any.

        There are no tails. A chunk of which a group has given up a block already (it left the window) is left out.
        """
        found = [(nth, number, False) for nth, number in self._full]
        found += [(nth, nth + 1, True) for nth, group in self._attached if group.kind != "state"]
        groups = [(*row, _cut(self._groups[row[0]])) for row in found]
        asked = [(chain, ids, num_tokens, start, stop, table.tables) for chain, ids, num_tokens, start, stop, _, table, _ in rows]
        reserved = self._session.reserve_groups(asked, groups)
        return [GroupBatches(tuple(batches)) if batches else None for batches, _ in reserved], [dropped for _, dropped in reserved]

    def reserve_states(self, rows: Sequence[tuple[KeyChain, int, int, BlockId]]) -> list[GroupBatches | None]:
        """Reserve frames for states, each (chain, group, boundary, block that will hold it at this step's end)."""
        reserved = self._session.reserve_attached([(chain, nth + 1, boundary - 1, block) for chain, nth, boundary, block in rows])
        return [GroupBatches(((row[1], chunks),)) if chunks else None for row, chunks in zip(rows, reserved, strict=True)]


def _cut(group: GroupShape) -> Cut:
    return group.blocks_per_chunk, group.kept_blocks


class _Column:
    """What is there of the chunks of a group that keeps each by itself: a byte a chunk, in host and in any tier."""

    def __init__(self, number: int, group: GroupShape) -> None:
        self._number, self._group = number, group
        self._start = self._asked = 0
        self._tiers: tuple[bytes, bytes] = (b"", b"")

    def has(self, boundary: int) -> bool:
        """Whether all that ``boundary`` needs was asked about."""
        first = self._group.first_chunk(boundary)
        return first == boundary or self._start <= first < boundary <= self._start + len(self._tiers[0])

    def ask(self, boundary: int, further: int) -> tuple[int, int, int]:
        """The question about it, and as many chunks ``further`` back: for `Session.lookup_attached`."""
        self._asked = max(0, self._group.first_chunk(boundary) - further)
        is_next = self._start < boundary <= self._start + len(self._tiers[0])
        return self._number, self._asked, self._start if is_next else boundary

    def take_in(self, host: bytes, stored: bytes) -> None:
        is_next = self._asked + len(host) == self._start
        self._tiers = (host + self._tiers[0], stored + self._tiers[1]) if is_next else (host, stored)
        self._start = self._asked

    def nearest(self, boundary: int, tier: int) -> int:
        """``boundary`` if all that it needs is there; else a smaller one, and none between them can do."""
        there, start, first = self._tiers[tier], self._start, self._group.first_chunk(boundary)
        missing = there.rfind(0, first - start, boundary - start) if first < boundary else -1
        if missing < 0:
            return boundary
        if self._group.kind == "local":  # a boundary between two local chunks needs neither
            return start + missing
        return start + 1 + there.rfind(1, 0, missing)


class GroupLease:
    """A `ReadLease` on what a prefix of ``boundary`` chunks needs of every group: all of it, or nothing.

    ``parts``: which group, and the first chunk that it needs, in the lease's order. Unless it ``is_dense``, none needs all.
    """

    def __init__(
        self,
        boundary: int,
        parts: Sequence[tuple[int, int]],
        lease: ReadLease,
        groups: Sequence[GroupShape],
        *,
        is_dense: bool = True,
    ) -> None:
        self._boundary, self._parts, self._lease, self._is_dense = boundary, parts, lease, is_dense
        self._groups = groups
        self._num_chunks = sum(boundary - first for _, first in parts)

    def poll(self) -> tuple[int, int]:
        """(``boundary`` once all is in host, chunks that are still waited for); (0, 0) if something will not come."""
        ready, pending = self._lease.poll()
        if ready + pending < self._num_chunks:
            return 0, 0
        return (0, self._boundary) if pending else (self._boundary, 0)

    def batch(self, table: Tables, begin: int, end: int) -> tuple[GroupBatches, dict[str, int]]:
        """What chunks ``[begin, end)`` of the tables need, and chunks by tier; nothing unless all is there."""
        if end != self._boundary:
            return GroupBatches(), {}
        rows = [
            (table.tables[nth], first, end, self._first_loaded(nth, first, begin), _cut(self._groups[nth]))
            for nth, first in self._parts
        ]
        found = self._lease.batches(rows)
        if found is None:
            return GroupBatches(), {}
        batches, by_tier = found
        if not self._is_dense:  # chunks before all windows come from nowhere: they count as the hit's that is there for a window
            tier = "disk" if "disk" in by_tier else "host"
            by_tier[tier] = by_tier.get(tier, 0) + end - begin - sum(by_tier.values())
        return GroupBatches(tuple((nth, chunks) for (nth, _), chunks in zip(self._parts, batches, strict=True) if chunks)), by_tier

    def _first_loaded(self, nth: int, first: int, begin: int) -> int:
        """The first block of a group's table that is loaded: vLLM has what comes before chunk ``begin``, and has null blocks before
        what the group needs, which may begin in the midst of its ``first`` chunk.
        """
        group = self._groups[nth]
        return max(first * group.blocks_per_chunk, group.first_block(self._boundary), begin * group.blocks_per_chunk)

    def release(self) -> None:
        self._lease.release()
