"""vLLM's requests and steps as kvloft reads them. It must not know vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId, ReqId


@dataclass(frozen=True, slots=True)
class EmbedRows:
    """Prompt-embedding rows at positions [start, start + num_rows): raw bytes of a C-contiguous array."""

    start: int
    num_rows: int
    rows: Any
    dtype: str
    width: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A multimodal item by its identifier and the positions it covers."""

    identifier: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """What decides a request's keys besides its token ids.

    ``embeds`` are the positions whose input is an embedding row, whatever stands in the token ids there. With ``savable_tokens``,
    only that many leading tokens are worth saving: no later request can have the keys of those after them.
    """

    adapter: tuple[str, str] | None = None
    cache_salt: str | None = None
    embeds: tuple[EmbedRows, ...] = ()
    items: tuple[MediaItem, ...] = ()
    savable_tokens: int | None = None


class LiveRequest(Protocol):
    """A vLLM request as it changes: only read, and only inside a scheduler hook."""

    @property
    def req_id(self) -> ReqId: ...
    @property
    def token_ids(self) -> Sequence[int]:
        """vLLM's own list: prompt and confirmed output. It may shrink in a streaming session."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Changes only when a streaming session takes its next input."""
        ...

    def tokens(self) -> tuple[Sequence[int], int]:
        """The two above, in one call: some of hundreds of requests are asked in every step."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens scheduled so far, less the drafts known to be rejected: ahead of the truth only while a step is in flight."""
        ...

    @property
    def skip_load(self) -> bool:
        """The request asked not to read any prefix cache."""
        ...

    @property
    def saves(self) -> Literal["all", "prompt"] | None:
        """What of it to save; None: it does not say."""
        ...

    def view(self) -> RequestView: ...


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request's first step since admission (also after a preemption): the block table is replaced."""

    req_id: ReqId
    num_computed_tokens: int
    block_ids: Sequence[BlockId]


class BoundaryState(NamedTuple):
    """``block`` of a state group will hold the state after the first ``num_tokens`` tokens when this step's forward is done."""

    req_id: ReqId
    group: int
    block: BlockId
    num_tokens: int


class StepView(NamedTuple):
    """What one schedule() decided, whichever of vLLM's two shapes it came in.

    The running requests come as parallel columns, vLLM's own lists, because this is read every step for every running
    request. ``grown`` are those whose block table was added to, and what was added.
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
    """Where vLLM frees blocks of running requests: a request's block tables as they are now, with null blocks for those that a
    group gave up. None: tables grow by ``grown`` and are kept."""
    states: Sequence[BoundaryState] = ()
