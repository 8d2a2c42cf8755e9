"""Save planning: which chunks became complete in this step, and where they go.

A chunk is saved in the step that completes it, while its request owns the blocks (I2, I6). Only confirmed tokens whose KV
this or an earlier step writes count: ``min(frontier, known)``, where the frontier leaves drafts out (I7). A save that cannot
have a frame now is dropped and counted; it is tried again when the request's next chunk completes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvloft.plan.tracker import NEVER, Tracker
from kvloft.seam.batch import ChunkBatch
from kvloft.seam.ids import ChunkKey
from kvloft.seam.plan import SavePlan
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session


@dataclass(slots=True)
class Saving:
    """What one call of `plan_save` did.

    ``next_save``: the frontier at which the next chunk (or, with longer chunks, the next block) will be complete and known.
    """

    next_save: int
    plan: SavePlan | None = None
    num_dropped: int = 0


def plan_save(tracker: Tracker, store: Session, shape: CacheShape, frontier: int) -> Saving:
    """Reserve frames for every chunk of ``tracker`` that is complete at the end of this step.

    ``frontier``: tokens whose KV is in the request's blocks by then, drafts left out.
    """
    frontier = min(frontier, tracker.save_limit)
    known = tracker.extend_chain(frontier)
    if tracker.save_blocked or tracker.kv_outdated:
        return Saving(NEVER)
    block_tokens, blocks_per_chunk = shape.block_tokens, shape.blocks_per_chunk
    num_blocks = min(frontier // block_tokens, known // block_tokens, len(tracker.blocks))
    num_full = num_blocks // blocks_per_chunk
    tail_blocks = _tail_blocks(tracker, shape, num_blocks, num_full) if blocks_per_chunk > 1 else 0
    # Under async scheduling the tokens come to be known some steps after their KV: by then the frontier is that far ahead.
    saving = Saving((num_blocks + 1) * block_tokens + max(0, frontier - known))
    if num_full <= tracker.saved_chunks and not tail_blocks:
        return saving
    chunks, saving.num_dropped = store.reserve(tracker.chain, tracker.saved_chunks, num_full, tail_blocks, tracker.blocks)
    is_planned = False
    try:
        if chunks:
            saving.plan = SavePlan(tracker.req_id, chunks)
        if saving.num_dropped:
            # The host part may have shrunk under us; go on from what is really there when the next chunk completes.
            host_blocks, _ = store.lookup(tracker.chain)
            tracker.saved_chunks = min(num_full, host_blocks // blocks_per_chunk)
        else:
            tracker.saved_chunks = max(tracker.saved_chunks, num_full)
            if tail_blocks:
                _remember_tail(tracker, store, shape, chunks, num_blocks)
        is_planned = True
    finally:
        if not is_planned:  # until the plan is the caller's, nobody else knows its tickets (I5)
            store.abort(chunks.tickets())
    return saving


def _tail_blocks(tracker: Tracker, shape: CacheShape, num_blocks: int, num_full: int) -> int:
    """Whole blocks after the last full chunk worth saving now: at the prompt's end, then block by block."""
    if num_blocks < _prompt_blocks(tracker, shape) or num_blocks <= tracker.tail_blocks:
        return 0
    return num_blocks - num_full * shape.blocks_per_chunk


def _prompt_blocks(tracker: Tracker, shape: CacheShape) -> int:
    return tracker.num_prompt_tokens // shape.block_tokens


def _remember_tail(tracker: Tracker, store: Session, shape: CacheShape, chunks: ChunkBatch, num_blocks: int) -> None:
    """Let a tail made while decoding replace the one before it; the tail at the prompt's end stays for other requests."""
    key = ChunkKey(tracker.chain.key(num_blocks - 1))
    if tracker.tail_key is not None and tracker.tail_blocks > _prompt_blocks(tracker, shape):
        _, keys, *_ = chunks.columns()
        if keys.endswith(key):  # or it is stored already, or has a null block
            store.supersede(chunks.tickets()[-1], tracker.tail_key)
    tracker.tail_blocks = num_blocks
    tracker.tail_key = key
