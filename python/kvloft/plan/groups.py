"""Several KV cache groups as one store: the same questions as of one group, answered for all of them together.

Chunks of full-attention groups hang on each other as the prefix goes on; those of windows, local chunks and states are
attached to one boundary each and come and go on their own. A hit is the deepest boundary at which every group has what it needs.
It must not know vLLM or bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvloft.seam.batch import ChunkBatch, GroupBatches, Tables
from kvloft.seam.ids import BlockId
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import KeyChain, ReadLease, Session

SaveRow = tuple[KeyChain, Sequence[int], int, int, int, int, Any, bytes | None]
"""As `Session.reserve_all` takes it; with several groups the table is a `Tables`."""
NULL_BLOCK = 0
"""vLLM's: what its tables have where a group needs no block."""


class GroupedChunks:
    """What is asked of a `Session` about chunks, of requests whose chunks have a part in each group of ``shape``.

    Tables are `Tables`, batches `GroupBatches`. The first full group has the chain's own keys.
    """

    def __init__(self, session: Session, shape: CacheShape) -> None:
        self._session = session
        groups = list(enumerate(shape.groups))
        self._full = [(nth, None if nth == shape.main else nth + 1) for nth, group in groups if group.kind == "full"]
        self._attached = [(nth, group) for nth, group in groups if group.kind != "full"]

    # -- what is there --------------------------------------------------------------------------------------------

    def lookup(self, chain: KeyChain) -> tuple[int, int]:
        """Blocks that every full group has, in host and in any tier: no hit is deeper."""
        found = [self._session.lookup(self._of(chain, number)) for _, number in self._full]
        return min(host for host, _ in found), min(stored for _, stored in found)

    def deepest(self, chain: KeyChain, most: int) -> tuple[int, int]:
        """The deepest boundaries of at most ``most`` blocks at which all groups have what they need, in host and in any tier."""
        host, stored = self.lookup(chain)
        return self._deepest(chain, min(host, most), 0), self._deepest(chain, min(stored, most), 1)

    def _deepest(self, chain: KeyChain, boundary: int, tier: int) -> int:
        groups, at = self._attached, 0
        while boundary and at < len(groups):
            number, group = groups[at]
            missing = self._last_missing(chain, number, group.first_chunk(boundary), boundary, tier)
            if missing is None:
                at += 1
            else:  # no boundary behind the missing chunk and up to this one does without it
                boundary, at = missing, 0
        return boundary

    def _last_missing(self, chain: KeyChain, group: int, start: int, stop: int, tier: int) -> int | None:
        has = self._session.lookup
        return next((block for block in range(stop - 1, start - 1, -1) if not has(chain.attached(block, group + 1))[tier]), None)

    @staticmethod
    def _of(chain: KeyChain, number: int | None, num_blocks: int | None = None) -> KeyChain:
        if number is None and num_blocks is None:
            return chain
        return chain.prefix(chain.num_blocks if num_blocks is None else num_blocks, number)

    # -- loads ----------------------------------------------------------------------------------------------------

    def acquire(self, chain: KeyChain, most: int) -> GroupLease:
        """Pin what the deepest stored boundary of at most ``most`` blocks needs of every group, and read what is not in host."""
        _, boundary = self.deepest(chain, most)
        parts: list[_Part] = []
        if boundary:
            for nth, number in self._full:
                parts.append(_Part(nth, None, boundary, self._session.acquire(self._of(chain, number, boundary))))
            for nth, group in self._attached:
                needed = range(group.first_chunk(boundary), boundary)
                parts += [_Part(nth, block, 1, self._session.acquire(chain.attached(block, nth + 1))) for block in needed]
        return GroupLease(boundary, parts)

    # -- saves ----------------------------------------------------------------------------------------------------

    def reserve(self, chain: KeyChain, start: int, stop: int, table: Tables) -> tuple[GroupBatches, int]:
        """Reserve what is missing of chunks [start, stop) in every group but states; what could not be had counts for full ones.

        A chunk whose block a group has given up already (it left the window) is left out.
        """
        saving = _Saving(self._session)
        try:
            dropped = 0
            for nth, number in self._full:
                dropped = max(dropped, saving.add(nth, self._of(chain, number), start, stop, table.tables[nth]))
            for nth, group in self._attached:
                if group.kind != "state":
                    saving.note(nth, self._session.reserve_attached(chain, nth + 1, start, stop, table.tables[nth]))
            return saving.batches(), dropped
        except BaseException:
            saving.give_back()
            raise

    def reserve_all(self, rows: Sequence[SaveRow]) -> tuple[list[GroupBatches | None], list[int]]:
        """As `Session.reserve_all`, with `Tables`; there are no tails."""
        reserved: list[GroupBatches | None] = []
        num_dropped: list[int] = []
        try:
            for chain, token_ids, num_tokens, start, stop, _, table, _ in rows:
                if (known := chain.num_tokens) < num_tokens:
                    chain.append_tokens(token_ids, known, num_tokens)
                chunks, dropped = self.reserve(chain, start, stop, table)
                reserved.append(chunks or None)
                num_dropped.append(dropped)
        except BaseException:
            self._session.abort([ticket for chunks in reserved if chunks for ticket in chunks.tickets()])
            raise
        return reserved, num_dropped

    def reserve_state(self, chain: KeyChain, group: int, boundary: int, block: BlockId) -> GroupBatches:
        """Reserve a frame for the state after ``boundary`` blocks, which ``block`` will hold at this step's end."""
        chunks, _ = self._session.reserve(chain.attached(boundary - 1, group + 1), 0, 1, 0, [block])
        return GroupBatches(((group, chunks),)) if chunks else GroupBatches()


