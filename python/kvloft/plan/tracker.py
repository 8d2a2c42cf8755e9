"""What the scheduler half remembers of one request: its keys, its block table, and how far it is saved.

A tracker never decides; `queue`, `loads` and `saves` do. It must not know vLLM: it reads a `LiveRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvloft.plan.pins import Lease
from kvloft.seam.batch import NO_TABLES, Tables
from kvloft.seam.ids import ReqId
from kvloft.seam.store import KeyChain
from kvloft.seam.views import EmbedRows, LiveRequest, RequestView

NEVER = (1 << 30) - 2
"""A token count no request reaches; the interpreter compares larger ints more slowly."""
NOT_LOOKED = NEVER + 1
"""Another: no step has looked at the request since it was admitted."""


class Flight(NamedTuple):
    """Blocks [begin, end) of ``chain`` on their way to the GPU, for request ``req_id``."""

    req_id: ReqId
    chain: KeyChain
    begin: int
    end: int
    began_s: float


@dataclass(slots=True, eq=False)
class Tracker:
    """One request's state: plain attributes, which others of this package change."""

    live: LiveRequest
    new_chain: Callable[[RequestView], KeyChain]
    lookahead: int = 0
    """Tokens behind a block that its key stands for, too."""
    prompt_only: bool = False
    """What it generates is not saved."""
    req_id: ReqId = field(init=False)
    chain: KeyChain = field(init=False)
    num_prompt_tokens: int = field(init=False)
    save_limit: int = field(init=False)
    """Tokens that are saved at most."""
    blocks: Tables = NO_TABLES
    had_drafts: bool = False
    """Some step verified draft tokens of this request."""
    num_confirmed: int = 0
    """Tokens that it had when they were last looked at."""
    next_save: int = NOT_LOOKED
    """Frontier at which its next save can be planned."""
    saved_chunks: int = 0
    """Leading chunks that are stored, being saved, or were found stored already."""
    save_blocked: bool = False
    """``blocks`` may not be the request's table: nothing may be saved until it gets one afresh."""
    kv_outdated: bool = False
    """KV in ``blocks`` predates a reset: nothing may be saved until it is computed anew."""
    lease: Lease | None = None
    flight: Flight | None = None
    """Another request's load that it waits for."""
    local_tokens: int = 0
    num_local_blocks: int = 0
    """Of ``blocks``, those that vLLM had itself when it admitted the request."""
    is_hit_unchecked: bool = False
    """Nobody has looked yet who wrote those."""
    num_complete: int = 0
    """Leading blocks whose KV and keys are complete at the end of the step that looked at it last."""
    num_noted: int = 0
    """Leading blocks that `BlockWriters` has recorded."""
    asked_step: int = 0
    asked_s: float = 0.0
    waiting_since: float | None = None
    waited_out: bool = False
    turn_at_s: float | None = None
    """When the engine would have begun to compute it, had it not waited for the disk."""
    reads_end: int = 0
    """Value of `DiskPacing.num_done` at which its chunks will have been read."""
    num_on_disk: int = 0
    """Chunks that it lacked in host memory when it was looked up."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """By tier, of the load planned last."""
    load_failed: bool = False
    """A load of this request brought less than was promised: it computes the rest of its life by itself."""
    gives_way: bool = False
    """A load failed, and vLLM has not asked since."""
    _embeds: tuple[EmbedRows, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.req_id = self.live.req_id
        self._restart_chain()

    def _restart_chain(self) -> None:
        view = self.live.view()
        self.num_prompt_tokens = self.live.num_prompt_tokens
        savable_tokens = NEVER if view.savable_tokens is None else view.savable_tokens
        self.save_limit = min(savable_tokens, self.num_prompt_tokens if self.prompt_only else NEVER)
        self._embeds = view.embeds
        self.chain = self.new_chain(view)
        for item in view.items:
            self.chain.add_item(item.identifier, item.start, item.num_tokens)

    def confirmed_tokens(self) -> Sequence[int]:
        """The request's tokens, of which ``chain`` has taken in no other and every embedding row.

        A streaming session replaces its last sampled token when it takes new input, which a length alone does not
        show; its prompt length does. Then the keys are made afresh (they come out equal where the tokens are equal).
        """
        token_ids, num_prompt_tokens = self.live.tokens()
        num_tokens = len(token_ids)
        if num_tokens < self.num_confirmed or num_prompt_tokens != self.num_prompt_tokens:
            self._restart_chain()
            self.drop_lease()
            self.forget_saves()
            # Accepted drafts behind the point where a session cut its output stay computed for vLLM, under the new input.
            # A drafter's KV of the last token that stays knows the one that was cut off.
            self.kv_outdated |= self.had_drafts or self.lookahead > 0
        self.num_confirmed = num_tokens
        if self._embeds:
            self._append_embeds(token_ids)
        return token_ids

    def _append_embeds(self, token_ids: Sequence[int]) -> None:
        for rows in self._embeds:
            if rows.start + rows.num_rows > (start := self.chain.num_tokens):
                self.chain.append_tokens(token_ids, start, rows.start)
                self.chain.append_embeds(rows.rows, dtype=rows.dtype, width=rows.width)

    def extend_chain(self, limit: int = NEVER) -> int:
        """Take in confirmed tokens that came since the last call, as far as a block that ends at position ``limit`` needs;
        returns how many there are now.
        """
        token_ids = self.confirmed_tokens()
        start, end = self.chain.num_tokens, min(len(token_ids), limit + self.lookahead)
        if start < end:
            self.chain.append_tokens(token_ids, start, end)
        return len(token_ids)

    def start_over(self, *, keeps_kv: bool = False) -> None:
        """The request's block table is void. Unless it ``keeps_kv``, what it computes from here on comes from position 0."""
        self.kv_outdated = self.kv_outdated and keeps_kv
        self.blocks = NO_TABLES
        self.saved_chunks = self.num_complete = self.num_noted = 0
        self.save_blocked = False
        self.waiting_since = self.turn_at_s = None
        self.waited_out = False

    def forget_saves(self) -> None:
        """Nothing that was saved of it is known to be there."""
        self.saved_chunks = 0

    def fail_load(self) -> None:
        """A load of it brought less than was promised."""
        self.load_failed = self.gives_way = True

    def gives_way_once(self) -> bool:
        """Whether vLLM asks for the first time since a load failed; then it is to pass to the requests behind this one.

        It has given the load's blocks back. Where all tokens need more blocks than the load did (windows do) and there are too
        few, vLLM would stop at this request in every step, and never see those behind it whose loads ended, which hold the rest.
        """
        gives_way, self.gives_way = self.gives_way, False
        return gives_way

    def drop_lease(self) -> None:
        """Unpin what the last match pinned (I5)."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None
