"""Save planning: which chunks became complete in this step, where they go, and which blocks saves may still be reading.

A chunk is saved in the step that completes it, while its request owns the blocks (I2, I6). Only confirmed tokens whose KV
this or an earlier step writes count: ``min(frontier, known)``, where the frontier leaves drafts out (I7), and tokens that a
drafter looks ahead at must be known beyond them. A save that cannot have a frame now is dropped and counted; it is tried again
when the request's next chunk completes.
"""

from __future__ import annotations

from operator import add

from kvloft.plan.groups import GroupedChunks
from kvloft.plan.tracker import NEVER, Tracker
from kvloft.seam.batch import ChunkBatch, GroupBatches
from kvloft.seam.ids import BlockId
from kvloft.seam.shape import GroupShape
from kvloft.seam.store import Session
from kvloft.seam.views import StepView


def plan_save(
    tracker: Tracker, store: Session, group: GroupShape, frontier: int, groups: GroupedChunks | None = None
) -> tuple[int, ChunkBatch | GroupBatches | None, int]:
    """Reserve frames for every chunk of ``tracker`` that is complete at the end of this step.

    ``group`` is the full one, ``groups`` what ``store`` has of several.
    ``frontier``: tokens whose KV is in the request's blocks by then, drafts left out. Returns the frontier at which the next
    chunk (or, with longer chunks, the next block) will be complete and known, the chunks to save, and how many found no frame.
    """
    # Of hundreds of running requests some complete a block in every step, and the forward waits for this: so no calls of min().
    save_limit = tracker.save_limit
    limit = frontier if frontier < save_limit else save_limit  # noqa: FURB136
    known = tracker.extend_chain(limit) - tracker.lookahead
    if tracker.save_blocked or tracker.kv_outdated:
        return NEVER, None, 0
    block_tokens, blocks_per_chunk, blocks = group.block_tokens, group.blocks_per_chunk, tracker.blocks
    lag = limit - known if known < limit else 0
    num_blocks = (limit - lag) // block_tokens
    if len(blocks) < num_blocks:
        num_blocks = len(blocks)
    # Under async scheduling the tokens come to be known some steps after their KV: by then the frontier is that far ahead.
    next_save = (num_blocks + 1) * block_tokens + lag if frontier < save_limit else NEVER
    num_full = num_blocks // blocks_per_chunk
    tail_blocks = num_blocks - num_full * blocks_per_chunk
    # Tails are saved at the prompt's end, then block by block.
    if tail_blocks and (num_blocks <= tracker.tail_blocks or num_blocks < tracker.num_prompt_tokens // block_tokens):
        tail_blocks = 0
    if num_full <= tracker.saved_chunks and not tail_blocks:
        return next_save, None, 0
    chunks: ChunkBatch | GroupBatches
    if groups is None:
        chunks, num_dropped = store.reserve(tracker.chain, tracker.saved_chunks, num_full, tail_blocks, blocks)
    else:
        chunks, num_dropped = groups.reserve(tracker.chain, tracker.saved_chunks, num_full, blocks)
    try:
        if num_dropped:
            # The host part may have shrunk under us; go on from what is really there when the next chunk completes.
            host_blocks, _ = (groups or store).lookup(tracker.chain)
            tracker.saved_chunks = min(num_full, host_blocks // blocks_per_chunk)
        else:
            tracker.saved_chunks = max(tracker.saved_chunks, num_full)
            if tail_blocks:
                _remember_tail(tracker, store, chunks, num_blocks, tracker.num_prompt_tokens // block_tokens)
    except BaseException:  # nothing else knows its tickets yet (I5)
        store.abort(chunks.tickets())
        raise
    return next_save, chunks or None, num_dropped


def _remember_tail(
    tracker: Tracker, store: Session, chunks: ChunkBatch | GroupBatches, num_blocks: int, prompt_blocks: int
) -> None:
    """Let a tail made while decoding replace the one before it; the tail at the prompt's end stays for other requests."""
    # The new one is in no batch if it is stored already, or has a null block.
    if tracker.tail_blocks > prompt_blocks and chunks and chunks.block_ids()[-1] == tracker.blocks[num_blocks - 1]:
        store.supersede(chunks.tickets()[-1], tracker.chain.key(tracker.tail_blocks - 1))
    tracker.tail_blocks = num_blocks


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
