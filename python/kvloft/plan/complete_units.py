"""Finds a request's complete units, and the blocks that saves may still be reading.

A chunk is saved in the step that completes its unit, while the request owns the blocks (I2, I6). A
unit is complete if it ends at or before ``min(frontier, known tokens)``: its tokens are known, and
their KV is written by the end of the step. The frontier excludes draft tokens (I7). The lookahead
tokens of a draft model must also be known.
"""

from operator import add

from kvloft.plan.request_state import NEVER, RequestState
from kvloft.seam.ids import BlockId
from kvloft.seam.store import Session
from kvloft.seam.views import StepView


def take_complete_units(request: RequestState, unit_tokens: int, frontier: int) -> bool:
    """Find the units of ``request`` that are complete at the end of this step but have not been
    saved.

    Returns True if units [save_start, saved_units) must be saved, and then counts them as saved.
    ``frontier`` is the number of tokens whose KV is in the blocks at the end of the step, excluding
    draft tokens. Sets ``next_save`` to the frontier that completes the next unit. This function
    runs for many requests in every step, so it avoids calls to ``min``.
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
    # With async scheduling, a token becomes known a few steps after its KV is computed, while the
    # frontier advances. Rejected draft tokens make the frontier unpredictable.
    request.next_save = (num_units + 1) * unit_tokens + (0 if request.had_drafts else lag)
    request.num_complete = num_units
    if is_limited:  # later requests with longer prompts can save the rest
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
    """Return the number of leading units whose tokens are known and whose KV is computed.

    ``num_tokens`` tokens are known, and the KV of ``frontier`` tokens is computed.
    """
    return min(min(frontier, num_tokens) // unit_tokens, len(request.blocks))


def refresh_tables(request: RequestState, step: StepView) -> bool:
    """Read the request's current block tables. Return False if vLLM does not report them.

    This is needed for models for which vLLM frees blocks of running requests.
    """
    if step.tables is None or not (tables := step.tables(request.req_id)):
        return False
    request.blocks = tables
    return True


def longest_request(step: StepView) -> int:
    """Return the length of the longest request after this step, including draft tokens."""
    scheduled = step.num_scheduled_tokens
    ends = [new.num_computed_tokens + scheduled[new.req_id] for new in step.new]
    ends += map(add, step.num_computed_tokens, map(scheduled.__getitem__, step.running))
    return max(ends, default=0)


def rewritten_blocks(step: StepView, store: Session, unit_tokens: int) -> tuple[BlockId, ...]:
    """Return the blocks that this step assigns for writing while saves may still be reading them
    (I2).

    A save reads its blocks after its step launches, when its request may already have finished. A
    new request reads only the blocks of its computed tokens, and writes to all later blocks.
    """
    if not store.num_in_flight:
        return ()
    given = [block for _, blocks in step.grown for block in blocks]
    for new in step.new:
        given += new.block_ids[new.num_computed_tokens // unit_tokens :]
    return tuple(store.being_read(given)) if given else ()
