"""Postpones a load if its prefix is already being loaded, or if slots or GPU blocks are scarce.

A load is in progress from its request's admission until vLLM admits the request again with the
loaded tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvloft.plan.leases import StrideCounts, Strides
from kvloft.plan.request_state import IncomingUnits, RequestState
from kvloft.plan.settings import PlanSettings, PoolSize
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import GroupShape


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """The number of blocks that only this request uses (``own``), and the blocks of its local
    prefix by stride (``shared``), which other requests can share.
    """

    own: int
    shared: Strides


class BlockBudget:
    """Limits concurrent loads so that every request with a load can get the GPU blocks it needs.

    The budget counts requests from the start of their load until they run. vLLM 0.32 admits a load
    only if the blocks that these requests still need remain free. In groups with a sliding window
    or chunked local attention, however, vLLM treats the null blocks at the start of a table as
    allocated and reserves nothing. A few long requests can then exhaust the pool, and none of them
    can run because each needs more blocks. With multiple groups, a load is therefore offered only
    if the full sequences of all counted requests fit into the pool. Running requests do not count,
    because they finish or get preempted.
    """

    def __init__(self, groups: Sequence[GroupShape], pool: PoolSize) -> None:
        self._groups, self._pool = groups, pool
        self._full = [group for group in groups if group.kind == "full"]
        self._needs: dict[ReqId, BlockNeed] = {}
        self._num_own = 0
        self._prefixes = StrideCounts(pool.num_blocks)

    def need(self, request: RequestState, num_tokens: int, loaded_tokens: int) -> BlockNeed:
        """Return the blocks that a request of ``num_tokens`` tokens needs.

        The first ``local_tokens`` of the request are in vLLM's prefix cache, and the first
        ``loaded_tokens`` are complete after the load.
        """
        local_tokens = request.local_tokens
        num_tokens += 1 + 2 * self._pool.num_drafts
        num_ahead = min(self._pool.step_tokens, num_tokens - loaded_tokens)
        own = sum(self._own(group, num_tokens, local_tokens, num_ahead) for group in self._groups)
        num_units = local_tokens // self._full[0].unit_tokens if self._full else 0
        per_unit = sum(group.blocks_per_unit for group in self._full)
        strides = self._prefixes.strides(request.chain, num_units)
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
        """Return True if ``need`` and the needs of all counted requests fit into the pool.

        A request always fits if no other request is counted: vLLM ensures that the pool can hold
        any single request.
        """
        num_taken = self._num_own + need.own + self._prefixes.total_with(need.shared)
        return not self._needs or num_taken <= self._pool.num_blocks

    def take(self, req_id: ReqId, need: BlockNeed) -> None:
        """Count a request that vLLM admits with a load. The request must not be counted yet."""
        self._needs[req_id] = need
        self._num_own += need.own
        self._prefixes.add(need.shared)

    def release(self, req_id: ReqId) -> bool:
        """Remove a running or finished request. Return True if it was counted."""
        if (need := self._needs.pop(req_id, None)) is None:
            return False
        self._num_own -= need.own
        self._prefixes.remove(need.shared)
        return True


class LoadGates:
    """Tracks the loads in progress, and the slots and blocks that they leave for other requests.

    A load that takes longer than ``wait_s`` counts as hung and no longer delays other requests.
    """

    def __init__(self, settings: PlanSettings, clock: Callable[[], float]) -> None:
        self._clock, self._wait_s = clock, settings.wait_s
        self._unit_tokens = settings.shape.unit_tokens
        self._lookahead_units = 1 if settings.shape.lookahead > 0 else 0
        self._shares_blocks = settings.shares_blocks and settings.shape.is_divisible
        self._max_running = settings.max_running
        pool = settings.pool
        self._budget = None if pool is None else BlockBudget(settings.shape.groups, pool)
        self._budget_changed_s = float("-inf")
        self.count_running: Callable[[], int] = lambda: 0
        self.incoming: dict[ReqId, IncomingUnits] = {}
        """Loads in progress that are expected to load all of their units."""
        self.slots_were_taken = False
        """Result of this step's last `check_slots_taken` call."""
        self.first_without_blocks: ReqId | None = None
        """The first request in this step that lacks blocks. Loads of later requests are postponed
        too.
        """

    def begin_step(self) -> None:
        self.first_without_blocks = None
        self.slots_were_taken = False

    # -- shared loads ---------------------------------------------------------------------------

    def incoming_for(self, request: RequestState, num_tokens: int) -> IncomingUnits | None:
        """Return the load in progress that includes the request's first missing unit, if vLLM can
        share the load's blocks.

        ``num_tokens`` is the request's length.
        """
        chain, unit = request.chain, request.local_tokens // self._unit_tokens
        last = unit + self._lookahead_units
        # vLLM always computes the last token, so its own prefix-cache hits end before that token.
        is_before_end = (last + 1) * self._unit_tokens < num_tokens
        if not self._shares_blocks or not is_before_end or last >= chain.num_blocks:
            return None
        for units in self.incoming.values():
            is_inside = units.begin <= unit and last < units.end
            # Equal keys imply equal prefixes.
            if is_inside and units.chain.key(last) == chain.key(last):
                return units
        return None

    def still_comes(self, units: IncomingUnits) -> bool:
        return self.incoming.get(units.req_id) is units

    # -- running slots --------------------------------------------------------------------------

    def check_slots_taken(self, now: float) -> bool:
        """Return True if running and loading requests outnumber vLLM's slots by an eighth or more.

        Sets ``slots_were_taken``. vLLM cannot preempt a load, so more loads would only hold blocks
        that running requests need. The extra eighth (at least one request) keeps slots from idling.
        """
        if self._max_running is None:
            return False
        num_loading = sum(units.began_s >= now - self._wait_s for units in self.incoming.values())
        limit = self._max_running + max(1, self._max_running // 8)
        self.slots_were_taken = self.count_running() + num_loading >= limit
        return self.slots_were_taken

    # -- GPU blocks -----------------------------------------------------------------------------

    def lacks_blocks(self, request: RequestState, num_tokens: int, loaded_tokens: int) -> bool:
        """Return True if the request may run out of blocks once its first ``loaded_tokens`` tokens
        are loaded.
        """
        if (budget := self._budget) is None:
            return False
        is_first = self.first_without_blocks in (None, request.req_id)
        if is_first and budget.fits(budget.need(request, num_tokens, loaded_tokens)):
            return False
        self.first_without_blocks = self.first_without_blocks or request.req_id
        return True

    def expects_blocks(self, now: float) -> bool:
        """Return True if blocks may soon become free, because loads took or released blocks within
        the last ``wait_s`` seconds.
        """
        return now - self._budget_changed_s < self._wait_s

    # -- loads ----------------------------------------------------------------------------------

    def take_blocks(self, request: RequestState, num_tokens: int) -> None:
        """Count a request's blocks when vLLM admits it with a load of ``num_tokens`` tokens."""
        if self._budget is not None:
            loaded_tokens = request.local_tokens + num_tokens
            need = self._budget.need(request, request.num_confirmed, loaded_tokens)
            self._budget.take(request.req_id, need)
            self._budget_changed_s = self._clock()

    def begin(self, request: RequestState, num_tokens: int) -> None:
        """Record a load of ``num_tokens`` tokens. Requests with the same prefix wait for it."""
        begin = request.local_tokens // self._unit_tokens
        end = begin + num_tokens // self._unit_tokens
        units = IncomingUnits(request.req_id, request.chain, begin, end, self._clock())
        self.incoming[request.req_id] = units

    def fail(self, req_id: ReqId) -> None:
        """Record a failed load. Requests stop waiting for it, but its blocks are still counted."""
        self.incoming.pop(req_id, None)

    def end(self, req_id: ReqId) -> None:
        """Remove the load of a readmitted or finished request."""
        self.incoming.pop(req_id, None)
        if self._budget is not None and self._budget.release(req_id):
            self._budget_changed_s = self._clock()
