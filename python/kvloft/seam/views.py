"""vLLM's requests and steps as kvloft reads them. Must not import vLLM."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId, ReqId


@dataclass(frozen=True, slots=True)
class EmbedRows:
    """Prompt embeddings from position ``start`` on: bytes of a C-contiguous array."""

    start: int
    num_rows: int
    rows: Any
    dtype: str
    width: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A multimodal item: its identifier and the positions that it covers."""

    identifier: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """The inputs of a request's keys other than token ids.

    ``embeds`` are the positions whose input is an embedding; the token ids there are ignored.
    ``savable_tokens`` limits saves to that many leading tokens, because no later request can have
    the keys after them.
    """

    adapter: tuple[str, str] | None = None
    cache_salt: str | None = None
    embeds: tuple[EmbedRows, ...] = ()
    items: tuple[MediaItem, ...] = ()
    savable_tokens: int | None = None


class LiveRequest(Protocol):
    """A vLLM request, which changes between steps. Read only, and only inside a scheduler hook."""

    @property
    def req_id(self) -> ReqId: ...
    def tokens(self) -> tuple[Sequence[int], int]:
        """Return vLLM's list of known tokens, which a streaming session can shorten, and the
        prompt's length, which its next input changes. Called for hundreds of requests per step.
        """
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Return the tokens scheduled so far without draft tokens known to be rejected.

        It is too high only while a step is in flight.
        """
        ...

    @property
    def skip_load(self) -> bool:
        """Return True if the request must not read any prefix cache."""
        ...

    @property
    def saves(self) -> Literal["all", "prompt"] | None:
        """Return the part of the request to save; None if the request does not set it."""
        ...

    def view(self) -> RequestView: ...


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request in its first step after admission or preemption; its block table is replaced."""

    req_id: ReqId
    num_computed_tokens: int
    block_ids: Sequence[BlockId]


class BoundaryState(NamedTuple):
    """``block`` has the state after ``num_tokens`` once this step's forward is done."""

    req_id: ReqId
    group: int
    block: BlockId
    num_tokens: int


class StepView(NamedTuple):
    """The decisions of one schedule(), in either of vLLM's two formats.

    Running requests are parallel columns, which are vLLM's lists, because they are read in every
    step. ``grown`` are the requests whose block table grew, with the added blocks.
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
    """Returns a request's current block tables, with null blocks where a group freed its blocks;
    set if vLLM frees blocks of running requests. None: the tables change by ``grown`` only.
    """
    states: Sequence[BoundaryState] = ()
