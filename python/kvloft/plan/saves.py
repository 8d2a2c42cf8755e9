"""Save planning: which chunks became complete in this step, and where they go.

A chunk is saved in the step that completes it, while its request owns the blocks (I2, I6). Only confirmed tokens whose KV
this or an earlier step writes count: ``min(frontier, known)``, where the frontier leaves drafts out (I7). A save that cannot
have a frame now is dropped and counted; it is tried again when the request's next chunk completes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains

from kvloft.plan.copies import MANY, chunk_copies, collector_at_rest
from kvloft.plan.tracker import NEVER, Tracker
from kvloft.seam.batch import ChunkCopy, ReservedChunks
from kvloft.seam.ids import NULL_BLOCK, ChunkKey, Ticket
from kvloft.seam.plan import SavePlan
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Store

_Reserved = Sequence[tuple[int, int, bytes, int, int]]
"""As from `Store.reserve`: ticket, frame, key, first block, number of blocks."""

_FEW = 2
"""Columns have their price too: with so few chunks, as a step of decoding completes, one by one is cheaper."""


@dataclass(slots=True)
class Saving:
    """What one call of `plan_save` did; ``supersedes`` is a tail's ticket and the tail it replaces.

    ``reserved`` is what the plan holds, ``next_save`` the frontier at which the next chunk (or, with longer chunks, the next block)
    will be complete and known.
    """

    next_save: int
    plan: SavePlan | None = None
    num_dropped: int = 0
    reserved: _Reserved = ()
    supersedes: tuple[Ticket, ChunkKey] | None = None


def plan_save(tracker: Tracker, store: Store, shape: CacheShape, frontier: int) -> Saving:
    """Reserve frames for every chunk of ``tracker`` that is complete at the end of this step.

    ``frontier``: tokens whose KV is in the request's blocks by then, drafts left out.
    """
    frontier = min(frontier, tracker.save_limit)
    known = tracker.extend_chain(frontier)
    if tracker.save_blocked or tracker.kv_outdated:
        return Saving(NEVER)
    block_tokens, blocks_per_chunk = shape.full.block_tokens, shape.full.blocks_per_chunk
    num_blocks = min(frontier // block_tokens, known // block_tokens, len(tracker.blocks))
    num_full = num_blocks // blocks_per_chunk
    tail_blocks = _tail_blocks(tracker, shape, num_blocks, num_full) if blocks_per_chunk > 1 else 0
    # Under async scheduling the tokens come to be known some steps after their KV: by then the frontier is that far ahead.
    saving = Saving((num_blocks + 1) * block_tokens + max(0, frontier - known))
    if num_full <= tracker.saved_chunks and not tail_blocks:
        return saving
    is_planned = False
    try:
        if num_full - tracker.saved_chunks < MANY:
            _reserve(saving, tracker, store, shape, num_full, tail_blocks)
        else:
            with collector_at_rest():
                _reserve(saving, tracker, store, shape, num_full, tail_blocks)
        if saving.num_dropped:
            # The host part may have shrunk under us; go on from what is really there when the next chunk completes.
            host_blocks, _ = store.lookup(tracker.chain)
            tracker.saved_chunks = min(num_full, host_blocks // blocks_per_chunk)
        else:
            tracker.saved_chunks = max(tracker.saved_chunks, num_full)
            if tail_blocks:
                _remember_tail(tracker, shape, saving, num_blocks)
        is_planned = True
    finally:
        if not is_planned:  # until the plan is the caller's, nobody else knows its tickets (I5)
            store.abort([ticket for ticket, *_ in saving.reserved])
    return saving


def _reserve(saving: Saving, tracker: Tracker, store: Store, shape: CacheShape, num_full: int, tail_blocks: int) -> None:
    """Reserve what is missing up to ``num_full`` chunks and the tail behind them, and plan its copies."""
    saving.reserved, saving.num_dropped = store.reserve(tracker.chain, tracker.saved_chunks, num_full, tail_blocks)
    if len(saving.reserved) > _FEW:
        plan = _plan_of_blocks if shape.full.blocks_per_chunk == 1 else _plan_of_columns
        saving.plan = plan(tracker, saving.reserved)
    if saving.reserved and saving.plan is None:
        saving.plan = _plan_one_by_one(saving, tracker, store)


def _plan_of_blocks(tracker: Tracker, reserved: _Reserved) -> SavePlan | None:
    """What `_plan_one_by_one` makes, with nothing made for a chunk, each of which has one block; None if there is a null block."""
    table, first, last = tracker.blocks, reserved[0][3], reserved[-1][3]
    if last - first + 1 == len(reserved):  # a store reserves in the prefix's order
        blocks = tuple(table[first : last + 1])
    else:
        blocks = tuple([table[row[3]] for row in reserved])
    return None if NULL_BLOCK in blocks else SavePlan(tracker.req_id, ReservedChunks(reserved, blocks))


def _plan_of_columns(tracker: Tracker, reserved: _Reserved) -> SavePlan | None:
    """What `_plan_one_by_one` makes, with less done in Python for each chunk; None if there is a null block."""
    table = tracker.blocks
    tickets, frames, keys, firsts, nums = zip(*reserved, strict=True)
    blocks = [tuple(table[first : first + num]) for first, num in zip(firsts, nums, strict=True)]
    has_null = any(map(contains, blocks, repeat(NULL_BLOCK)))
    return None if has_null else SavePlan(tracker.req_id, chunk_copies(frames, keys, nums, blocks, tickets))


def _plan_one_by_one(saving: Saving, tracker: Tracker, store: Store) -> SavePlan | None:
    """A copy into each reserved frame, but for chunks with a null block: their frames are given back."""
    copies: list[ChunkCopy] = []
    for row in saving.reserved:
        ticket, frame, key, first_block, num = row
        blocks = tuple(tracker.blocks[first_block : first_block + num])
        if NULL_BLOCK in blocks:
            saving.reserved = [other for other in saving.reserved if other is not row]
            store.abort([ticket])
        else:
            copies.append(ChunkCopy(frame, ChunkKey(key), num, 0, blocks, Ticket(ticket)))
    return SavePlan(tracker.req_id, tuple(copies)) if copies else None


def _tail_blocks(tracker: Tracker, shape: CacheShape, num_blocks: int, num_full: int) -> int:
    """Whole blocks after the last full chunk worth saving now: at the prompt's end, then block by block."""
    if num_blocks < _prompt_blocks(tracker, shape) or num_blocks <= tracker.tail_blocks:
        return 0
    return num_blocks - num_full * shape.full.blocks_per_chunk


def _prompt_blocks(tracker: Tracker, shape: CacheShape) -> int:
    return tracker.num_prompt_tokens // shape.full.block_tokens


def _remember_tail(tracker: Tracker, shape: CacheShape, saving: Saving, num_blocks: int) -> None:
    """Let a tail made while decoding replace the one before it; the tail at the prompt's end stays for other requests."""
    key = ChunkKey(tracker.chain.key(num_blocks - 1))
    tickets = [copy.ticket for copy in saving.plan.chunks if copy.key == key] if saving.plan else []
    if tickets and tracker.tail_key is not None and tracker.tail_blocks > _prompt_blocks(tracker, shape):
        saving.supersedes = tickets[0], tracker.tail_key
    tracker.tail_blocks = num_blocks
    tracker.tail_key = key
