"""Plans saves of Mamba and gated delta net states.

vLLM offers each state once, after hashing the tokens before it. If no frame is available in that
step, the state is not saved.
"""

from kvloft.plan.complete_units import refresh_tables
from kvloft.plan.context import PlanContext
from kvloft.plan.request_state import RequestState
from kvloft.seam.plan import SavePlan
from kvloft.seam.views import BoundaryState, StepView


class StatePlanner:
    """Plans saves of Mamba and gated delta net states."""

    def __init__(self, context: PlanContext) -> None:
        self._context = context
        self._unit_tokens = context.settings.shape.unit_tokens

    def plan(self, step: StepView) -> list[SavePlan]:
        """Reserve frames for the states in ``step`` that can be saved, and return their saves."""
        states = [state for state in step.states if self.can_save(state, step)]
        if not states:
            return []
        requests = [self._context.requests[state.req_id] for state in states]
        rows = [
            (request.chain, state.group, state.num_tokens // self._unit_tokens - 1, state.block)
            for request, state in zip(requests, states, strict=True)
        ]
        reserved = zip(states, self._context.store.reserve_states(rows), strict=True)
        saves = [SavePlan(state.req_id, chunks) for state, chunks in reserved if chunks]
        for request, state in zip(requests, states, strict=True):
            self._context.notes.add_states(request, state.num_tokens // self._unit_tokens)
        return saves

    def can_save(self, state: BoundaryState, step: StepView) -> bool:
        """Return True if ``state`` should be saved, has a key and is in a valid block."""
        request = self._context.requests.get(state.req_id)
        if request is None or state.num_tokens % self._unit_tokens:
            return False
        if state.num_tokens > request.save_limit or not refresh_tables(request, step):
            return False
        if not self.is_in_table(request, state):
            return False
        request.extend_chains(state.num_tokens)
        has_key = request.chain.num_blocks >= state.num_tokens // self._unit_tokens
        is_blocked = request.save_blocked or request.kv_outdated
        return has_key and not is_blocked and not self._context.breaker.has_tripped

    def is_in_table(self, request: RequestState, state: BoundaryState) -> bool:
        """Return True if the state's block is still at its position in the request's block table.

        With async scheduling, vLLM offers states that the previous step confirmed, although
        accepted draft tokens may already have made it release their blocks. A released block's
        content is undefined at the end of this step, even if vLLM has reassigned the block to the
        same request.
        """
        num_units = state.num_tokens // self._unit_tokens
        return request.blocks.tables[state.group][num_units - 1 : num_units] == [state.block]
