"""StepPlan and StepReport, the immutable messages between the two sides."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.shape import ArenaSpec

Chunks = Any
"""A `kvloft.seam.batch.ChunkBatch`, or () if there are no chunks."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks to copy to the GPU for one request, which waits until the workers report the load.

    ``chunks`` can be empty. ``lost`` are blocks that were offered to vLLM but whose chunks are no
    longer available; the worker reports them as load errors.
    """

    req_id: ReqId
    load_id: int
    chunks: Chunks = ()
    lost: tuple[BlockId, ...] = ()

    def blocks(self) -> list[BlockId]:
        """Return all offered blocks, including lost blocks."""
        return [*(self.chunks.block_ids() if self.chunks else ()), *self.lost]


class SavePlan(NamedTuple):
    """Chunks to copy to host memory for one request, from blocks that it owns during this step."""

    req_id: ReqId
    chunks: Chunks


class StepPlan(NamedTuple):
    """The work of one step.

    ``rewritten`` are blocks that the forward pass of this step may write to while a save of an
    earlier step still reads them.
    """

    arena: ArenaSpec | None = None
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    rewritten: tuple[BlockId, ...] = ()


LAYOUT: Final = "layout"
"""Problem reported for a chunk whose trailer records a different memory layout."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one LoadPlan on one rank.

    ``bad_keys`` has the chunks that failed verification, with the reason. ``failed`` is True if
    nothing was copied although the chunks may be valid, so no chunk is removed.
    """

    req_id: ReqId
    load_id: int
    bad_keys: tuple[tuple[ChunkKey, str], ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """Results of one rank, which reports each save ticket once, in ``saved`` or in ``failed``.

    ``misfits`` are the tickets in ``failed`` whose chunk did not fit a frame for compressed chunks.
    ``usable_bytes`` is set when it changes: (rank, n) means that the rank can copy to the first n
    bytes of the arena.
    """

    saved: tuple[Ticket, ...] = ()
    failed: tuple[Ticket, ...] = ()
    loads: tuple[LoadResult, ...] = ()
    usable_bytes: tuple[int, int] | None = None
    misfits: tuple[Ticket, ...] = ()
