"""Converts chunks to real batches and session results to chunks, for tests that examine individual
chunks.
"""

from collections.abc import Iterable
from typing import Any

from chunk_batch import Chunks

from kvloft import _core


def batch_of(chunks: Iterable[Any], group: int = 0) -> _core.ChunkBatch:
    parts, tickets = Chunks(chunks).columns()
    return _core.ChunkBatch([(group, *columns) for _, *columns in parts], tickets)  # type: ignore[misc]


def batch_of_groups(groups: Iterable[tuple[int, Iterable[Any]]]) -> _core.ChunkBatch:
    """Return a batch with the chunks of each (group, chunks) pair."""
    each = [batch_of(chunks, group).columns() for group, chunks in groups]
    return _core.ChunkBatch(
        [part for parts, _ in each for part in parts], b"".join(tickets for _, tickets in each)
    )


def reserve(
    store: _core.Session, chain: _core.KeyChain, start: int, stop: int
) -> tuple[list[tuple[int, int, bytes, int]], int]:
    """Return [(ticket, frame, key, unit)] and the number of units without a frame."""
    table = range(1, chain.num_blocks + 1)  # the id of a block is its position in the prefix
    (chunks,), (num_dropped,) = store.reserve([(chain, (), 0, start, stop, [table])])
    return [(c.ticket, c.frame, c.key, c.blocks[0] - 1) for c in chunks or ()], num_dropped


def frames(lease: _core.ReadLease) -> list[tuple[int, bytes, int]]:
    """Return (frame, key, unit) of the ready chunks."""
    num_units, _ = lease.poll()
    chunks, _ = lease.batch([range(1, num_units + 1)], 0, num_units)
    return [(c.frame, c.key, c.blocks[0] - 1) for c in chunks]


def tiers(lease: _core.ReadLease) -> dict[str, int]:
    """Return the number of ready units by tier."""
    num_units, _ = lease.poll()
    return lease.batch([range(1, num_units + 1)], 0, num_units)[1]
