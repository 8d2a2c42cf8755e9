"""Values and seams that both halves share: ids, views of vLLM's state, plans and reports, and the store's protocol.

Everything that crosses from scheduler half to worker half is an immutable value from this file. It must know neither
torch nor vLLM nor the Rust extension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NewType, Protocol, Self, overload

ReqId = NewType("ReqId", str)
BlockId = NewType("BlockId", int)
ChunkKey = NewType("ChunkKey", bytes)
Ticket = NewType("Ticket", int)

NULL_BLOCK = BlockId(0)
"""vLLM's block 0 is never anybody's page."""


class ChunkCopy(NamedTuple):
    """One frame and the blocks of paged KV it is copied from (save) or to (load). A tuple, because plans make thousands.

    ``blocks[i]`` is block ``first_block + i`` of the chunk; for a save first_block is 0. ``num_blocks`` is what the frame
    holds, which the trailer must agree with; ``len(blocks)`` may be smaller for a load that needs only the chunk's end.
    """

    frame: int
    key: ChunkKey
    num_blocks: int
    first_block: int
    blocks: tuple[BlockId, ...]
    ticket: Ticket = Ticket(-1)


class BlockChunks(Sequence[ChunkCopy], ABC):
    """Chunks of one block each: rows of a store, and the blocks they go to or come from. A ChunkCopy is made when it is asked for.

    A long prompt has thousands, and a forward or the first byte of a load waits for them: whoever wants all takes columns.
    """

    __slots__ = ("blocks", "rows")
    FRAME: ClassVar[int]
    KEY: ClassVar[int]
    """Where a row has them."""

    def __init__(self, rows: Sequence[Any], blocks: Sequence[BlockId]) -> None:
        """``blocks[i]`` belongs to ``rows[i]``. Raises ValueError unless they pair up."""
        if len(rows) != len(blocks):
            raise ValueError(f"{len(rows)} chunks for {len(blocks)} blocks")
        self.rows = rows
        self.blocks = blocks

    @staticmethod
    @abstractmethod
    def _copy(row: Any, block: BlockId) -> ChunkCopy: ...

    def columns(self) -> tuple[tuple[int, ...], tuple[ChunkKey, ...]]:
        """Frames and keys."""
        every = tuple(zip(*self.rows, strict=True))
        return (every[self.FRAME], every[self.KEY]) if every else ((), ())

    def by_frame(self) -> Self:
        """The same in the order of their frames."""
        frames = [row[self.FRAME] for row in self.rows]
        if frames == sorted(frames):
            return self
        order = sorted(range(len(frames)), key=frames.__getitem__)
        return type(self)([self.rows[i] for i in order], tuple([self.blocks[i] for i in order]))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ChunkCopy: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> ChunkCopy | Self:
        if isinstance(index, slice):
            return type(self)(self.rows[index], self.blocks[index])
        return self._copy(self.rows[index], self.blocks[index])

    def __iter__(self) -> Iterator[ChunkCopy]:
        return map(self._copy, self.rows, self.blocks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | BlockChunks) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class LeasedChunks(BlockChunks):
    """Chunks of a load; rows as from `ReadLease.frames`: (frame, key, first block, number of blocks, tier)."""

    __slots__ = ()
    FRAME, KEY = 0, 1

    @staticmethod
    def _copy(row: tuple[int, bytes, int, int, str], block: BlockId) -> ChunkCopy:
        return ChunkCopy(row[0], ChunkKey(row[1]), 1, 0, (block,))


class ReservedChunks(BlockChunks):
    """Chunks of a save; rows as from `Store.reserve`: (ticket, frame, key, first block, number of blocks)."""

    __slots__ = ()
    FRAME, KEY = 1, 2

    def tickets(self) -> list[Ticket]:
        return [row[0] for row in self.rows]

    @staticmethod
    def _copy(row: tuple[int, int, bytes, int, int], block: BlockId) -> ChunkCopy:
        return ChunkCopy(row[1], ChunkKey(row[2]), 1, 0, (block,), Ticket(row[0]))


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Frames to scatter for one request, which waits until the worker reports it.

    ``lost`` are blocks that were promised to vLLM but whose frames are gone: the worker reports them as load errors.
    """

    req_id: ReqId
    load_id: int
    chunks: Sequence[ChunkCopy]
    lost: tuple[BlockId, ...] = ()


