"""The state of one request on the scheduler side: keys, block tables, saves, and what it waits for.

`RequestState` decides nothing. `Admission`, `LoadPlanner` and `SavePlanner` read and change its
attributes; everything that concerns the request's tokens and keys is a method here. It reads a
`LiveRequest` and must not depend on vLLM.
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
"""More tokens than any request has. CPython compares larger ints more slowly."""


class IncomingUnits(NamedTuple):
    """Units [begin, end) of ``chain``, which a load copies to the GPU for request ``req_id``."""

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
    """Tokens after a unit that its key also depends on (see `CacheShape.lookahead`)."""
    prompt_only: bool = False
    """Generated tokens are not saved."""

    # Tokens and keys.
    req_id: ReqId = field(init=False)
    chain: KeyChain = field(init=False)
    prefix_chain: KeyChain = field(init=False)
    """The same tokens with keys without a lookahead; ``chain`` itself if there is none."""
    _chains: tuple[KeyChain, ...] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    save_limit: int = field(init=False)
    """At most this many leading tokens are saved."""
    num_confirmed: int = 0
    """Length of the token list when it was last read."""
    had_drafts: bool = False
    """Some step verified draft tokens of this request."""
    _embeds: tuple[EmbedRows, ...] = field(init=False)

    # GPU blocks.
    blocks: Tables = NO_TABLES
    local_tokens: int = 0
    """Tokens that vLLM has in its own prefix cache."""
    num_local_blocks: int = 0
    """Leading units of ``blocks`` that vLLM's prefix cache had when it admitted the request."""
    is_hit_unchecked: bool = False
    """The writers of those units have not been checked yet (see `BlockWriters`)."""
    num_complete: int = 0
    """Leading units whose tokens are known and whose KV was complete at the end of the last step
    that examined it. The tokens that a draft model looks ahead at may be unknown.
    """
    num_noted: int = 0
    """Leading units that `BlockWriters` has recorded with the tokens that follow them."""

    # Saves.
    was_examined: bool = False
    """A step examined it for complete units since it was admitted."""
    next_save: int = NEVER
    """Frontier at which the next unit is complete; `NEVER` if none will be."""
    saved_units: int = 0
    """Leading units that are stored, are being saved, or were found stored."""
    save_start: int = 0
    """First unit of the save planned last; it ends at ``saved_units``."""
    token_ids: Sequence[int] = ()
    num_save_tokens: int = 0
    """The first ``num_save_tokens`` of ``token_ids`` decide the keys of that save."""
    save_blocked: bool = False
    """``blocks`` may be outdated. Nothing is saved until vLLM assigns a new table."""
    kv_outdated: bool = False
    """KV in ``blocks`` predates a reset. Nothing is saved until it is computed again."""

    # Waiting for admission.
    lease: Lease | None = None
    awaited: IncomingUnits | None = None
    """Another request's load that this one waits for."""
    asked_step: int = 0
    asked_s: float = 0.0
    waiting_since: float | None = None
    waited_out: bool = False
    """It has waited as long as it may."""
    turn_at_s: float | None = None
    """When the engine would have started to compute it, had it not waited for the disk."""
    reads_end: int = 0
    """Value of `DiskPacing.num_done` at which its chunks will have been read."""
    num_on_disk: int = 0
    """Chunks that were not in host memory at its lookup."""
    slow_tokens: int = 0
    """Tokens on disk that it does not wait for, because computing them is expected to be faster."""

    # Loads.
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the load planned last, by tier."""
    load_failed: bool = False
    """A load delivered less than was offered. Nothing is offered to this request again."""
    yields_once: bool = False
    """A load failed, and vLLM has not called since."""

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
        """Return the request's tokens, after checking that the chains are prefixes of them.

        A streaming session replaces its last sampled token when it takes new input. The length
        alone does not show this, but the length of the prompt does. The keys are then computed
        again; equal tokens give equal keys.
        """
        token_ids, num_prompt_tokens = self.live.tokens()
        num_tokens = len(token_ids)
        if num_tokens < self.num_confirmed or num_prompt_tokens != self.num_prompt_tokens:
            self._restart_chain()
            self.drop_lease()
            self.forget_saves()
            # vLLM still counts accepted drafts after the cut as computed, now for the new input.
            # A draft model's KV of the last token that remains depends on the token cut off.
            self.kv_outdated |= self.had_drafts or self.lookahead > 0
        self.num_confirmed = num_tokens
        for rows in self._embeds:
            for chain in self._chains:
                if rows.start + rows.num_rows > (start := chain.num_tokens):
                    chain.append_tokens(token_ids, start, rows.start)
                    chain.append_embeds(rows.rows, dtype=rows.dtype, width=rows.width)
        return token_ids

    def extend_chains(self, limit: int = NEVER) -> int:
        """Append confirmed tokens to the chains and return the number of confirmed tokens.

        Appends only what the keys of the first ``limit`` tokens need.
        """
        token_ids = self.confirmed_tokens()
        end = min(len(token_ids), limit + self.lookahead)
        for chain in self._chains:
            if (start := chain.num_tokens) < end:
                chain.append_tokens(token_ids, start, end)
        return len(token_ids)

    def start_over(self, *, keeps_kv: bool = False) -> None:
        """Drop the block tables: the request was preempted or is admitted again.

        ``keeps_kv``: it gets the same blocks again, so KV that predates a reset is still in them.
        """
        self.kv_outdated = self.kv_outdated and keeps_kv
        self.blocks = NO_TABLES
        self.saved_units = self.num_complete = self.num_noted = 0
        self.save_blocked = False
        self.waiting_since = self.turn_at_s = None
        self.waited_out = False

    def forget_saves(self) -> None:
        """Count no unit as saved."""
        self.saved_units = 0

    def fail_load(self) -> None:
        """Record that a load delivered less than was offered."""
        self.load_failed = self.yields_once = True

    def take_yield(self) -> bool:
        """Return True for the first call after a failed load: vLLM should pass over the request.

        vLLM has released the load's blocks. If computing needs more blocks than the load did (with
        windows it does) and too few are free, vLLM would stop at this request in every step, and
        never reach the requests behind it that hold the other blocks.
        """
        yields, self.yields_once = self.yields_once, False
        return yields

    def has_time(self, now: float, wait_s: float) -> bool:
        """Return True if it may wait longer: it has waited less than ``wait_s`` for all reasons
        together. Starts the time with the first call.
        """
        if self.waiting_since is None:
            self.waiting_since = now
        self.waited_out = self.waited_out or now - self.waiting_since >= wait_s
        return not self.waited_out

    def drop_lease(self) -> None:
        """Unpin the chunks of the last lookup (I5)."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None
