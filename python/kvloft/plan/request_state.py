"""The state of one request on the scheduler side: keys, block tables, saves and its wait.

`RequestState` makes no decisions. `Admission`, `LoadPlanner` and `SavePlanner` read and change its
attributes. Its methods maintain the tokens and keys, which it reads from a `LiveRequest`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvloft.plan.leases import Lease
from kvloft.seam.batch import NO_TABLES, Tables
from kvloft.seam.ids import ReqId
from kvloft.seam.store import KeyChain
from kvloft.seam.views import EmbedRows, LiveRequest, RequestView

NEVER = (1 << 30) - 2
"""Exceeds the number of tokens of any request. CPython compares larger ints more slowly."""


class IncomingUnits(NamedTuple):
    """Units [begin, end) of ``chain`` that a load copies to the GPU for request ``req_id``."""

    req_id: ReqId
    chain: KeyChain
    begin: int
    end: int
    began_s: float


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from vLLM's first call about it until it finishes."""

    live: LiveRequest
    new_chain: Callable[[RequestView, int], KeyChain]
    lookahead: int = 0
    """Number of tokens after a unit that its key also depends on (see `CacheShape.lookahead`)."""
    prompt_only: bool = False
    """True if generated tokens are not saved."""

    # Tokens and keys.
    req_id: ReqId = field(init=False)
    chain: KeyChain = field(init=False)
    prefix_chain: KeyChain = field(init=False)
    """Chain of the same tokens without lookahead. The same object as ``chain`` if ``lookahead`` is
    0.
    """
    _chains: tuple[KeyChain, ...] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    save_limit: int = field(init=False)
    """Maximum number of leading tokens to save."""
    num_confirmed: int = 0
    """Length of the token list at the last read."""
    had_drafts: bool = False
    """True if a step has verified draft tokens of this request."""
    _embeds: tuple[EmbedRows, ...] = field(init=False)

    # GPU blocks.
    blocks: Tables = NO_TABLES
    local_tokens: int = 0
    """Number of leading tokens that vLLM's prefix cache has."""
    num_local_units: int = 0
    """Number of leading units that vLLM's prefix cache had at the admission of the request."""
    is_hit_unchecked: bool = False
    """True if the writers of the local units have not been checked yet (see `BlockWriters`)."""
    num_complete: int = 0
    """Number of leading units whose tokens are known and whose KV was complete after the step in
    which the request was last examined. The lookahead tokens of a draft model may be unknown.
    """
    num_noted: int = 0
    """Number of leading units that `BlockWriters` has recorded with their next tokens."""

    # Saves.
    was_examined: bool = False
    """True if a step has examined the request for complete units since its admission."""
    next_save: int = NEVER
    """Frontier at which the next unit is complete; `NEVER` if no further unit can be saved."""
    saved_units: int = 0
    """Number of leading units that are stored or being saved."""
    save_start: int = 0
    """First unit of the last planned save, which ends at ``saved_units``."""
    token_ids: Sequence[int] = ()
    num_save_tokens: int = 0
    """The first ``num_save_tokens`` of ``token_ids`` determine the keys of the last planned save.
    """
    save_blocked: bool = False
    """True if ``blocks`` may be outdated. Nothing is saved until vLLM assigns a new table."""
    kv_outdated: bool = False
    """True if KV in ``blocks`` predates a reset. Nothing is saved until it is computed again."""

    # Waiting for admission.
    lease: Lease | None = None
    awaited: IncomingUnits | None = None
    """Load of another request that this request waits for."""
    asked_step: int = 0
    asked_s: float = 0.0
    waiting_since: float | None = None
    waited_out: bool = False
    """True if the request has used up its waiting time."""
    turn_at_s: float | None = None
    """Time at which the engine would have started to compute the request without a wait for the
    disk.
    """
    reads_end: int = 0
    """Value of `DiskPacing.num_done` once the request's chunks have been read."""
    num_on_disk: int = 0
    """Maximum number of chunks that were not in host memory at the lookup."""
    slow_tokens: int = 0
    """Number of tokens on disk that the request does not wait for, because computing them is
    expected to be faster.
    """

    # Loads.
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens of the last planned load, by tier."""
    load_failed: bool = False
    """True if a load delivered less than was offered. The request then gets no further offers."""
    yields_once: bool = False
    """True if a load has failed and vLLM has not asked about the request since."""

    def __post_init__(self) -> None:
        self.req_id = self.live.req_id
        self._restart_chain()

    def _restart_chain(self) -> None:
        view = self.live.view()
        _, self.num_prompt_tokens = self.live.tokens()
        savable_tokens = NEVER if view.savable_tokens is None else view.savable_tokens
        self.save_limit = min(savable_tokens, self.num_prompt_tokens if self.prompt_only else NEVER)
        self._embeds = view.embeds
        self.chain = self.prefix_chain = self.new_chain(view, self.lookahead)
        self._chains = (self.chain,)
        if self.lookahead:
            self.prefix_chain = self.new_chain(view, 0)
            self._chains = (self.chain, self.prefix_chain)
        for item in view.items:
            for chain in self._chains:
                chain.add_item(item.identifier, item.start, item.num_tokens)

    def confirmed_tokens(self) -> Sequence[int]:
        """Return the tokens of the request, and restart the chains if they are no longer a prefix.

        A streaming session replaces its last sampled token when it receives new input. The number
        of tokens alone does not show this, but the length of the prompt does. The keys are then
        computed again; equal tokens have equal keys.
        """
        token_ids, num_prompt_tokens = self.live.tokens()
        num_tokens = len(token_ids)
        if num_tokens < self.num_confirmed or num_prompt_tokens != self.num_prompt_tokens:
            self._restart_chain()
            self.drop_lease()
            self.forget_saves()
            # vLLM still counts draft tokens accepted after the cut as computed, although the new
            # input replaces them. The draft KV of the last remaining token depends on the removed
            # token.
            self.kv_outdated |= self.had_drafts or self.lookahead > 0
        self.num_confirmed = num_tokens
        for rows in self._embeds:
            for chain in self._chains:
                if rows.start + rows.num_rows > (start := chain.num_tokens):
                    chain.append_tokens(token_ids, start, rows.start)
                    chain.append_embeds(rows.rows, dtype=rows.dtype, width=rows.width)
        return token_ids

    def extend_chains(self, limit: int = NEVER) -> int:
        """Append confirmed tokens to the chains, and return the number of confirmed tokens.

        Appends only the tokens on which the keys of the first ``limit`` tokens depend.
        """
        token_ids = self.confirmed_tokens()
        end = min(len(token_ids), limit + self.lookahead)
        for chain in self._chains:
            if (start := chain.num_tokens) < end:
                chain.append_tokens(token_ids, start, end)
        return len(token_ids)

    def start_over(self, *, keeps_kv: bool = False) -> None:
        """Drop the block tables of a request that was preempted or is admitted again.

        With ``keeps_kv``, the request keeps its blocks, so KV that predates a reset is still there.
        """
        self.kv_outdated = self.kv_outdated and keeps_kv
        self.blocks = NO_TABLES
        self.saved_units = self.num_complete = self.num_noted = 0
        self.save_blocked = False
        self.waiting_since = self.turn_at_s = None
        self.waited_out = False

    def forget_saves(self) -> None:
        """Treat all units as not saved."""
        self.saved_units = 0

    def fail_load(self) -> None:
        """Record that a load delivered less than was offered."""
        self.load_failed = self.yields_once = True

    def take_yield(self) -> bool:
        """Return True, once after a failed load, if vLLM should pass over the request.

        vLLM has released the blocks of the load. With sliding-window layers, computing needs more
        blocks than the load. If too few are free, vLLM would stop at this request in every step and
        never reach the requests behind it, which hold the missing blocks.
        """
        yields, self.yields_once = self.yields_once, False
        return yields

    def record_wait(self, now: float, wait_s: float) -> bool:
        """Record that the request waits, and return True if it may wait longer.

        Its total waiting time, for all reasons together, is limited to ``wait_s``.
        """
        if self.waiting_since is None:
            self.waiting_since = now
        self.waited_out = self.waited_out or now - self.waiting_since >= wait_s
        return not self.waited_out

    def drop_lease(self) -> None:
        """Release the lease, if any (I5)."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None