class _Part(NamedTuple):
    """A lease on the first ``num_blocks`` blocks of a full group, or on block ``attached`` of another."""

    group: int
    attached: int | None
    num_blocks: int
    lease: ReadLease

    def batch(self, table: Sequence[BlockId], begin: int, end: int) -> tuple[ChunkBatch, dict[str, int]] | None:
        """Its chunks for blocks ``[begin, end)`` of the group's table; None if one is not there, or has no block to go to."""
        if self.attached is None:
            chunks, by_tier = self.lease.batch(table, begin, end)
            return (chunks, by_tier) if len(chunks) == end - begin else None
        own = list(table[self.attached : self.attached + 1])
        if not own or own[0] == NULL_BLOCK:
            return None
        chunks, _ = self.lease.batch(own, 0, 1)
        return (chunks, {}) if chunks else None


class GroupLease:
    """A `ReadLease` on what a prefix of ``boundary`` blocks needs of every group: all of it, or nothing."""

    def __init__(self, boundary: int, parts: list[_Part]) -> None:
        self._boundary, self._parts = boundary, parts

    def poll(self) -> tuple[int, int]:
        """(``boundary`` once all is in host, blocks that are still waited for); (0, 0) if something will not come."""
        is_coming = False
        for part in self._parts:
            ready, pending = part.lease.poll()
            if ready + pending < part.num_blocks:
                return 0, 0
            is_coming |= ready < part.num_blocks
        return (0, self._boundary) if is_coming else (self._boundary, 0)

    def batch(self, table: Tables, begin: int, end: int) -> tuple[GroupBatches, dict[str, int]]:
        """Chunks for what blocks ``[begin, end)`` of the tables need, and blocks by tier; nothing unless all is there."""
        found: dict[int, list[ChunkBatch]] = {}
        by_tier: dict[str, int] = {}
        for part in self._parts:
            if part.attached is not None and part.attached < begin:
                continue  # vLLM has it
            chunks = part.batch(table.tables[part.group], begin, end)
            if chunks is None or end != self._boundary:
                return GroupBatches(), {}
            found.setdefault(part.group, []).append(chunks[0])
            by_tier = by_tier or chunks[1]
        return GroupBatches.of(found), by_tier

    def release(self) -> None:
        for part in self._parts:
            part.lease.release()


class _Saving:
    """Reservations of one request in this step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._found: dict[int, list[ChunkBatch]] = {}

    def add(self, group: int, chain: KeyChain, start: int, stop: int, table: Sequence[BlockId]) -> int:
        """Returns how many chunks could not be had."""
        chunks, dropped = self._session.reserve(chain, start, stop, 0, table)
        self.note(group, chunks)
        return dropped

    def note(self, group: int, chunks: ChunkBatch) -> None:
        if chunks:
            self._found.setdefault(group, []).append(chunks)

    def batches(self) -> GroupBatches:
        return GroupBatches.of(self._found)

    def give_back(self) -> None:
        self._session.abort(self.batches().tickets())
