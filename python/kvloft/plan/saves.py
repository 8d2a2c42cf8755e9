"""Save planning: which chunks became complete in this step, where they go, and which blocks saves may still be reading.

A chunk is saved in the step that completes it, while its request owns the blocks (I2, I6). Only confirmed tokens whose KV
this or an earlier step writes count: ``min(frontier, known)``, where the frontier leaves drafts out (I7), and tokens that a
drafter looks ahead at must be known beyond them. A save without a frame is dropped and counted; it is tried again when the
request's next chunk completes, or in the next step if only the server's answer was late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import add, attrgetter

from kvloft.plan.tracker import NEVER, Tracker
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import Chunks, SavePlan
from kvloft.seam.store import KeyChain, Session
from kvloft.seam.views import StepView

SaveRow = tuple[KeyChain, Sequence[int], int, int, int, Sequence[Sequence[BlockId]]]
"""What to save of a request, as `Session.reserve` takes it: chain, token ids, tokens that the chain is to have, units, tables."""

new_save: Callable[[tuple[ReqId, Chunks]], SavePlan] = partial(tuple.__new__, SavePlan)
"""`SavePlan` of a pair: three times as fast as its own constructor."""
its_id: Callable[[Tracker], ReqId] = attrgetter("req_id")


def due_chunks(tracker: Tracker, unit_tokens: int, frontier: int) -> SaveRow | None:
    """What of ``tracker`` is complete at the end of this step and not saved: a row for `Session.reserve`, which counts as saved
    from here on; or None.

    ``frontier``: tokens whose KV is in the request's blocks by then, drafts left out. Leaves the
    frontier at which the next chunk will be complete and known in ``next_save``.
    """
    token_ids = tracker.confirmed_tokens()
    if tracker.save_blocked or tracker.kv_outdated:
        tracker.next_save = NEVER
        return None
    # Of hundreds of running requests some complete a block in every step, and the forward waits for this: so no calls of min().
    goes_on = frontier < tracker.save_limit
    limit = frontier if goes_on else tracker.save_limit
    tables = tracker.blocks
    num_tokens, wanted, lag = len(token_ids), limit + tracker.lookahead, 0
    if num_tokens < wanted:
        lag = wanted - num_tokens
        num_units = (limit - lag) // unit_tokens
    else:
        num_tokens = wanted
        num_units = limit // unit_tokens
    if (num_held := len(tables.main_table) // tables.main_size) < num_units:
        num_units = num_held
    # Under async scheduling the tokens come to be known some steps after their KV: by then the frontier is that far ahead.
    tracker.next_save = (num_units + 1) * unit_tokens + lag
    tracker.num_complete = num_units
    if not goes_on:  # a later request may save the rest, in whose prompt it is
        tracker.num_complete = complete_blocks(tracker, len(token_ids), frontier, unit_tokens)
        tracker.next_save = frontier + unit_tokens
    start = tracker.saved_chunks
    if num_units <= start:
        return None
    tracker.saved_chunks = num_units
    return (tracker.chain, token_ids, num_tokens, start, num_units, tables.tables)


def complete_blocks(tracker: Tracker, num_tokens: int, frontier: int, block_tokens: int) -> int:
    """Leading blocks whose KV is computed at ``frontier`` and whose keys are known from ``num_tokens``, saved or not."""
    num_known = min(frontier + tracker.lookahead, num_tokens) - tracker.lookahead
    return min(num_known // block_tokens, len(tracker.blocks))


def note_dropped(tracker: Tracker, row: SaveRow, store: Session, *, is_late: bool) -> None:
    """Some of the row's chunks found no frame. Save from what is stored when the next chunk completes, for the host part may
    have shrunk; if only the server's answer ``is_late``, the same row in the next step.
    """
    if is_late:
        tracker.saved_chunks, tracker.next_save = row[3], 0
    else:
        host_blocks, _ = store.lookup(tracker.chain)
        tracker.saved_chunks = min(tracker.saved_chunks, host_blocks)


def longest(view: StepView) -> int:
    """Tokens of the step's longest request when its forward is done, drafts included."""
    scheduled = view.num_scheduled_tokens
    ends = [new.num_computed_tokens + scheduled[new.req_id] for new in view.new]
    ends += map(add, view.num_computed_tokens, map(scheduled.__getitem__, view.running))
    return max(ends, default=0)


def rewritten(view: StepView, store: Session, block_tokens: int) -> tuple[BlockId, ...]:
    """Blocks that saves may be reading and that this step gives to a request to write: its writer comes after the read (I2).

    A save reads its blocks after the step that planned it has been launched; by then its request may be gone. A new request
    writes from its first block that is not computed yet; blocks before that are only read.
    """
    if not store.num_in_flight:
        return ()
    given = [block for _, blocks in view.grown for block in blocks]
    for request in view.new:
        given += request.block_ids[request.num_computed_tokens // block_tokens :]
    return tuple(store.being_read(given)) if given else ()
