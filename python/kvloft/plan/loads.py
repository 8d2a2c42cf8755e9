"""Load planning: which frames go to which blocks once vLLM took an offer."""

from __future__ import annotations

from dataclasses import dataclass

from kvloft.plan.pins import Lease
from kvloft.plan.tracker import Tracker
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.plan import LAYOUT, LoadPlan, LoadResult


@dataclass(slots=True)
class Loading:
    """A load in flight: the lease that it needs, how many ranks have yet to report it, and what they said."""

    lease: Lease | None
    num_ranks_left: int
    is_tried: bool
    """There was something to copy."""
    has_failed: bool = False
    """On some rank nothing was copied, or other bytes than were saved."""
    is_other_layout: bool = False
    """Some chunk has another engine's memory layout: a difference of settings, not damage."""

    def take_in(self, result: LoadResult) -> bool:
        """Note what one rank reports; returns whether all have."""
        self.has_failed |= bool(result.bad_keys) or result.failed
        self.is_other_layout |= any(problem == LAYOUT for _, problem in result.bad_keys)
        self.num_ranks_left -= 1
        return self.num_ranks_left == 0

    @property
    def says_whether_copies_work(self) -> bool:
        """Whether it counts for the circuit breaker."""
        return (self.is_tried or self.has_failed) and not self.is_other_layout

    def unpin(self) -> None:
        if self.lease is not None:
            self.lease.release()


def plan_load(tracker: Tracker, unit_tokens: int, num_tokens: int, load_id: int) -> tuple[LoadPlan, Lease | None, dict[str, int]]:
    """Turn the standing offer into copies for blocks [local, local + num_tokens).

    Returns the plan, the lease that must outlive it, and tokens by tier. What the lease no longer covers is ``lost``.
    """
    begin = tracker.local_tokens // unit_tokens
    end = (tracker.local_tokens + num_tokens) // unit_tokens
    chunks: ChunkBatch | tuple[()] = ()
    by_tier: dict[str, int] = {}
    if (lease := tracker.lease) is not None:
        chunks, by_tier = lease.batch(tracker.blocks.tables, begin, end)
        tracker.lease = None
    lost = tuple(filter(None, tracker.blocks[begin + sum(by_tier.values()) : end]))  # the null block is promised to none
    by_tier = {tier: num_units * unit_tokens for tier, num_units in by_tier.items()}
    return LoadPlan(tracker.req_id, load_id, chunks, lost), lease, by_tier
