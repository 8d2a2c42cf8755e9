"""Which units of one request are complete, and which blocks saves may still be reading.

A chunk is saved in the step that completes its unit, while its request owns the blocks (I2, I6).
Only confirmed tokens count whose KV this or an earlier step writes: ``min(frontier, known
tokens)``. The frontier excludes draft tokens (I7), and the tokens that a draft model looks ahead at
must be known beyond it.
"""

from operator import add

from kvloft.plan.request_state import NEVER, RequestState
from kvloft.seam.ids import BlockId
from kvloft.seam.store import Session
from kvloft.seam.views import StepView


def take_complete_units(request: RequestState, unit_tokens: int, frontier: int) -> bool:
    """Find the units of ``request`` that are complete at the end of this step and not saved.

    Returns True if units [save_start, saved_units) are to be saved, which count as saved from here
    on. ``frontier``: tokens whose KV is in the blocks by then, draft tokens excluded. Sets
    ``next_save`` to the frontier at which the next unit will be complete. Called for many requests
    in every step, hence without calls of ``min``.
    """
    token_ids = request.confirmed_tokens()
    if request.save_blocked or request.kv_outdated:
        request.next_save = NEVER
        return False
    is_limited = frontier >= request.save_limit
    limit = request.save_limit if is_limited else frontier
    tables = request.blocks
    num_tokens, num_needed, lag = len(token_ids), limit + request.lookahead, 0
    if num_tokens < num_needed:
        lag = num_needed - num_tokens
        num_units = (limit - lag) // unit_tokens
    else:
        num_tokens = num_needed
        num_units = limit // unit_tokens
    if (num_held := len(tables.main_table) // tables.main_size) < num_units:
        num_units = num_held
    # With async scheduling, tokens are known some steps after their KV, at a later frontier. Which
    # one cannot be predicted with drafts, as they may be rejected.
    request.next_save = (num_units + 1) * unit_tokens + (0 if request.had_drafts else lag)
    request.num_complete = num_units
    if is_limited:  # the rest may be saved by a later request that has it in its prompt
        request.num_complete = num_complete_units(request, len(token_ids), frontier, unit_tokens)
        request.next_save = frontier + unit_tokens
    start = request.saved_units
    if num_units <= start:
        return False
    request.save_start, request.saved_units = start, num_units
    request.token_ids, request.num_save_tokens = token_ids, num_tokens
    return True


def num_complete_units(
    request: RequestState, num_tokens: int, frontier: int, unit_tokens: int
) -> int:
    """Return the leading units whose KV is computed at ``frontier`` and whose tokens are among the
    ``num_tokens`` known ones, saved or not.
    """
    return min(min(frontier, num_tokens) // unit_tokens, len(request.blocks))


def refresh_tables(request: RequestState, step: StepView) -> bool:
    """Read the request's block tables as they are in this step, for shapes whose blocks vLLM frees
    while requests run. Returns False, and keeps the tables, if vLLM does not report them.
    """
    if step.tables is None or not (tables := step.tables(request.req_id)):
        return False
    request.blocks = tables
    return True


def longest_request(step: StepView) -> int:
    """Return the tokens of the step's longest request after its forward pass, with drafts."""
    scheduled = step.num_scheduled_tokens
    ends = [new.num_computed_tokens + scheduled[new.req_id] for new in step.new]
    ends += map(add, step.num_computed_tokens, map(scheduled.__getitem__, step.running))
    return max(ends, default=0)


def rewritten_blocks(step: StepView, store: Session, unit_tokens: int) -> tuple[BlockId, ...]:
    """Return blocks that this step assigns to a writer while saves may still read them (I2).

    A save reads its blocks after the step that planned it was launched, when its request may be
    gone. A new request writes from its first block that is not computed; it only reads those
    before.
    """
    if not store.num_in_flight:
        return ()
    given = [block for _, blocks in step.grown for block in blocks]
    for new in step.new:
        given += new.block_ids[new.num_computed_tokens // unit_tokens :]
    return tuple(store.being_read(given)) if given else ()
