"""Lookup and load planning: how many tokens to offer vLLM, and which frames go to which blocks.

An offer pins the frames behind it, so that what was offered can be delivered; the pins belong to the tracker and fall
with the next offer, the admission, the request's end, or after ``LEASE_STEPS`` steps without being asked (I5, I9).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloft.plan.tracker import Tracker
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.ids import ReqId
from kvloft.seam.plan import LoadPlan
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import ReadLease, Session

LEASE_STEPS = 64
"""Steps a lease may live without its request being asked about again."""


FIRST_LOOK_TOKENS, LOOK_FURTHER = 2048, 4
"""So many tokens get keys for the first lookup, and so many times more for the next. Of a prompt that nobody has seen the first
chunk says all, and its first forward waits for the keys."""


@dataclass(slots=True)
class Offer:
    """Answer to one lookup: ``num_tokens`` beyond what vLLM has, or None for "ask again"."""

    num_tokens: int | None


def match(tracker: Tracker, store: Session, shape: CacheShape, local_tokens: int, now: float, wait_s: float) -> Offer:
    """Offer what the store holds beyond ``local_tokens``; None while disk chunks are being read, at most ``wait_s``.

    May be called any number of times and its answer dropped (I9).
    """
    num_tokens = tracker.extend_chain(FIRST_LOOK_TOKENS)
    tracker.local_tokens = local_tokens
    block_tokens = shape.full.block_tokens
    if tracker.lease is not None and tracker.lease_tokens != num_tokens:
        tracker.drop_lease()
    if tracker.lease is None:
        stored_blocks = _look_up(tracker, store, shape)
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


def _look_up(tracker: Tracker, store: Session, shape: CacheShape) -> int:
    """Blocks that the store has of the request's prefix. Keys are made as far as they are found, and somewhat further."""
    limit = FIRST_LOOK_TOKENS
    while True:
        known = tracker.extend_chain(limit)
        _, stored_blocks = store.lookup(tracker.chain)
        # Whatever ends before the chain's last whole chunk ends there with a longer chain, too.
        if stored_blocks + shape.full.blocks_per_chunk <= tracker.chain.num_blocks or tracker.chain.num_tokens >= known:
            return stored_blocks
        limit *= LOOK_FURTHER


def plan_load(
    tracker: Tracker, shape: CacheShape, num_tokens: int, load_id: int
) -> tuple[LoadPlan, ReadLease | None, dict[str, int]]:
    """Turn the standing offer into copies for blocks [local, local + num_tokens).

    Returns the plan, the lease that must outlive it, and tokens by tier. What the lease no longer covers is ``lost``.
    """
    block_tokens = shape.full.block_tokens
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
