"""Lookup and load planning: how many tokens to offer vLLM, and which frames go to which blocks.

An offer pins the frames behind it, so that what was offered can be delivered; the pins belong to the tracker and fall
with the next offer, the admission, the request's end, or after ``LEASE_STEPS`` steps without being asked (I5, I9).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloft.plan.tracker import Geometry, Tracker
from kvloft.types import BlockId, ChunkCopy, ChunkKey, LoadPlan, ReadLease, ReqId, Store

LEASE_STEPS = 64
"""Steps a lease may live without its request being asked about again."""


@dataclass(slots=True)
class Offer:
    """Answer to one lookup: ``num_tokens`` beyond what vLLM has, or None for "ask again"."""

    num_tokens: int | None


def match(tracker: Tracker, store: Store, geometry: Geometry, local_tokens: int, now: float, wait_s: float) -> Offer:
    """Offer what the store holds beyond ``local_tokens``; None while disk chunks are being read, at most ``wait_s``.

    May be called any number of times and its answer dropped (I9).
    """
    num_tokens = tracker.extend_chain()
    tracker.local_tokens = local_tokens
    block_tokens = geometry.block_tokens
    if tracker.lease is not None and tracker.lease_tokens != num_tokens:
        tracker.drop_lease()
    if tracker.lease is None:
        _, stored_blocks = store.lookup(tracker.chain)
        if stored_blocks * block_tokens <= local_tokens:
            return Offer(0)
        tracker.lease = store.acquire(tracker.chain)
        tracker.lease_tokens = num_tokens
    ready_blocks, pending_blocks = tracker.lease.poll()
    if pending_blocks and not tracker.waited_out:
        if tracker.waiting_since is None:
            tracker.waiting_since = now
        if now - tracker.waiting_since < wait_s:
            return Offer(None)
        tracker.waited_out = True
    offered = ready_blocks * block_tokens - local_tokens
    if offered <= 0:
        if not pending_blocks:
            tracker.drop_lease()
        return Offer(0)
    return Offer(offered)


def plan_load(
    tracker: Tracker, geometry: Geometry, num_tokens: int, load_id: int
) -> tuple[LoadPlan, ReadLease | None, dict[str, int]]:
    """Turn the standing offer into copies for blocks [local, local + num_tokens).

    Returns the plan, the lease that must outlive it, and tokens by tier. What the lease no longer covers is ``lost``.
    """
    block_tokens = geometry.block_tokens
    begin = tracker.local_tokens // block_tokens
    end = (tracker.local_tokens + num_tokens) // block_tokens
    lease, tracker.lease = tracker.lease, None
    copies: list[ChunkCopy] = []
    by_tier: dict[str, int] = {}
    covered = begin
    table = tracker.blocks
    for frame, key, first_block, num_blocks, tier in lease.frames() if lease is not None else ():
        # No call in here that can be spared: a long prompt has thousands of chunks, and its first byte moves after the last.
        lo, hi = first_block, first_block + num_blocks
        if lo < begin or hi > end:
            lo, hi = max(lo, begin), min(hi, end)
            if lo >= hi:
                continue
        blocks = (table[lo],) if hi - lo == 1 else tuple(table[lo:hi])
        copies.append(ChunkCopy(frame, ChunkKey(key), num_blocks, lo - first_block, blocks))
        by_tier[tier] = by_tier.get(tier, 0) + (hi - lo) * block_tokens
        covered = hi
    lost: tuple[BlockId, ...] = tuple(tracker.blocks[covered:end])
    return LoadPlan(ReqId(tracker.live.req_id), load_id, tuple(copies), lost), lease, by_tier
