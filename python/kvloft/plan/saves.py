"""Save planning: which chunks became complete in this step, and where they go.

A chunk is saved in the step that completes it, while its request owns the blocks (I2, I6). Only confirmed tokens whose KV
this or an earlier step writes count: ``min(frontier, known)``, where the frontier leaves drafts out (I7). A save that cannot
have a frame now is dropped and counted; it is tried again when the request's next chunk completes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvloft.plan.tracker import NEVER, Geometry, Tracker
from kvloft.types import NULL_BLOCK, ChunkCopy, ChunkKey, SavePlan, Store, Ticket


@dataclass(slots=True)
class Saving:
    """What one call of `plan_save` did; ``supersedes`` maps a tail's ticket to the tail it replaces.

    ``next_save`` is the frontier at which the next chunk (or, with longer chunks, the next block) is complete.
    """

    next_save: int
    plan: SavePlan | None = None
    num_dropped: int = 0
    supersedes: dict[Ticket, ChunkKey] = field(default_factory=dict)


def plan_save(tracker: Tracker, store: Store, geometry: Geometry, frontier: int) -> Saving:
    """Reserve frames for every chunk of ``tracker`` that is complete at the end of this step.

    ``frontier``: tokens whose KV is in the request's blocks by then, drafts left out.
    """
    known = tracker.extend_chain()
    if tracker.save_blocked or tracker.kv_outdated:
        return Saving(NEVER)
    limit = min(frontier, known, len(tracker.blocks) * geometry.block_tokens)
    num_full = limit // geometry.chunk_tokens
    tail_blocks = _tail_blocks(tracker, geometry, limit, num_full)
    saving = Saving(limit - limit % geometry.block_tokens + geometry.block_tokens)
    if num_full <= tracker.saved_chunks and not tail_blocks:
        return saving
    reserved, saving.num_dropped = store.reserve(tracker.chain, tracker.saved_chunks, num_full, tail_blocks)
    copies = [copy for row in reserved if (copy := _chunk_copy(tracker, store, row)) is not None]
    if copies:
        saving.plan = SavePlan(tracker.req_id, tuple(copies))
    if saving.num_dropped:
        # The host part may have shrunk under us; go on from what is really there when the next chunk completes.
        host_blocks, _ = store.lookup(tracker.chain)
        tracker.saved_chunks = min(num_full, host_blocks // geometry.blocks_per_chunk)
    else:
        tracker.saved_chunks = max(tracker.saved_chunks, num_full)
        if tail_blocks:
            _remember_tail(tracker, geometry, saving, limit)
    return saving


def _chunk_copy(tracker: Tracker, store: Store, row: tuple[int, int, bytes, int, int]) -> ChunkCopy | None:
    ticket, frame, key, first_block, num_blocks = row
    blocks = tuple(tracker.blocks[first_block : first_block + num_blocks])
    if len(blocks) != num_blocks or NULL_BLOCK in blocks:
        store.abort([ticket])
        return None
    return ChunkCopy(frame, ChunkKey(key), num_blocks, 0, blocks, Ticket(ticket))


def _tail_blocks(tracker: Tracker, geometry: Geometry, limit: int, num_full: int) -> int:
    """Whole blocks after the last full chunk worth saving now: at the prompt's end, then block by block."""
    block_tokens = geometry.block_tokens
    if geometry.blocks_per_chunk == 1 or limit < _prompt_end(tracker, geometry):
        return 0
    tail_blocks = (limit - num_full * geometry.chunk_tokens) // block_tokens
    tail_end = num_full * geometry.chunk_tokens + tail_blocks * block_tokens
    return tail_blocks if tail_end > tracker.tail_tokens else 0


def _prompt_end(tracker: Tracker, geometry: Geometry) -> int:
    return tracker.num_prompt_tokens - tracker.num_prompt_tokens % geometry.block_tokens


def _remember_tail(tracker: Tracker, geometry: Geometry, saving: Saving, limit: int) -> None:
    """Let a tail made while decoding replace the one before it; the tail at the prompt's end stays for other requests."""
    tail_tokens = limit - limit % geometry.block_tokens
    key = ChunkKey(tracker.chain.key(tail_tokens // geometry.block_tokens - 1))
    tickets = [copy.ticket for copy in saving.plan.chunks if copy.key == key] if saving.plan else []
    if tickets and tracker.tail_key is not None and tracker.tail_tokens > _prompt_end(tracker, geometry):
        saving.supersedes[tickets[0]] = tracker.tail_key
    tracker.tail_tokens = tail_tokens
    tracker.tail_key = key
