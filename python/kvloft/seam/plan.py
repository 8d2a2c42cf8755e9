"""The messages between the two sides, as immutable values: StepPlan and StepReport."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.shape import ArenaSpec

Chunks = Any
"""A `kvloft.seam.batch.ChunkBatch`, or () for none."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Frames to scatter for one request, which waits until the worker reports the load.

    ``chunks`` is empty if none is available. ``lost`` are blocks that were offered to vLLM but
    whose frames are gone: the worker reports them as load errors.
    """

    req_id: ReqId
    load_id: int
    chunks: Chunks = ()
    lost: tuple[BlockId, ...] = ()

    def blocks(self) -> list[BlockId]:
        """Return all offered blocks, including lost ones."""
        return [*(self.chunks.block_ids() if self.chunks else ()), *self.lost]


class SavePlan(NamedTuple):
    """Frames to gather for one request, from blocks it owns during this step."""

    req_id: ReqId
    chunks: Chunks


class StepPlan(NamedTuple):
    """The work of one step.

    ``rewritten`` are blocks that this step's forward may write while a save of an earlier step
    still reads them.
    """

    step: int
    arena: ArenaSpec | None = None
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    rewritten: tuple[BlockId, ...] = ()


LAYOUT: Final = "layout"
"""The reason for a failed check if the trailer names another memory layout."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one LoadPlan. ``bad_keys``: chunks that failed their check, with the reason.

    ``failed``: nothing was copied, for a reason other than the frames, so no chunk is removed.
    """

    req_id: ReqId
    load_id: int
    bad_keys: tuple[tuple[ChunkKey, str], ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of the worker side. Each save ticket is in exactly one of the two tuples, once per
    rank.

    ``misfits`` are those of ``failed`` whose chunk did not fit a frame for compressed chunks.
    ``usable_bytes`` is (rank, n) if n changed: the rank can copy to the first n bytes of the arena.
    """

    saved: tuple[Ticket, ...] = ()
    failed: tuple[Ticket, ...] = ()
    loads: tuple[LoadResult, ...] = ()
    usable_bytes: tuple[int, int] | None = None
    misfits: tuple[Ticket, ...] = ()
