"""Real batches out of single chunks, and single chunks out of a real session, for tests that look at each."""

from collections.abc import Iterable
from typing import Any

from chunk_batch import Chunks

from kvloft import _core


def batch_of(chunks: Iterable[Any]) -> _core.ChunkBatch:
    return _core.ChunkBatch(*Chunks(chunks).columns())


def reserve(
    store: _core.Session, chain: _core.KeyChain, start: int, stop: int, tail_blocks: int = 0
) -> tuple[list[tuple[int, int, bytes, int, int]], int]:
    """[(ticket, frame, key, first block, number of blocks)], and how many chunks could not be had."""
    table = range(1, chain.num_blocks + 1)  # so that a block's id says where in the prefix it is
    chunks, num_dropped = store.reserve(chain, start, stop, tail_blocks, table)
    return [(c.ticket, c.frame, c.key, c.blocks[0] - 1, c.num_blocks) for c in chunks], num_dropped


def frames(lease: _core.ReadLease) -> list[tuple[int, bytes, int, int]]:
    """(frame, key, first block, number of blocks) of what is ready."""
    num_blocks, _ = lease.poll()
    chunks, _ = lease.batch(range(1, num_blocks + 1), 0, num_blocks)
    return [(c.frame, c.key, c.blocks[0] - 1, c.num_blocks) for c in chunks]


def tiers(lease: _core.ReadLease) -> dict[str, int]:
    """Ready blocks by the tier that they came from."""
    num_blocks, _ = lease.poll()
    return lease.batch(range(num_blocks), 0, num_blocks)[1]
