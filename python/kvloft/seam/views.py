"""Views of vLLM's requests and steps that do not depend on vLLM's types."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId, ReqId


@dataclass(frozen=True, slots=True)
class EmbedRows:
    """Prompt embeddings for ``num_rows`` positions starting at ``start``.

    ``rows`` holds the bytes of a C-contiguous array.
    """

    start: int
    num_rows: int
    rows: Any
    dtype: str
    width: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """The identifier of a multimodal item and the positions that it covers."""

    identifier: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """The inputs to a request's keys, other than token ids.

    ``embeds`` lists the positions whose input is an embedding. Token ids at these positions are
    ignored. ``savable_tokens`` is the number of leading tokens that may be saved. No later request
    can match the keys of the remaining tokens.
    """

    adapter: tuple[str, str] | None = None
    cache_salt: str | None = None
    embeds: tuple[EmbedRows, ...] = ()
    items: tuple[MediaItem, ...] = ()
    savable_tokens: int | None = None


class LiveRequest(Protocol):
    """A read-only view of a vLLM request. vLLM modifies the request between steps, so read the view
    only inside a scheduler hook.
    """

    @property
    def req_id(self) -> ReqId: ...
    def tokens(self) -> tuple[Sequence[int], int]:
        """Return vLLM's list of known tokens and the prompt length.

        A streaming session can shorten the list, and the session's next input changes the prompt
        length. This method must be fast, because it is called for hundreds of requests per step.
        """
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Return the number of tokens scheduled so far, excluding rejected draft tokens.

        The number includes draft tokens of in-flight steps, which may still be rejected.
        """
        ...

    @property
    def skip_load(self) -> bool:
        """Return True if no chunks may be loaded for the request."""
        ...

    @property
    def saves(self) -> Literal["all", "prompt"] | None:
        """Return which tokens to save, or None if the request does not say."""
        ...

    def view(self) -> RequestView: ...
    def uses_adapter(self, number: int) -> bool:
        """Return True if the request uses the LoRA adapter whose number in vLLM is ``number``."""
        ...


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request in its first step after admission or preemption, with a new block table."""

    req_id: ReqId
    num_computed_tokens: int
    block_ids: Sequence[BlockId]


class BoundaryState(NamedTuple):
    """The state after ``num_tokens`` tokens, stored in ``block``. The state is complete after this
    step's forward pass.
    """

    req_id: ReqId
    group: int
    block: BlockId
    num_tokens: int


class StepView(NamedTuple):
    """The decisions of a ``schedule()`` call, independent of vLLM's two output formats.

    ``running`` and ``num_computed_tokens`` are vLLM's own parallel lists, because copying the lists
    in every step would be slow. ``grown`` lists the blocks added to each request whose block table
    grew.
    """

    new: Sequence[NewRequest] = ()
    running: Sequence[ReqId] = ()
    num_computed_tokens: Sequence[int] = ()
    grown: Sequence[tuple[ReqId, Sequence[BlockId]]] = ()
    num_scheduled_tokens: Mapping[ReqId, int] = MappingProxyType({})
    total_scheduled_tokens: int = 0
    num_draft_tokens: Mapping[ReqId, int] = MappingProxyType({})
    preempted: frozenset[ReqId] = frozenset()
    tables: Callable[[ReqId], Tables | None] | None = None
    """Returns a request's current block tables, with null blocks in place of freed blocks.
    None if vLLM does not free blocks of running requests.
    """
    states: Sequence[BoundaryState] = ()
