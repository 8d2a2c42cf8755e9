"""Events for blocks that enter or leave the store's tiers.

Routers use these events to send a prompt to an engine that holds the prompt's KV.
`kvloft.vllm.events` converts these events to vLLM's KV events.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

HOST, DISK = TIERS = (1, 2)
"""Tier bits in the result of `Session.changes`. Bit 4 means a pending save or read."""


class Block(NamedTuple):
    """One block of a prefix, identified by its hash in the engine."""

    hash: bytes
    parent: bytes | None
    token_ids: array[int]
    adapter: Any = None
    """The engine's additional hash inputs for the entire prefix."""
    extra: Any = None
    """The engine's additional hash inputs for this block only."""


class Stored(NamedTuple):
    """Blocks of one KV cache group that entered ``tier``. Each block is the parent of the next."""

    tier: int
    blocks: list[Block]
    group: int = 0


class Removed(NamedTuple):
    """Hashes of blocks of one KV cache group that left ``tier``."""

    tier: int
    hashes: list[bytes]
    group: int = 0


Event = Stored | Removed


class EventLog:
    """Adds an event when the first chunk that contains a block enters a tier, and when the last
    chunk that contains the block leaves that tier.
    """

    def __init__(self) -> None:
        self._holders = {tier: Counter[tuple[int, bytes]]() for tier in TIERS}
        """Number of chunks that contain a block, per tier, group and block hash."""
        self._events: list[Event] = []

    def enter(self, tier: int, group: int, blocks: Sequence[Block]) -> None:
        """Record that a chunk containing ``blocks`` entered ``tier``."""
        holders = self._holders[tier]
        for block in blocks:
            holders[group, block.hash] += 1
            if holders[group, block.hash] == 1:
                self._add_stored(tier, group, block)

    def leave(self, tier: int, group: int, blocks: Sequence[Block]) -> None:
        holders = self._holders[tier]
        for block in blocks:
            holders[group, block.hash] -= 1
            if not holders[group, block.hash]:
                del holders[group, block.hash]
                self._add_removed(tier, group, block.hash)

    def leave_all(self) -> None:
        """Add removal events for all blocks in all tiers."""
        for tier, holders in self._holders.items():
            for group, block_hash in holders:
                self._add_removed(tier, group, block_hash)
            holders.clear()

    def _add_stored(self, tier: int, group: int, block: Block) -> None:
        before = (tier, group, block.parent)
        match self._events[-1:]:
            case [Stored(of, [*_, last] as run, whose)] if (of, whose, last.hash) == before:
                run.append(block)
            case _:
                self._events.append(Stored(tier, [block], group))

    def _add_removed(self, tier: int, group: int, block_hash: bytes) -> None:
        match self._events[-1:]:
            case [Removed(of, hashes, whose)] if (of, whose) == (tier, group):
                hashes.append(block_hash)
            case _:
                self._events.append(Removed(tier, [block_hash], group))

    def add_again(self, events: Sequence[Event]) -> None:
        """Add the removals in ``events`` again, because they may not have been published."""
        self._events += [event for event in events if isinstance(event, Removed)]

    def restart(self) -> None:
        self._events.clear()
        for holders in self._holders.values():
            holders.clear()

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events
