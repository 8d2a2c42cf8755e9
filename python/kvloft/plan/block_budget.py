"""Limits concurrent loads so that every request with a load can get the GPU blocks it needs.

Counts requests whose load is in progress, and those whose load ended but that do not run yet. vLLM
0.32 admits a load only if the blocks that such requests still need stay free. For sliding windows
and local chunks, however, it counts the null blocks at the start of a table as present and reserves
nothing: a few long requests can fill the pool, each short of some blocks, and none of them ever
runs. With several groups, a load is therefore offered only if the whole sequences of all such
requests fit into the pool together. Running requests do not count, because they finish or are
preempted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvloft.plan.leases import StrideCounts, Strides
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import GroupShape
from kvloft.seam.store import KeyChain


@dataclass(frozen=True, slots=True)
class PoolSize:
    """vLLM's block pool. ``step_tokens``: at most this many tokens are in steps at the same time.
    ``num_drafts``: draft tokens per step and request.
    """

    num_blocks: int
    step_tokens: int
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """Blocks that one request needs, and strides of its local prefix that others can share."""

    own: int
    shared: Strides


class BlockBudget:
    """Blocks of one pool that requests with a load need."""

    def __init__(self, groups: Sequence[GroupShape], pool: PoolSize) -> None:
        self._groups, self._pool = groups, pool
        self._full = [group for group in groups if group.kind == "full"]
        self._needs: dict[ReqId, BlockNeed] = {}
        self._num_own = 0
        self._prefixes = StrideCounts(pool.num_blocks)

    def need(
        self, chain: KeyChain, num_tokens: int, *, local_tokens: int, loaded_tokens: int
    ) -> BlockNeed:
        """Return the need of a request with ``num_tokens``. vLLM has the first ``local_tokens``,
        and a load completes the first ``loaded_tokens``.
        """
        num_tokens += 1 + 2 * self._pool.num_drafts
        num_ahead = min(self._pool.step_tokens, num_tokens - loaded_tokens)
        own = sum(self._own(group, num_tokens, local_tokens, num_ahead) for group in self._groups)
        num_units = local_tokens // self._full[0].unit_tokens if self._full else 0
        per_unit = sum(group.blocks_per_unit for group in self._full)
        strides = self._prefixes.strides(chain, num_units)
        return BlockNeed(own, {key: num * per_unit for key, num in strides.items()})

    def _own(self, group: GroupShape, num_tokens: int, local_tokens: int, num_ahead: int) -> int:
        num_blocks = -(-num_tokens // group.block_tokens)
        match group.kind:
            case "full":
                return num_blocks - local_tokens // group.block_tokens
            case "window" | "local":
                return min(num_blocks, 2 + -(-(group.reach + num_ahead) // group.block_tokens))
            case "state":
                return min(num_blocks, 3) + self._pool.num_drafts

    def fits(self, need: BlockNeed) -> bool:
        """Return True if ``need`` fits with all others. vLLM checks that it fits alone."""
        num_taken = self._num_own + need.own + self._prefixes.total_with(need.shared)
        return not self._needs or num_taken <= self._pool.num_blocks

    def take(self, req_id: ReqId, need: BlockNeed) -> None:
        """Count a request that vLLM admits with a load. It holds nothing yet."""
        self._needs[req_id] = need
        self._num_own += need.own
        self._prefixes.add(need.shared)

    def release(self, req_id: ReqId) -> bool:
        """Stop counting a request that runs or finished. Returns True if it was counted."""
        if (need := self._needs.pop(req_id, None)) is None:
            return False
        self._num_own -= need.own
        self._prefixes.remove(need.shared)
        return True
