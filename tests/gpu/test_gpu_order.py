"""Tests the order in which an engine's work, saves and loads run on a GPU with submitters. The
results of random steps are compared with torch clones.
"""

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

from batches import batch_of
from gpu_support import Frames, Paged, block_outermost, copies_of, make_mover, part_bytes_for, save

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda.mover import SLOTS_AHEAD, CudaMover
from kvloft.transfer.mover import Finished

RING = (2, 1 << 20)
BLOCKS = 64
DEADLINE_S = 30.0
LONG_CYCLES = 4_000_000_000
"""Number of GPU cycles in about two seconds."""


def rig() -> tuple[Paged, Frames, CudaMover]:
    """Return 64 blocks of 256 KiB, twice as many frames, and a mover with slots of 1 MiB."""
    paged = block_outermost(4, BLOCKS, 64 << 10)
    frames = Frames(2 * BLOCKS, part_bytes_for(paged.block_bytes))
    return paged, frames, make_mover(paged, frames, 1, ring=RING)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_submitters_send_everything_by_themselves() -> None:
    paged, _, mover = rig()
    paged.randomize(1)
    want = paged.snapshot()
    copies = copies_of(range(BLOCKS), [[block] for block in range(BLOCKS)])
    mover.begin_step(())
    mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
    until(lambda: not mover.is_behind)
    assert len(mover.drain().saved) == BLOCKS
    paged.poison()
    mover.begin_step(())
    mover.submit_loads([LoadPlan(ReqId("r"), 1, batch_of(copies))])
    until(lambda: not mover.is_behind)
    assert not mover.drain().bad_blocks
    assert torch.equal(paged.buffers[0], want[0])
    mover.close()


@pytest.mark.parametrize("verb", ["save", "load"])
def test_few_bytes_are_on_the_gpu_at_a_time(verb: str) -> None:
    """The engine's own copies wait behind copies that are queued on the GPU."""
    paged, _, mover = rig()
    copies = copies_of(range(BLOCKS), [[block] for block in range(BLOCKS)])
    paged.randomize(1)
    save(mover, copies)
    gate = torch.cuda.Event()
    torch.cuda._sleep(LONG_CYCLES)
    gate.record()
    mover.begin_step(())
    if verb == "save":
        mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
    else:
        mover.submit_loads([LoadPlan(ReqId("r"), 1, batch_of(copies))])
    time.sleep(0.05)
    flying = sum(
        flight.piece.num_bytes for half in (mover._saves, mover._loads) for flight in half.in_flight
    )
    assert not gate.query(), "the GPU should be busy"
    assert 0 < flying <= SLOTS_AHEAD * RING[1] < BLOCKS * paged.block_bytes
    done = mover.drain()
    assert len(done.saved) == (BLOCKS if verb == "save" else 0) and not done.bad_blocks
    mover.close()


@pytest.mark.parametrize("is_submitted", ["before", "after"])
def test_a_load_waits_neither_for_its_steps_forward_nor_for_a_later_one(is_submitted: str) -> None:
    """vLLM 0.29 and older releases submit loads before their step's forward pass, and newer
    releases submit them after it.
    """
    paged, _, mover = rig()
    paged.randomize(1)
    want = paged.snapshot()
    copies = copies_of(range(BLOCKS), [[block] for block in range(BLOCKS)])
    save(mover, copies)
    paged.poison()
    mover.begin_step((), has_loads=is_submitted == "after")
    if is_submitted == "before":
        mover.submit_loads([LoadPlan(ReqId("r"), 1, batch_of(copies))])
    torch.cuda._sleep(LONG_CYCLES)
    gate = torch.cuda.Event()
    gate.record()
    if is_submitted == "after":
        mover.submit_loads([LoadPlan(ReqId("r"), 1, batch_of(copies))])
    mover.begin_step(())
    until(lambda: bool(mover.poll().loads))
    assert not gate.query(), "the load waited for a forward pass that does not use its blocks"
    assert torch.equal(paged.buffers[0], want[0])
    mover.close()