class SavePlan(NamedTuple):
    """Frames to gather for one request, from blocks it owns during this step."""

    req_id: ReqId
    chunks: Sequence[ChunkCopy]


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """How a worker maps the host tier."""

    path: str
    frame_bytes: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the worker half learns in one step.

    ``rewritten`` are blocks that this step's forward may write and that a save of an earlier step may still be reading.
    """

    step: int
    arena: ArenaSpec | None = None
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    rewritten: tuple[BlockId, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of one LoadPlan; ``bad_keys`` failed their check, with why.

    ``failed``: nothing was copied though no frame is to blame, so none is forgotten for it.
    """

    req_id: ReqId
    load_id: int
    bad_keys: tuple[tuple[ChunkKey, str], ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the worker half did: each save ticket is in exactly one of the two tuples, once per rank."""

    saved: tuple[Ticket, ...] = ()
    failed: tuple[Ticket, ...] = ()
    loads: tuple[LoadResult, ...] = ()


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

    ``embeds`` are the positions whose input is an embedding row, whatever stands in the token ids there.
    """

    adapter: tuple[str, str] | None = None
    cache_salt: str | None = None
    embeds: tuple[EmbedRows, ...] = ()
    items: tuple[MediaItem, ...] = ()


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

    @property
    def num_computed_tokens(self) -> int:
        """Tokens scheduled so far, less the drafts known to be rejected: ahead of the truth only while a step is in flight."""
        ...

    @property
    def skip_load(self) -> bool:
        """The request asked not to read any prefix cache."""
        ...

    def view(self) -> RequestView: ...


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request's first step since admission (also after a preemption): the block table is replaced."""

    req_id: ReqId
    num_computed_tokens: int
    block_ids: Sequence[BlockId]


@dataclass(frozen=True, slots=True)
class StepView:
    """What one schedule() decided, whichever of vLLM's two shapes it came in.

    The running requests come as parallel columns, vLLM's own lists, because this is read every step for every running
    request. ``grown`` are those whose block table was added to, and what was added.
    """

    new: Sequence[NewRequest] = ()
    running: Sequence[ReqId] = ()
    num_computed_tokens: Sequence[int] = ()
    grown: Sequence[tuple[ReqId, Sequence[BlockId]]] = ()
    num_scheduled_tokens: Mapping[ReqId, int] = field(default_factory=dict)
    total_scheduled_tokens: int = 0
    num_draft_tokens: Mapping[ReqId, int] = field(default_factory=dict)
    preempted: frozenset[ReqId] = frozenset()


class KeyChain(Protocol):
    """Incremental keys of one prefix, one a block; ``kvloft._core.KeyChain`` is the real one."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def add_item(self, identifier: str, start: int, num_tokens: int) -> None: ...
    def append_tokens(self, token_ids: Sequence[int], start: int = 0, stop: int | None = None, /) -> None: ...
    def append_embeds(self, rows: Any, *, dtype: str, width: int) -> None: ...
    def key(self, block: int) -> bytes: ...


class ReadLease(Protocol):
    """Pins on a prefix; see ``kvloft._core.ReadLease``."""

    def poll(self) -> tuple[int, int]: ...
    def frames(self) -> list[tuple[int, bytes, int, int, str]]: ...
    def release(self) -> None: ...


class Store(Protocol):
    """The store as the scheduler half sees it, embedded or remote; see ``kvloft._core.Store`` for the rules."""

    def lookup(self, chain: Any) -> tuple[int, int]: ...
    def acquire(self, chain: Any) -> ReadLease: ...
    def reserve(
        self, chain: Any, start: int, stop: int, tail_blocks: int = 0
    ) -> tuple[list[tuple[int, int, bytes, int, int]], int]: ...
    def commit(self, tickets: Sequence[int]) -> int: ...
    def abort(self, tickets: Sequence[int]) -> None: ...
    def discard(self, keys: Sequence[bytes]) -> int: ...
    def clear(self) -> None: ...
    def stats(self) -> dict[str, int]: ...
