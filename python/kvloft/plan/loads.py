"""Load planning: which frames go to which blocks once vLLM took an offer."""

from __future__ import annotations

from kvloft.plan.tracker import Tracker
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.ids import ReqId
from kvloft.seam.plan import LoadPlan
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import ReadLease


def plan_load(
    tracker: Tracker, shape: CacheShape, num_tokens: int, load_id: int
) -> tuple[LoadPlan, ReadLease | None, dict[str, int]]:
    """Turn the standing offer into copies for blocks [local, local + num_tokens).

    Returns the plan, the lease that must outlive it, and tokens by tier. What the lease no longer covers is ``lost``.
    """
    block_tokens = shape.block_tokens
    begin = tracker.local_tokens // block_tokens
    end = (tracker.local_tokens + num_tokens) // block_tokens
    chunks: ChunkBatch | tuple[()] = ()
    by_tier: dict[str, int] = {}
    if (lease := tracker.lease) is not None:
        chunks, by_tier = lease.batch(tracker.blocks, begin, end)
        tracker.lease = None
    lost = tuple(tracker.blocks[begin + sum(by_tier.values()) : end])
    by_tier = {tier: num_blocks * block_tokens for tier, num_blocks in by_tier.items()}
    return LoadPlan(ReqId(tracker.live.req_id), load_id, chunks, lost), lease, by_tier
