"""All that crosses between the halves: a StepPlan to the workers, a StepReport back. Immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.shape import ArenaSpec

Chunks = Any
"""A `kvloft.seam.batch.ChunkBatch`, or () for none."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Frames to scatter for one request, which waits until the worker reports it; no ``chunks``: none of them is there.

    ``lost`` are blocks that were promised to vLLM but whose frames are gone: the worker reports them as load errors.
    """

    req_id: ReqId
    load_id: int
    chunks: Chunks = ()
    lost: tuple[BlockId, ...] = ()

    def blocks(self) -> list[BlockId]:
        """All that were promised, lost or not."""
        return [*(self.chunks.block_ids() if self.chunks else ()), *self.lost]


class SavePlan(NamedTuple):
    """Frames to gather for one request, from blocks it owns during this step."""

    req_id: ReqId
    chunks: Chunks


class StepPlan(NamedTuple):
    """All that the worker half learns in one step.

    ``rewritten`` are blocks that this step's forward may write and that a save of an earlier step may still be reading.
    """

    step: int
    arena: ArenaSpec | None = None
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    rewritten: tuple[BlockId, ...] = ()


LAYOUT: Final = "layout"
"""Why a chunk failed its check if its trailer names another memory layout."""


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
    """What the worker half did: each save ticket is in exactly one of the two tuples, once per rank.

    ``usable_frames`` is (rank, how many of the first frames it can copy to), where that changed.
    """

    saved: tuple[Ticket, ...] = ()
    failed: tuple[Ticket, ...] = ()
    loads: tuple[LoadResult, ...] = ()
    usable_frames: tuple[int, int] | None = None