def test_a_save_waits_for_no_later_step() -> None:
    paged, _, mover = rig()
    paged.randomize(1)
    copies = copies_of(range(BLOCKS), [[block] for block in range(BLOCKS)])
    mover.begin_step(())
    mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies))])
    torch.cuda._sleep(LONG_CYCLES)
    gate = torch.cuda.Event()
    gate.record()
    mover.begin_step(())
    mover.submit_saves([SavePlan(ReqId("r"), batch_of(copies_of([BLOCKS], [[0]], first_key=1000)))])
    saved: list[int] = []

    def first_are_saved() -> bool:
        saved.extend(mover.poll().saved)
        return len(saved) >= BLOCKS

    until(first_are_saved)
    assert not gate.query(), "the save waited for a forward pass launched after it"
    assert set(saved) == {copy.ticket for copy in copies}
    assert len(mover.drain().saved) == 1
    mover.close()


class Engine:
    """Writes, saves and loads random blocks, and keeps a clone of each frame's expected content."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.paged, self.frames, self.mover = rig()
        self.paged.randomize(seed)
        self.pages = self.paged.buffers[0].view(BLOCKS, -1)
        self.busy = torch.randn(2048, 2048, device="cuda")
        self.stored: dict[int, torch.Tensor] = {}
        self.copy_of: dict[int, ChunkCopy] = {}
        self.free, self.ready = list(range(2 * BLOCKS)), list[int]()
        self.saving: dict[int, ChunkCopy] = {}
        self.loading: dict[int, list[ChunkCopy]] = {}
        self.num_saves = self.num_checked = 0

    def step(self, number: int) -> None:
        """Run one forward pass that rewrites blocks while older copies are in flight.

        Loads write only to blocks that this pass does not rewrite.
        """
        rng = self.rng
        held = {copy.blocks[0] for copies in self.loading.values() for copy in copies}
        usable = [block for block in range(BLOCKS) if block not in held]
        rng.shuffle(usable)
        rewritten, others = usable[: len(usable) // 3], usable[len(usable) // 3 :]
        read = {copy.blocks[0] for copy in self.saving.values()}
        self.mover.begin_step(
            [BlockId(block) for block in rewritten if block in read], has_loads=number % 2 == 0
        )
        frames = rng.sample(self.ready, min(len(self.ready), rng.randrange(20)))
        targets, others = others[: len(frames)], others[len(frames) :]
        if copies := [
            self.copy_of[f]._replace(blocks=(BlockId(b),))
            for f, b in zip(frames, targets, strict=False)
        ]:
            self.loading[number] = copies
            self.mover.submit_loads([LoadPlan(ReqId("l"), number, batch_of(copies))])
        for _ in range(rng.randrange(3)):
            self.busy = torch.tanh(self.busy @ self.busy)
        for block in rewritten:
            self.pages[block].random_(0, 256)
        self.save((rewritten + others)[: min(len(self.free), rng.randrange(24))])
        if rng.random() < 0.7:
            self.take(self.mover.poll())

    def save(self, blocks: list[int]) -> None:
        places = [self.free.pop() for _ in blocks]
        copies = copies_of(places, [[block] for block in blocks], first_key=1 + self.num_saves)
        self.num_saves += len(copies)
        for copy in copies:
            self.stored[copy.frame] = self.pages[copy.blocks[0]].clone()
            self.copy_of[copy.frame] = self.saving[copy.ticket] = copy
        self.mover.submit_saves([SavePlan(ReqId("s"), batch_of(copies))])

    def take(self, done: Finished) -> None:
        assert not done.bad_blocks
        self.ready += [self.saving.pop(ticket).frame for ticket in done.saved]
        self.free += [self.saving.pop(ticket).frame for ticket in done.failed]
        for result in done.loads:
            for copy in self.loading.pop(result.load_id):
                assert torch.equal(self.pages[copy.blocks[0]], self.stored[copy.frame])
                self.num_checked += 1
        read = {copy.frame for copies in self.loading.values() for copy in copies}
        evicted = [frame for frame in self.ready if frame not in read][
            : max(0, len(self.ready) - BLOCKS)
        ]
        self.ready = [frame for frame in self.ready if frame not in evicted]
        self.free += evicted


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_save_and_load_the_right_bytes(seed: int) -> None:
    engine = Engine(seed)
    for number in range(150):
        engine.step(number)
    engine.take(engine.mover.drain())
    assert not engine.saving and not engine.loading and engine.num_checked > 200
    for frame in engine.ready:
        want = engine.stored[frame].cpu().numpy()
        assert np.array_equal(engine.frames.parts[frame, : len(want)], want)
    engine.mover.close()
