"""Load planning: which frames go to which blocks once vLLM took an offer."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from kvloft.plan.copies import MANY, collector_at_rest
from kvloft.plan.tracker import Tracker
from kvloft.seam.batch import ChunkCopy, LeasedChunks
from kvloft.seam.ids import BlockId, ChunkKey, ReqId
from kvloft.seam.plan import LoadPlan
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import ReadLease

_Leased = Sequence[tuple[int, bytes, int, int, str]]
"""As from `ReadLease.frames`: frame, key, first block, number of blocks, tier."""

_FIRST_BLOCK, _NUM_BLOCKS, _TIER = itemgetter(2), itemgetter(3), itemgetter(4)


def plan_load(
    tracker: Tracker, shape: CacheShape, num_tokens: int, load_id: int
) -> tuple[LoadPlan, ReadLease | None, dict[str, int]]:
    """Turn the standing offer into copies for blocks [local, local + num_tokens).

    Returns the plan, the lease that must outlive it, and tokens by tier. What the lease no longer covers is ``lost``.
    """
    block_tokens = shape.full.block_tokens
    begin = tracker.local_tokens // block_tokens
    end = (tracker.local_tokens + num_tokens) // block_tokens
    lease, tracker.lease = tracker.lease, None
    if end - begin < MANY:
        copies, by_tier, covered = _copies(tracker.blocks, lease.frames() if lease is not None else [], begin, end)
    else:
        with collector_at_rest():
            copies, by_tier, covered = _copies(tracker.blocks, lease.frames() if lease is not None else [], begin, end)
    by_tier = {tier: num_blocks * block_tokens for tier, num_blocks in by_tier.items()}
    lost: tuple[BlockId, ...] = tuple(tracker.blocks[covered:end])
    return LoadPlan(ReqId(tracker.live.req_id), load_id, copies, lost), lease, by_tier


def _copies(table: Sequence[BlockId], leased: _Leased, begin: int, end: int) -> tuple[Sequence[ChunkCopy], dict[str, int], int]:
    """Copies to blocks [begin, end) of the table from the frames of a prefix; blocks by tier; and the block they end before."""
    if not leased:
        return (), {}, begin
    nums = list(map(_NUM_BLOCKS, leased))
    if nums.count(1) < len(nums):
        return _copies_of_longer(table, leased, begin, end)
    first, last = leased[0][2], leased[-1][2]
    if first < begin or last >= end:
        # The frames of a prefix come in its order.
        inside = leased[bisect_left(leased, begin, key=_FIRST_BLOCK) : bisect_left(leased, end, key=_FIRST_BLOCK)]
        return _copies(table, inside, begin, end)
    if last - first + 1 != len(leased):
        return _copies_of_longer(table, leased, begin, end)
    tiers = list(map(_TIER, leased))
    by_tier = {tiers[0]: len(tiers)} if tiers.count(tiers[0]) == len(tiers) else dict(Counter(tiers))
    return LeasedChunks(leased, tuple(table[first : last + 1])), by_tier, last + 1


def _copies_of_longer(
    table: Sequence[BlockId], leased: _Leased, begin: int, end: int
) -> tuple[tuple[ChunkCopy, ...], dict[str, int], int]:
    """The same for any chunks: of the first and the last of them only some blocks may be wanted."""
    copies: list[ChunkCopy] = []
    by_tier: dict[str, int] = {}
    covered = begin
    for frame, key, first_block, num_blocks, tier in leased:
        lo, hi = first_block, first_block + num_blocks
        if lo < begin or hi > end:
            lo, hi = max(lo, begin), min(hi, end)
            if lo >= hi:
                continue
        copies.append(ChunkCopy(frame, ChunkKey(key), num_blocks, lo - first_block, tuple(table[lo:hi])))
        by_tier[tier] = by_tier.get(tier, 0) + (hi - lo)
        covered = hi
    return tuple(copies), by_tier, covered
