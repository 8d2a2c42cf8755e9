"""Reasons why a load must not start now: the same load is in progress, or slots or blocks are
short.

Counts loads from a request's admission until vLLM admits the request again with the loaded tokens.
"""

from collections.abc import Callable

from kvloft.plan.block_budget import BlockBudget, BlockNeed
from kvloft.plan.request_state import IncomingUnits, RequestState
from kvloft.plan.settings import PlanSettings
from kvloft.seam.ids import ReqId


class LoadGates:
    """Loads in progress, and what they leave to others. A load that takes longer than ``wait_s``
    is expected to hang, and holds up no other.
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
        self.num_running = 0
        self.incoming: dict[ReqId, IncomingUnits] = {}
        """Loads that bring all their units, as far as is known."""
        self.slots_were_taken = False
        """Time in this step at which a request needed a slot."""
        self.first_without_blocks: ReqId | None = None
        """The first request of this step that lacks blocks: those behind it get none either."""

    def begin_step(self) -> None:
        self.first_without_blocks = None
        self.slots_were_taken = False

    # -- shared loads ---------------------------------------------------------------------------

    def incoming_for(self, request: RequestState, num_tokens: int) -> IncomingUnits | None:
        """Return the load that brings the first unit which the request lacks, if vLLM will share
        its blocks. ``num_tokens``: length of the request.
        """
        chain, unit = request.chain, request.local_tokens // self._unit_tokens
        last = unit + self._lookahead_units
        # vLLM computes the last token itself, so its own hits end before it.
        is_before_end = (last + 1) * self._unit_tokens < num_tokens
        if not self._shares_blocks or not is_before_end or last >= chain.num_blocks:
            return None
        for units in self.incoming.values():
            is_inside = units.begin <= unit and last < units.end
            if is_inside and units.chain.key(last) == chain.key(
                last
            ):  # then all before it is equal
                return units
        return None

    def still_comes(self, units: IncomingUnits) -> bool:
        return self.incoming.get(units.req_id) is units

    # -- running slots --------------------------------------------------------------------------

    def are_slots_taken(self, now: float) -> bool:
        """Return True if running and loading requests fill vLLM's slots and an eighth more.

        vLLM cannot preempt a load, so further ones would only hold blocks, which it then takes from
        running requests. The extra eighth keeps slots from staying empty.
        """
        if self._max_running is None:
            return False
        num_loading = sum(units.began_s >= now - self._wait_s for units in self.incoming.values())
        limit = self._max_running + max(1, self._max_running // 8)
        self.slots_were_taken = self.num_running + num_loading >= limit
        return self.slots_were_taken

    # -- GPU blocks -----------------------------------------------------------------------------

    def lacks_blocks(self, request: RequestState, num_tokens: int, loaded_tokens: int) -> bool:
        """Return True if the request, once ``loaded_tokens`` are loaded, could lack blocks."""
        if (budget := self._budget) is None:
            return False
        is_first = self.first_without_blocks in (None, request.req_id)
        if is_first and budget.fits(_need(budget, request, num_tokens, loaded_tokens)):
            return False
        self.first_without_blocks = self.first_without_blocks or request.req_id
        return True

    def expects_blocks(self, now: float) -> bool:
        """Return True if waiting for blocks makes sense: loads released or took some lately."""
        return now - self._budget_changed_s < self._wait_s

    # -- loads ----------------------------------------------------------------------------------

    def take_blocks(self, request: RequestState, num_tokens: int) -> None:
        """Count the blocks of a request that vLLM admits with a load of ``num_tokens``."""
        if self._budget is not None:
            loaded_tokens = request.local_tokens + num_tokens
            need = _need(self._budget, request, request.num_confirmed, loaded_tokens)
            self._budget.take(request.req_id, need)
            self._budget_changed_s = self._clock()

    def begin(self, request: RequestState, num_tokens: int) -> None:
        """Record a load of ``num_tokens``; others wait for it."""
        begin = request.local_tokens // self._unit_tokens
        end = begin + num_tokens // self._unit_tokens
        units = IncomingUnits(request.req_id, request.chain, begin, end, self._clock())
        self.incoming[request.req_id] = units

    def fail(self, req_id: ReqId) -> None:
        """Let no other request wait for a load that failed. Its blocks are still taken."""
        self.incoming.pop(req_id, None)

    def end(self, req_id: ReqId) -> None:
        """Stop counting a request that was admitted again or finished."""
        self.incoming.pop(req_id, None)
        if self._budget is not None and self._budget.release(req_id):
            self._budget_changed_s = self._clock()


def _need(
    budget: BlockBudget, request: RequestState, num_tokens: int, loaded_tokens: int
) -> BlockNeed:
    local_tokens = request.local_tokens
    return budget.need(
        request.chain, num_tokens, local_tokens=local_tokens, loaded_tokens=loaded_tokens
    )
