"""StepPlan and StepReport are the immutable messages between the scheduler and worker sides."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.shape import ArenaSpec

Chunks = Any
"""A `kvloft.seam.batch.ChunkBatch`, or () if there are no chunks."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks to copy to the GPU for one request, which waits until the workers report the result.

    ``chunks`` can be empty. ``lost`` lists blocks that were offered to vLLM but whose chunks are no
    longer available. The worker reports these blocks as load errors.
    """

    req_id: ReqId
    load_id: int
    chunks: Chunks = ()
    lost: tuple[BlockId, ...] = ()

    def blocks(self) -> list[BlockId]:
        """Return all offered blocks, including lost blocks."""
        return [*(self.chunks.block_ids() if self.chunks else ()), *self.lost]


class SavePlan(NamedTuple):
    """Chunks to copy to host memory from blocks that a request owns during this step."""

    req_id: ReqId
    chunks: Chunks


class StepPlan(NamedTuple):
    """The workers' tasks for one step.

    ``rewritten`` lists blocks that this step's forward pass may write while an earlier step's save
    still reads them. ``sibling_blocks`` lists blocks that another MultiConnector child may write
    when the step begins, while a save still reads them. ``prompt_step`` is the step's number among
    the steps that compute prompt tokens, or None if this step computes none.
    """

    arena: ArenaSpec | None = None
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    rewritten: tuple[BlockId, ...] = ()
    sibling_blocks: tuple[BlockId, ...] = ()
    prompt_step: int | None = None


LAYOUT: Final = "layout"
"""The reason reported for a chunk whose memory layout, as recorded in its trailer, differs from the
worker's.
"""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of a LoadPlan on one rank.

    ``bad_keys`` holds the key of each chunk that failed verification, with the reason. ``failed``
    is True if nothing was copied. The store then keeps the chunks, because they may be valid.
    """

    req_id: ReqId
    load_id: int
    bad_keys: tuple[tuple[ChunkKey, str], ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results from one rank. Each save ticket is reported once, in ``saved`` or in ``failed``.

    ``misfits`` lists the tickets in ``failed`` whose chunk did not fit into a frame for compressed
    chunks. ``usable_bytes`` is (rank, n) if n has changed: the rank can copy to the arena's first n
    bytes. ``prompt_step`` comes from the step's plan.
    """

    saved: tuple[Ticket, ...] = ()
    failed: tuple[Ticket, ...] = ()
    loads: tuple[LoadResult, ...] = ()
    usable_bytes: tuple[int, int] | None = None
    misfits: tuple[Ticket, ...] = ()
    prompt_step: int | None = None
