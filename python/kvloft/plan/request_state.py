"""The state of one request on the scheduler side: keys, block tables, saves, loads and waiting.

`RequestState` makes no decisions; it keeps tokens and keys in sync with the `LiveRequest`.
`Admission`, `LoadPlanner` and `SavePlanner` read and modify its attributes.
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
"""A number of tokens that no request reaches, but small enough for fast int comparisons in CPython.
"""


class IncomingUnits(NamedTuple):
    """Units [begin, end) of ``chain`` that a load copies to the GPU for ``req_id``."""

    req_id: ReqId
    chain: KeyChain
    begin: int
    end: int
    began_s: float


@dataclass(slots=True, eq=False)
class RequestState:
    """A request's state, from vLLM's first call for the request until it finishes."""

    live: LiveRequest
    new_chain: Callable[[RequestView, int], KeyChain]
    lookahead: int = 0
    """Number of tokens after a unit that also affect its key (see `CacheShape.lookahead`)."""
    prompt_only: bool = False
    """True if generated tokens are not saved."""

    # Tokens and keys.
    req_id: ReqId = field(init=False)
    chain: KeyChain = field(init=False)
    prefix_chain: KeyChain = field(init=False)
    """The chain of the same tokens without lookahead. If ``lookahead`` is 0, this is ``chain``
    itself.
    """
    _chains: tuple[KeyChain, ...] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    save_limit: int = field(init=False)
    """Maximum number of leading tokens to save."""
    num_confirmed: int = 0
    """Length of the token list when it was last read."""
    had_drafts: bool = False
    """True if a step has verified this request's draft tokens."""
    _embeds: tuple[EmbedRows, ...] = field(init=False)

    # GPU blocks.
    blocks: Tables = NO_TABLES
    local_tokens: int = 0
    """Number of leading tokens in vLLM's prefix cache."""
    keeps_kv: bool = False
    """True if the last admission kept the request's blocks, for example after a load."""
    num_local_units: int = 0
    """Number of leading units in vLLM's prefix cache when the request was admitted."""
    is_hit_unchecked: bool = False
    """True if the local units' writers have not been checked yet (see `BlockWriters`)."""
    num_complete: int = 0
    """Number of leading units with known tokens and complete KV at the last examination. A draft
    model's lookahead tokens may still be unknown.
    """
    num_noted: int = 0
    """Number of leading units that `BlockWriters` has recorded together with their next tokens."""

    # Saves.
    was_examined: bool = False
    """True if the request has been examined for complete units since its admission."""
    next_save: int = NEVER
    """Frontier that completes the next unit, or `NEVER` if no further unit can be saved."""
    saved_units: int = 0
    """Number of leading units that are stored or being saved."""
    save_start: int = 0
    """First unit of the last planned save, which ends at ``saved_units``."""
    token_ids: Sequence[int] = ()
    num_save_tokens: int = 0
    """Number of leading ``token_ids`` that determine the keys of the last planned save."""
    save_blocked: bool = False
    """True if saves are blocked until the next admission, for example after a wrong hit."""
    kv_outdated: bool = False
    """True if ``blocks`` holds outdated KV, for example after a reset. Saves are then blocked."""

    # Waiting for admission.
    lease: Lease | None = None
    awaited: IncomingUnits | None = None
    """Another request's load that this request waits for."""
    asked_step: int = 0
    asked_s: float = 0.0
    waiting_since: float | None = None
    waited_out: bool = False
    """True if the request has waited for the maximum time."""
    turn_at_s: float | None = None
    """Time at which the engine would start computing this prompt if it did not wait for the disk.
    """
    reads_end: int = 0
    """The `DiskPacing.num_done` value once all of the request's chunks are read."""
    num_on_disk: int = 0
    """Upper bound on the number of chunks outside host memory at the lookup."""
    slow_tokens: int = 0
    """Number of tokens to compute although their chunks are on disk, because reading the chunks is
    expected to be slower.
    """

    # Loads.
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens in the last planned load, by tier."""
    load_failed: bool = False
    """True if a load returned fewer tokens than offered. kvloft then stops offering tokens for the
    request.
    """
    yields_once: bool = False
    """True if a load has failed and vLLM has not called `match` for the request since then."""

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

    def restart_keys(self) -> None:
        """Recompute the keys after a change to the tokens or to the adapter's identity."""
        self._restart_chain()
        self.drop_lease()
        self.forget_saves()

    def confirmed_tokens(self) -> Sequence[int]:
        """Return the request's tokens. If earlier tokens have changed, restart the chains.

        When a streaming session receives new input, the input replaces the last sampled token. The
        token count alone does not reveal this, but the prompt length does. The keys are then
        recomputed; unchanged tokens get the same keys.
        """
        token_ids, num_prompt_tokens = self.live.tokens()
        num_tokens = len(token_ids)
        if num_tokens < self.num_confirmed or num_prompt_tokens != self.num_prompt_tokens:
            self.restart_keys()
            # If the removed tokens were accepted draft tokens, vLLM still counts them as computed,
            # although the new input replaces them. The last remaining token's draft KV depends on a
            # removed token.
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

        Appends only tokens that affect the first ``limit`` tokens' keys.
        """
        token_ids = self.confirmed_tokens()
        end = min(len(token_ids), limit + self.lookahead)
        for chain in self._chains:
            if (start := chain.num_tokens) < end:
                chain.append_tokens(token_ids, start, end)
        return len(token_ids)

    def start_over(self, *, keeps_kv: bool = False) -> None:
        """Drop the block tables of a preempted or readmitted request.

        If ``keeps_kv`` is True, the request keeps its blocks, which may hold KV from before a
        reset.
        """
        self.kv_outdated = self.kv_outdated and keeps_kv
        self.blocks = NO_TABLES
        self.saved_units = self.num_complete = self.num_noted = 0
        self.save_blocked = False
        self.waiting_since = self.turn_at_s = None
        self.waited_out = False

    def forget_saves(self) -> None:
        """Treat all units as unsaved."""
        self.saved_units = 0

    def fail_load(self) -> None:
        """Record that a load returned fewer tokens than offered."""
        self.load_failed = self.yields_once = True

    def take_yield(self) -> bool:
        """Return True on the first call after a failed load, so that vLLM skips the request once.

        vLLM has released the load's blocks. With sliding-window layers, computing the tokens needs
        more blocks than loading them. With too few free blocks, vLLM would stop at this request in
        every step and never reach the later requests, which hold the missing blocks.
        """
        yields, self.yields_once = self.yields_once, False
        return yields

    def record_wait(self, now: float, wait_s: float) -> bool:
        """Record that the request is waiting. Return True if it can wait longer.

        Across all reasons, a request waits for at most ``wait_s``.
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
