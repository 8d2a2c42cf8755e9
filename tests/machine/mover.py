"""Runs kvloft's real CpuMover with the timing of a GPU.

A save reads its blocks when it is submitted, when the blocks are about to be rewritten, or when the
save completes. A load completes at any time before it is reported. The ledger records the content
of saved frames. This module does not depend on the scheduler.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cpu import CpuMover
from kvloft.transfer.frames import FrameWindow, GroupFrames
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished

from .ledger import Ledger


@dataclass
class Trouble:
    """Rates of copy faults, and the maximum delay of copies."""

    random: random.Random
    max_delay: int = 0
    save_failure: float = 0.0
    load_failure: float = 0.0
    crash: float = 0.0
    num_saves_failed: int = 0
    num_loads_failed: int = 0
    damaged: set[bytes] = field(default_factory=set)
    """Keys of deliberately damaged frames."""
    strangers: float = 0.0
    """Probability that a dead engine's worker writes to a frame before the frame is sealed or after
    it is checked.
    """

    def delay(self) -> int:
        return self.random.randint(0, self.max_delay) if self.max_delay else 0

    def happens(self, rate: float) -> bool:
        return rate > 0 and self.random.random() < rate

    def end(self) -> None:
        """Disable all faults so that no later copy fails."""
        self.max_delay, self.save_failure, self.load_failure, self.crash, self.strangers = (
            0,
            0.0,
            0.0,
            0.0,
            0.0,
        )


class Haunted:
    """An arena in which a dead engine's worker writes to a frame just before the frame is sealed
    and just after the frame is checked.
    """

    def __init__(
        self, arena: Any, frames: FrameWindow, trouble: Trouble, frame_of: dict[bytes, int]
    ) -> None:
        self._arena, self._frames, self._trouble, self._frame_of = arena, frames, trouble, frame_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)

    def seal(self, part: dict[str, Any]) -> Any:
        self._write(part["key"])
        return self._arena.seal(part)

    def check(self, part: dict[str, Any]) -> Any:
        problem = self._arena.check(part)
        if self._write(part["key"]):
            self._trouble.damaged.add(part["key"])  # the next load finds this frame damaged
        return problem

    def _write(self, key: bytes) -> bool:
        frame = self._frame_of.get(key)  # None if a different group's mover has the frame
        if frame is None or not self._trouble.happens(self._trouble.strangers):
            return False
        self._frames.part(frame)[:8] ^= 1
        return True


@dataclass(eq=False)
class Saving:
    """One chunk that is being copied to a frame."""

    delay: int
    req_id: Any
    batch: Any
    blocks: frozenset[int]
    group: int


class SlowMover:
    """Implements ``kvloft.transfer.mover.Mover``.

    ``owns(req_id, blocks)`` returns True if vLLM still holds the blocks for the request. With
    ``is_early``, saves read their blocks before the next step begins.
    """

    usable_bytes = None

    def __init__(
        self,
        layouts: Sequence[PagedLayout],
        frames_of: Sequence[GroupFrames],
        trouble: Trouble,
        ledger: Ledger,
        owns: Callable[[str, Sequence[int]], bool],
        *,
        is_early: bool = False,
    ) -> None:
        self._inner, frames = CpuMover(layouts, frames_of), frames_of[0].raw
        self._frames, self._trouble, self._ledger, self._owns = frames, trouble, ledger, owns
        self._block_bytes = [layout.block_bytes for layout in layouts]
        self._frame_of = dict[bytes, int]()
        haunted: Any = [frames, trouble, self._frame_of]
        for part in {id(part): part for part in self._inner._parts}.values():
            part._arena = Haunted(part._arena, *haunted)  # type: ignore[assignment]
        frames._arena = Haunted(frames.memory.owner, *haunted)  # type: ignore[attr-defined]
        self._saves, self._is_early = list[Saving](), is_early
        """Saves in flight in all groups. A block belongs to one group at a time."""
        self._loads: list[tuple[int, LoadPlan]] = []
        self._done = Finished()

    def begin_step(self, rewritten: Sequence[int], *, has_loads: bool = False) -> None:
        self._gather_before(rewritten)

    def _gather_before(self, rewritten: Sequence[int]) -> None:
        """Gather blocks that are about to be rewritten, like the fence of a GPU mover (I2)."""
        for saving in [saving for saving in self._saves if not saving.blocks.isdisjoint(rewritten)]:
            self._saves.remove(saving)
            self._gather(saving)

    def _gather(self, saving: Saving) -> None:
        copy = saving.batch[0]
        self._frame_of[copy.key] = copy.frame
        self._inner.submit_saves([SavePlan(saving.req_id, saving.batch)])
        raw = self._frames.part(copy.frame)[: copy.num_blocks * self._block_bytes[saving.group]]
        self._ledger.landed(copy.ticket, raw.view(torch.int64).tolist())

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        for plan in plans:
            self._crash_now_and_then()
            for group, batch in plan.chunks.by_group():
                for i, copy in enumerate(batch):
                    saving = Saving(
                        self._trouble.delay(),
                        plan.req_id,
                        batch[i : i + 1],
                        frozenset(copy.blocks),
                        group,
                    )
                    if self._is_early or self._trouble.random.random() < 0.5:
                        self._land_save(saving)  # a copy can start as soon as it is submitted
                    else:
                        self._saves.append(saving)

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        self._gather_before([block for plan in plans for block in plan.blocks()])
        for plan in plans:
            self._crash_now_and_then()
            self._loads.append((self._trouble.delay(), plan))

    def _crash_now_and_then(self) -> None:
        if self._trouble.happens(self._trouble.crash):
            raise TypeError("a bug in a mover")

    def poll(self) -> Finished:
        for saving in list(self._saves):
            if saving.delay:
                saving.delay -= 1
            else:
                self._saves.remove(saving)
                self._land_save(saving)
        loads, self._loads = self._loads, []
        for delay, plan in loads:
            if delay:
                self._loads.append((delay - 1, plan))
            else:
                self._land_load(plan)
        self._take(self._inner.poll())
        done, self._done = self._done, Finished()
        return done

    def _take(self, done: Finished) -> None:
        self._done.saved += done.saved
        self._done.failed += done.failed
        self._done.loads += done.loads
        self._done.bad_blocks |= done.bad_blocks
        self._done.num_bytes_saved += done.num_bytes_saved
        self._done.num_bytes_loaded += done.num_bytes_loaded

    def drain(self) -> Finished:
        for saving in self._saves:
            saving.delay = 0
        self._loads = [(0, plan) for _, plan in self._loads]
        return self.poll()

    def close(self) -> None:
        self.drain()

    def _land_save(self, saving: Saving) -> None:
        if self._trouble.happens(self._trouble.save_failure):
            self._trouble.num_saves_failed += 1
            self._done.failed.append(saving.batch[0].ticket)
        else:
            self._gather(saving)

    def _land_load(self, plan: LoadPlan) -> None:
        expect = self._ledger.expect
        expect(
            self._owns(plan.req_id, plan.blocks()),
            f"load into {plan.blocks()}, not all of {plan.req_id}'s (I6)",
        )
        for copy in plan.chunks:
            self._frame_of[copy.key] = copy.frame
            if self._trouble.happens(self._trouble.load_failure):
                self._frames.part(copy.frame)[:8] ^= 1
                self._trouble.num_loads_failed += 1
                self._trouble.damaged.add(copy.key)
        self._inner.submit_loads([plan])
        self._take(self._inner.poll())
        for key, problem in self._done.loads[-1].bad_keys:
            expect(
                key in self._trouble.damaged,
                f"{plan.req_id}: a frame has wrong content: {problem} (I4)",
            )
