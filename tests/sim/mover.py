"""A mover as slow as a GPU's, and as late as it may be: a save reads its blocks only when they are about to be rewritten or
when it lands, a load lands any time before it is reported.

It checks on the way: a load must find the frame it was promised (I4), a copy must stay in blocks of its request (I6).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import ChunkKey
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.frames import FrameWindow, PrivatePart
from kvloft.transfer.layout import PagedLayout
from kvloft.transfer.mover import Finished


@dataclass
class Trouble:
    """How often things go wrong, and which frames were damaged on purpose."""

    random: random.Random
    max_delay: int = 0
    save_failure: float = 0.0
    load_failure: float = 0.0
    crash: float = 0.0
    """How often a submission raises in its middle."""
    damaged: set[int] = field(default_factory=set)
    num_loads_failed: int = 0
    num_saves_failed: int = 0
    violations: list[str] = field(default_factory=list)
    """Broken invariants: kept here because the connector turns an exception inside it into a miss."""

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a broken invariant."""
        if not holds:
            self.violations.append(otherwise)

    def delay(self) -> int:
        return self.random.randint(0, self.max_delay)


class SlowMover:
    """See ``kvloft.transfer.mover.Mover``. ``owns(req_id, blocks)`` says whether vLLM still holds them for the request."""

    usable_frames = None

    def __init__(
        self, layout: PagedLayout, frames: FrameWindow, kv: torch.Tensor, trouble: Trouble,
        owns: Callable[[str, Sequence[int]], bool],
    ) -> None:  # fmt: skip
        self._layout, self._frames, self._kv, self._trouble, self._owns = layout, frames, kv, trouble, owns
        self._part = PrivatePart(frames)
        self._saves: list[tuple[int, ChunkCopy, torch.Tensor | None]] = []
        self._loads: list[tuple[int, LoadPlan]] = []
        self._done = Finished()

    def begin_step(self, rewritten: Sequence[int], *, has_loads: bool = False) -> None:
        self._gather_before(set(rewritten))

    def _gather_before(self, rewritten: set[int]) -> None:
        """Read now what is about to be rewritten: the fence of a GPU mover (I2)."""
        self._saves = [
            (delay, copy, self._gather(copy) if gathered is None and rewritten & set(copy.blocks) else gathered)
            for delay, copy, gathered in self._saves
        ]

    def _gather(self, copy: ChunkCopy) -> torch.Tensor:
        return self._kv[list(copy.blocks)].clone()

    def _crash_now_and_then(self) -> None:
        if self._trouble.random.random() < self._trouble.crash:
            raise TypeError("a bug in a mover")

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        for plan in plans:
            self._crash_now_and_then()
            for copy in plan.chunks:
                self._trouble.expect(copy.first_block == 0 and len(copy.blocks) == copy.num_blocks, f"save of a part: {copy}")
                self._saves.append((self._trouble.delay(), copy, None))

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        self._gather_before({block for plan in plans for copy in plan.chunks for block in copy.blocks})
        for plan in plans:
            self._crash_now_and_then()
            self._loads.append((self._trouble.delay(), plan))

    def poll(self) -> Finished:
        saves, self._saves = self._saves, []
        for delay, copy, gathered in saves:
            if delay:
                self._saves.append((delay - 1, copy, gathered))
            else:
                self._land_save(copy, self._gather(copy) if gathered is None else gathered)
        loads, self._loads = self._loads, []
        for delay, plan in loads:
            if delay:
                self._loads.append((delay - 1, plan))
            else:
                self._land_load(plan)
        done, self._done = self._done, Finished()
        return done

    def drain(self) -> Finished:
        self._saves = [(0, c, g) for _, c, g in self._saves]
        self._loads = [(0, p) for _, p in self._loads]
        return self.poll()

    def close(self) -> None:
        self.drain()

    def _land_save(self, copy: ChunkCopy, gathered: torch.Tensor) -> None:
        if self._trouble.random.random() < self._trouble.save_failure:
            self._trouble.num_saves_failed += 1
            self._done.failed.append(copy.ticket)
            return
        raw = gathered.contiguous().view(torch.uint8).flatten()
        self._part.bytes[: raw.numel()] = raw
        self._part.store(copy, self._layout.digest, self._layout.page_bytes)
        self._trouble.damaged.discard(copy.frame)
        self._done.saved.append(copy.ticket)
        self._done.num_bytes_saved += raw.numel()

    def _land_load(self, plan: LoadPlan) -> None:
        bad: list[tuple[ChunkKey, str]] = []
        self._done.bad_blocks.update(plan.lost)
        expect = self._trouble.expect
        expect(self._owns(plan.req_id, plan.lost), f"lost blocks {plan.lost} are not {plan.req_id}'s (I6)")
        for copy in plan.chunks:
            expect(self._owns(plan.req_id, copy.blocks), f"load into blocks {copy.blocks}, not {plan.req_id}'s (I6)")
            if self._trouble.random.random() < self._trouble.load_failure:
                self._frames.part(copy.frame)[:8] ^= 1
                self._trouble.damaged.add(copy.frame)
            problem = self._part.fetch(copy, self._layout.digest, self._layout.page_bytes)
            if problem is None:
                self._scatter(copy)
            else:
                expect(copy.frame in self._trouble.damaged, f"frame {copy.frame} is not what was promised: {problem} (I4)")
                bad.append((copy.key, problem))
                self._done.bad_blocks.update(copy.blocks)
        if bad or plan.lost:
            self._trouble.num_loads_failed += 1
        self._done.loads.append(LoadResult(plan.req_id, plan.load_id, tuple(bad)))

    def _scatter(self, copy: ChunkCopy) -> None:
        block_bytes = self._layout.block_bytes
        end = (copy.first_block + len(copy.blocks)) * block_bytes
        payload = self._part.bytes[copy.first_block * block_bytes : end]
        rows = payload.clone().view(torch.int64).view(len(copy.blocks), -1)
        self._kv[list(copy.blocks)] = rows
        self._done.num_bytes_loaded += payload.numel()
