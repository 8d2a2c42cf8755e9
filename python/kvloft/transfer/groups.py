"""A mover for several KV cache groups: one mover a group, over the same frames.

Layers of different groups share memory, and a block is one group's at a time; so each group has its own layout, and a plan's chunks
go to the mover of their group. A load has ended once every group's part of it has. It must not know engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvloft.seam.batch import ChunkBatch, GroupBatches
from kvloft.seam.ids import BlockId
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.mover import Finished, Mover


@dataclass(slots=True)
class _Load:
    """A load whose groups have not all reported."""

    remaining: int
    results: list[LoadResult] = field(default_factory=list)

    def result(self) -> LoadResult:
        bad = tuple(key for result in self.results for key in result.bad_keys)
        return replace(self.results[0], bad_keys=bad, failed=any(result.failed for result in self.results))


class GroupedMover:
    """Moves `GroupBatches` by the mover of each group."""

    def __init__(self, movers: Sequence[Mover]) -> None:
        self._movers = movers
        self._loads: dict[int, _Load] = {}
        self._done = Finished()

    @property
    def usable_frames(self) -> int | None:
        known = [usable for mover in self._movers if (usable := mover.usable_frames) is not None]
        return min(known) if known else None

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        for mover in self._movers:
            mover.begin_step(rewritten, has_loads=has_loads)

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        for group, mover in enumerate(self._movers):
            if own := [SavePlan(plan.req_id, batch) for plan in plans for nth, batch in _batches(plan) if nth == group]:
                mover.submit_saves(own)

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        for plan in plans:
            self._done.bad_blocks.update(plan.lost)
            groups = [] if plan.lost else _batches(plan)  # a part of it would be of no use
            if not groups:
                self._done.loads.append(LoadResult(plan.req_id, plan.load_id))
                continue
            self._loads[plan.load_id] = _Load(len(groups))
        for group, mover in enumerate(self._movers):
            own = [replace(plan, chunks=batch) for plan in plans if not plan.lost for nth, batch in _batches(plan) if nth == group]
            if own:
                mover.submit_loads(own)

    def poll(self) -> Finished:
        return self._join([mover.poll() for mover in self._movers])

    def drain(self) -> Finished:
        return self._join([mover.drain() for mover in self._movers])

    def close(self) -> None:
        for mover in self._movers:
            mover.close()

    def _join(self, parts: Sequence[Finished]) -> Finished:
        done, self._done = self._done, Finished()
        for part in parts:
            done.saved += part.saved
            done.failed += part.failed
            done.bad_blocks |= part.bad_blocks
            done.num_bytes_saved += part.num_bytes_saved
            done.num_bytes_loaded += part.num_bytes_loaded
            done.seconds_saving += part.seconds_saving
            done.seconds_loading += part.seconds_loading
            for result in part.loads:
                load = self._loads[result.load_id]
                load.results.append(result)
                if len(load.results) == load.remaining:
                    done.loads.append(self._loads.pop(result.load_id).result())
        return done


def _batches(plan: SavePlan | LoadPlan) -> Sequence[tuple[int, ChunkBatch]]:
    return plan.chunks.batches if isinstance(plan.chunks, GroupBatches) else ()
