"""What the scheduler half remembers of one request: its keys, its block table, and how far it is saved.

A tracker never decides; `loads` and `saves` do. It must not know vLLM: it reads a `LiveRequest`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvloft.plan.flights import Flight
from kvloft.plan.pins import Pins
from kvloft.seam.ids import BlockId, ChunkKey
from kvloft.seam.store import KeyChain, ReadLease
from kvloft.seam.views import LiveRequest, RequestView

NEVER = 1 << 62
"""A token count no request reaches."""


class Tracker:
    """One request's state; plain attributes, changed by `loads`, `saves` and `core` only."""

    __slots__ = (
        "_new_chain",
        "_num_prompt_tokens",
        "_prompt_only",
        "_view",
        "asked_s",
        "asked_step",
        "blocks",
        "chain",
        "flight",
        "had_drafts",
        "kv_outdated",
        "lease",
        "lease_tokens",
        "live",
        "load_failed",
        "local_tokens",
        "pins",
        "req_id",
        "save_blocked",
        "saved_chunks",
        "stop_counting",
        "tail_blocks",
        "tail_key",
        "waited_out",
        "waiting_since",
    )

    def __init__(self, live: LiveRequest, new_chain: Callable[[RequestView], KeyChain], *, prompt_only: bool = False) -> None:
        """``prompt_only``: what it generates is not saved."""
        self._new_chain = new_chain
        self._prompt_only = prompt_only
        self.live = live
        self.req_id = live.req_id
        self.had_drafts = False
        """Some step verified draft tokens of this request."""
        self.blocks: list[BlockId] = []
        self.saved_chunks = 0
        """Leading chunks that are stored, being saved, or were found stored already."""
        self.save_blocked = False
        """``blocks`` may not be the request's table: nothing may be saved until it gets one afresh."""
        self.kv_outdated = False
        """KV in ``blocks`` predates a reset: nothing may be saved until it is computed anew."""
        self.tail_blocks = 0
        self.tail_key: ChunkKey | None = None
        self.lease: ReadLease | None = None
        self.lease_tokens = 0
        self.pins: Pins | None = None
        """While vLLM has not admitted it: what its lease is counted for."""
        self.stop_counting: Callable[[Tracker], None] | None = None
        self.flight: Flight | None = None
        """Another request's load that it waits for."""
        self.asked_step = 0
        self.asked_s = 0.0
        self.local_tokens = 0
        self.waiting_since: float | None = None
        self.waited_out = False
        self.load_failed = False
        """A load of this request brought less than was promised: it computes the rest of its life by itself."""
        self._restart_chain()

    def _restart_chain(self) -> None:
        view = self.live.view()
        self._view = view
        self._num_prompt_tokens = self.live.num_prompt_tokens
        self.chain = self._new_chain(view)
        for item in view.items:
            self.chain.add_item(item.identifier, item.start, item.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    @property
    def save_limit(self) -> int:
        """Tokens that are saved at most."""
        return self._num_prompt_tokens if self._prompt_only else NEVER

    def extend_chain(self, limit: int = NEVER) -> int:
        """Take in confirmed tokens that came since the last call, as far as position ``limit``; returns how many there are now.

        A streaming session replaces its last sampled token when it takes new input, which a length alone does not
        show; its prompt length does. Then the keys are made afresh (they come out equal where the tokens are equal).
        """
        token_ids = self.live.token_ids
        known = len(token_ids)
        if self.live.num_prompt_tokens != self._num_prompt_tokens or known < self.chain.num_tokens:
            self._restart_chain()
            self.drop_lease()
            self.saved_chunks = 0
            self.tail_blocks = 0
            self.tail_key = None
            # Accepted drafts behind the point where a session cut its output stay computed for vLLM, under the new input.
            self.kv_outdated |= self.had_drafts
        start = self.chain.num_tokens
        end = min(known, limit)
        if start >= end:
            return known
        for rows in self._view.embeds:
            behind = rows.start + rows.num_rows
            if behind <= start:
                continue
            if rows.start > start:
                self.chain.append_tokens(token_ids, start, rows.start)
            self.chain.append_embeds(rows.rows, dtype=rows.dtype, width=rows.width)
            start = behind
        if start < end:
            self.chain.append_tokens(token_ids, start, end)
        return known

    def start_over(self, *, keeps_kv: bool = False) -> None:
        """The request's block table is void. Unless it ``keeps_kv``, what it computes from here on comes from position 0."""
        self.kv_outdated = self.kv_outdated and keeps_kv
        self.blocks = []
        self.saved_chunks = 0
        self.save_blocked = False
        self.waiting_since = None
        self.waited_out = False

    def drop_lease(self) -> None:
        """Unpin what the last match pinned (I5)."""
        if self.stop_counting is not None:
            self.stop_counting(self)
        if self.lease is not None:
            self.lease.release()
            self.lease = None
