"""Save planning: which chunks became complete in this step, and where they go.

A chunk is saved in the step that completes it, while its request owns the blocks (I2, I6). Only confirmed tokens whose KV
this or an earlier step writes count: ``min(frontier, known)``, where the frontier leaves drafts out (I7). A save that cannot
have a frame now is dropped and counted; it is tried again when the request's next chunk completes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import not_
from typing import cast

from kvloft.plan.copies import chunk_copies
from kvloft.plan.tracker import NEVER, Geometry, Tracker
from kvloft.types import NULL_BLOCK, BlockId, ChunkKey, SavePlan, Store, Ticket

_Reserved = Sequence[tuple[int, int, bytes, int, int]]
"""As from `Store.reserve`: ticket, frame, key, first block, number of blocks."""


@dataclass(slots=True)
class Saving:
    """What one call of `plan_save` did; ``supersedes`` is a tail's ticket and the tail it replaces.

    ``next_save`` is the frontier at which the next chunk (or, with longer chunks, the next block) will be complete and known.
    Of the plan, ``tickets`` are those of its chunks, ``blocks`` the blocks of all of them, and ``readers`` the ticket of each.
    """

    next_save: int
    plan: SavePlan | None = None
    num_dropped: int = 0
    supersedes: tuple[Ticket, ChunkKey] | None = None
    tickets: Sequence[Ticket] = ()
    blocks: Sequence[BlockId] = ()
    readers: Iterable[Ticket] = ()


def plan_save(tracker: Tracker, store: Store, geometry: Geometry, frontier: int) -> Saving:
    """Reserve frames for every chunk of ``tracker`` that is complete at the end of this step.

    ``frontier``: tokens whose KV is in the request's blocks by then, drafts left out.
    """
    known = tracker.extend_chain()
    if tracker.save_blocked or tracker.kv_outdated:
        return Saving(NEVER)
    block_tokens, blocks_per_chunk = geometry.block_tokens, geometry.blocks_per_chunk
    num_blocks = min(frontier // block_tokens, known // block_tokens, len(tracker.blocks))
    num_full = num_blocks // blocks_per_chunk
    tail_blocks = _tail_blocks(tracker, geometry, num_blocks, num_full) if blocks_per_chunk > 1 else 0
    # Under async scheduling the tokens come to be known some steps after their KV: by then the frontier is that far ahead.
    saving = Saving((num_blocks + 1) * block_tokens + max(0, frontier - known))
    if num_full <= tracker.saved_chunks and not tail_blocks:
        return saving
    reserved, saving.num_dropped = store.reserve(tracker.chain, tracker.saved_chunks, num_full, tail_blocks)
    if reserved:
        _fill(saving, tracker, store, reserved)
    if saving.num_dropped:
        # The host part may have shrunk under us; go on from what is really there when the next chunk completes.
        host_blocks, _ = store.lookup(tracker.chain)
        tracker.saved_chunks = min(num_full, host_blocks // blocks_per_chunk)
    else:
        tracker.saved_chunks = max(tracker.saved_chunks, num_full)
        if tail_blocks:
            _remember_tail(tracker, geometry, saving, num_blocks)
    return saving


def _fill(saving: Saving, tracker: Tracker, store: Store, reserved: _Reserved) -> None:
    """Plan a copy into each reserved frame, but for chunks with a null block: their frames are given back."""
    table = tracker.blocks
    numbers, frames, keys, firsts, nums = zip(*reserved, strict=True)
    tickets = cast("tuple[Ticket, ...]", numbers)
    if nums.count(1) == len(nums):
        column = list(map(table.__getitem__, firsts))
        blocks: list[tuple[BlockId, ...]] = list(zip(column, strict=True))
        readers: Iterable[Ticket] = tickets
    else:
        blocks = [tuple(table[first : first + num]) for first, num in zip(firsts, nums, strict=True)]
        column = list(chain.from_iterable(blocks))
        readers = chain.from_iterable(map(repeat, tickets, map(len, blocks)))
    if NULL_BLOCK in column:
        is_null = [NULL_BLOCK in of_chunk for of_chunk in blocks]
        store.abort(list(compress(tickets, is_null)))
        if rest := list(compress(reserved, map(not_, is_null))):
            _fill(saving, tracker, store, rest)
        return
    saving.plan = SavePlan(tracker.req_id, chunk_copies(frames, keys, nums, blocks, tickets))
    saving.tickets, saving.blocks, saving.readers = tickets, column, readers


def _tail_blocks(tracker: Tracker, geometry: Geometry, num_blocks: int, num_full: int) -> int:
    """Whole blocks after the last full chunk worth saving now: at the prompt's end, then block by block."""
    if num_blocks < _prompt_blocks(tracker, geometry) or num_blocks <= tracker.tail_blocks:
        return 0
    return num_blocks - num_full * geometry.blocks_per_chunk


def _prompt_blocks(tracker: Tracker, geometry: Geometry) -> int:
    return tracker.num_prompt_tokens // geometry.block_tokens


def _remember_tail(tracker: Tracker, geometry: Geometry, saving: Saving, num_blocks: int) -> None:
    """Let a tail made while decoding replace the one before it; the tail at the prompt's end stays for other requests."""
    key = ChunkKey(tracker.chain.key(num_blocks - 1))
    tickets = [copy.ticket for copy in saving.plan.chunks if copy.key == key] if saving.plan else []
    if tickets and tracker.tail_key is not None and tracker.tail_blocks > _prompt_blocks(tracker, geometry):
        saving.supersedes = tickets[0], tracker.tail_key
    tracker.tail_blocks = num_blocks
    tracker.tail_key = key
