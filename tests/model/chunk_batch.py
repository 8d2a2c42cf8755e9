"""Simple models of `_core.ChunkBatch` and of the saves that `_core.Session` has in flight. They
handle one chunk at a time.

This module must not import kvloft.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

NULL_BLOCK, NOT_WANTED = 0, -1


class Chunk(NamedTuple):
    """Mirrors `kvloft.seam.batch.ChunkCopy`."""

    frame: int
    key: bytes
    num_blocks: int
    first_block: int
    blocks: tuple[int, ...]
    ticket: int = -1

    def payload(self) -> list[int]:
        """Return the block ids of the payload, with one entry per block of the frame."""
        behind = self.num_blocks - self.first_block - len(self.blocks)
        return [NOT_WANTED] * self.first_block + list(self.blocks) + [NOT_WANTED] * behind


class Chunks(tuple[Chunk, ...]):
    """Mirrors `_core.ChunkBatch`."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Chunks(found) if isinstance(index, slice) else found

    def columns(self) -> tuple[list[tuple[int, bytes, bytes, bytes]], bytes]:
        blocks = [block for chunk in self for block in Chunk(*chunk).payload()]
        tickets = self.tickets()
        n = len(self)
        part = (
            0,
            struct.pack(f"<{n}I", *(chunk.frame for chunk in self)),
            b"".join(chunk.key for chunk in self),
            struct.pack(f"<{len(blocks)}i", *blocks),
        )
        return [part] * bool(self), struct.pack(f"<{len(tickets)}Q", *tickets)

    def by_group(self) -> list[tuple[int, "Chunks"]]:
        return [(0, self)] * bool(self)

    def tickets(self) -> list[int]:
        return [chunk.ticket for chunk in self if chunk.ticket != -1]

    def block_ids(self) -> list[int]:
        return [block for chunk in self for block in chunk.blocks]

    def by_frame(self) -> "Chunks":
        return Chunks(sorted(self, key=lambda chunk: chunk.frame))


def chunks_to_load(
    leased: Iterable[tuple[int, bytes, str]], table: Sequence[int], begin: int, end: int
) -> tuple[Chunks, dict[str, int]]:
    """Return the chunks of units [begin, end), one block each, and the number of units by tier.

    ``leased`` contains (frame, key, tier) for each unit, starting at unit 0.
    """
    assert 0 <= begin <= end <= len(table), "the request has fewer blocks than promised"
    chunks: list[Chunk] = []
    by_tier: dict[str, int] = {}
    for unit, (frame, key, tier) in enumerate(leased):
        if begin <= unit < end:
            chunks.append(Chunk(frame, key, 1, 0, (table[unit],)))
            by_tier[tier] = by_tier.get(tier, 0) + 1
    return Chunks(chunks), by_tier


class InFlight:
    """Saves that at least one rank has not reported yet."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.left: dict[int, int] = {}
        self.failed: set[int] = set()
        self.blocks: dict[int, tuple[int, ...]] = {}

    def add(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.left[chunk.ticket] = self.num_ranks
            self.blocks[chunk.ticket] = chunk.blocks

    def settle(self, saved: Sequence[int], failed: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the committed tickets and the aborted tickets."""
        self.failed |= set(failed) & self.left.keys()
        committed: list[int] = []
        aborted: list[int] = []
        for ticket in [*saved, *failed]:
            if ticket not in self.left:
                continue
            self.left[ticket] -= 1
            if self.left[ticket]:
                continue
            (aborted if ticket in self.failed else committed).append(ticket)
            self.forget([ticket])
        return committed, aborted

    def forget(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            del self.left[ticket], self.blocks[ticket]
            self.failed.discard(ticket)

    def being_read(self, blocks: Iterable[int] | None) -> list[int]:
        read = {block for mine in self.blocks.values() for block in mine}
        return sorted(read) if blocks is None else [block for block in blocks if block in read]


class Session(ABC):
    """Base class of both store models: a session that can reserve rows, commit, abort, discard and
    clear.
    """

    in_flight: InFlight

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight.left)

    def reserve_one(
        self, chain: Any, start: int, stop: int, table: Sequence[int]
    ) -> tuple[Chunks, int]:
        rows, num_dropped = self.reserve_rows(chain, start, stop)
        chunks: list[Chunk] = []
        for ticket, frame, key, unit in rows:
            assert unit < len(table), "the save names blocks that the request does not have"
            if table[unit] == NULL_BLOCK:
                self.abort_tickets([ticket])
            else:
                chunks.append(Chunk(frame, key, 1, 0, (table[unit],), ticket))
        self.in_flight.add(chunks)
        return Chunks(chunks), num_dropped

    def reserve(self, rows: Sequence[Any]) -> tuple[list[Any], list[int]]:
        reserved: list[Any] = []
        dropped: list[int] = []
        for chain, token_ids, num_tokens, start, stop, (table,) in rows:
            if chain.num_tokens < num_tokens:
                chain.append_tokens(token_ids, chain.num_tokens, num_tokens)
            try:
                chunks, num_dropped = self.reserve_one(chain, start, stop, table)
            except BaseException:
                self.abort([ticket for chunks in reserved if chunks for ticket in chunks.tickets()])
                raise
            reserved.append(chunks or None)
            dropped.append(num_dropped)
        return reserved, dropped

    def settle(self, saved: Sequence[int], failed: Sequence[int] = ()) -> tuple[int, int]:
        committed, aborted = self.in_flight.settle(saved, failed)
        if aborted:
            self.abort_tickets(aborted)
        return (self.commit_tickets(committed) if committed else 0), len(aborted)

    def abort(self, tickets: Sequence[int] | None = None) -> None:
        tickets = list(self.in_flight.left) if tickets is None else tickets
        self.in_flight.forget(tickets)
        self.abort_tickets(tickets)

    def being_read(self, blocks: Sequence[int] | None = None) -> list[int]:
        return self.in_flight.being_read(blocks)

    def clear(self) -> None:
        self.in_flight.failed |= self.in_flight.left.keys()
        self.forget_everything()

    @abstractmethod
    def reserve_rows(
        self, chain: Any, start: int, stop: int
    ) -> tuple[list[tuple[int, int, bytes, int]], int]:
        """Return [(ticket, frame, key, unit)] and the number of units without a frame."""

    @abstractmethod
    def commit_tickets(self, tickets: Sequence[int]) -> int: ...

    @abstractmethod
    def abort_tickets(self, tickets: Sequence[int]) -> None: ...

    @abstractmethod
    def discard(self, keys: Sequence[bytes]) -> int: ...

    @abstractmethod
    def forget_everything(self) -> None: ...
