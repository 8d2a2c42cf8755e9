"""Tests the order of saves and loads without a GPU: the test decides when pieces complete."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

pytest.importorskip("torch", reason="torch is not installed")

from batches import batch_of
from piece_model import frames_of

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import mover as mover_module
from kvloft.transfer.cuda.kernels import BlockTiles
from kvloft.transfer.cuda.lanes import MAX_PIECES, Tuning
from kvloft.transfer.cuda.mover import SLOTS_AHEAD, CudaMover
from kvloft.transfer.cuda.trailers import Trailers
from kvloft.transfer.frames import FrameMemory

NUM_BLOCKS, NUM_FRAMES, PART, BLOCK_BYTES, CHUNKS_A_SLOT = 40, 4000, 4096, 3800, 3
NUM_SLOTS = 2
LOADED = 64
"""Number of sealed frames. Loads use only these frames."""


class Clock:
    """Records, in order, the commands that are enqueued on the GPU: the marks and waits of the
    compute stream, and the pieces of both lanes.
    """

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def event(self) -> SimpleNamespace:
        event = SimpleNamespace(at=None)
        event.record = lambda stream: (
            setattr(event, "at", len(self.log)),
            self.log.append(("mark", event)),
        )
        return event


@dataclass
class Gathered:
    """The event that is recorded after a gather."""

    number: int


class Stream:
    """A lane's stream, which records the events that it waits for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def wait(self, event: Any) -> None:
        if isinstance(event, Gathered):
            self.clock.log.append(("wait", self, event.number))
        else:
            self.clock.log.append(("after", self, event.at))


class Lane:
    """A lane whose pieces complete when `num_done` is raised. A chunk's tag is its frame + 1."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.streams = [Stream(clock) for _ in range(NUM_SLOTS)]
        self.pieces: list[Any] = []
        self.num_done = 0
        self.before_submit: Any = None

    num_slots = NUM_SLOTS

    def next_kernel_stream(self, _kind: int = 0) -> Stream:
        return self.streams[len(self.pieces) % NUM_SLOTS]

    def submit(self, piece: Any, *, kind: int, is_registered: bool = True) -> Any:
        number, frames = len(self.pieces), np.array(frames_of(piece), np.uint64)
        if self.before_submit is not None:
            self.before_submit(piece)
        self.clock.log.append((self.name, self.next_kernel_stream(), number))
        self.pieces.append((piece, frames))
        done = SimpleNamespace(
            is_done=lambda: number < self.num_done, synchronize=lambda: self.finish(number)
        )
        tags, record_units = frames + np.uint64(1), np.zeros_like(frames)
        return SimpleNamespace(
            read=Gathered(number), done=done, tags=tags, record_units=record_units
        )

    def finish(self, number: int) -> None:
        self.num_done = max(self.num_done, number + 1)

    def stop(self) -> None: ...


class Queues(RuleBasedStateMachine):
    """Property test: steps rewrite, save and load random blocks while pieces complete at random."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        compute = SimpleNamespace(
            wait=lambda event: self.clock.log.append(("wait", compute, event.number))
        )
        self.compute = compute
        pinned = SimpleNamespace(is_complete=True, close=lambda: None)
        for name, value in {
            "Lane": lambda *_, to_host: Lane(self.clock, "save" if to_host else "load"),
            "RegisteredRange": lambda *_, **__: pinned,
            "numa_node_of": lambda _: 0,
            "Submitter": lambda *_, **__: SimpleNamespace(wake=lambda: None),
        }.items():
            self.patch.setattr(mover_module, name, value)
        driver = SimpleNamespace(
            Event=self.clock.event,
            CudaError=OSError,
            current_context=lambda: None,
            use_context=lambda _: None,
            Stream=SimpleNamespace(view=lambda _: None),
        )
        for module in ("mover", "saves", "loads", "shared"):
            self.patch.setattr(f"kvloft.transfer.cuda.{module}.driver", driver)
        self.patch.setattr(mover_module, "_compute_stream", lambda _: compute)
        self.patch.setattr(mover_module, "_current_stream", lambda _: 0)
        self.patch.setattr(
            mover_module, "ramp", lambda chunks_per_piece, *_: tuple(range(1, chunks_per_piece))
        )
        self.raw = np.zeros((NUM_FRAMES, PART), np.uint8)
        memory = FrameMemory(
            self.raw.ctypes.data, NUM_FRAMES * PART, PART, PART, 0, PART, 0, self.raw
        )
        layout: Any = SimpleNamespace(
            digest=bytes(32), block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS
        )
        kernels: Any = SimpleNamespace(
            block_tiles=BlockTiles(BLOCK_BYTES, 1, np.zeros(1, dtype=np.int64)),
            device=None,
            encodes=False,
        )
        tuning = Tuning(NUM_SLOTS, CHUNKS_A_SLOT * PART)
        self.mover = CudaMover([(layout, kernels)], [memory], blocks_per_chunk=[1], tuning=tuning)
        self.mover.load_lane.before_submit = self.load_is_sent  # type: ignore[attr-defined]
        frames = np.arange(LOADED)
        keys = b"".join(int(i).to_bytes(32, "little") for i in frames)
        Trailers(memory, layout=bytes(32), block_bytes=BLOCK_BYTES).seal(
            frames, keys, frames.astype(np.uint64) + np.uint64(1), frames * 0 + 1
        )
        self.next_frame, self.next_load = LOADED, 0
        # For each chunk to load, in order: number of forward passes launched before its step.
        self.loaded_after: list[int] = []
        self.waiting_loads: set[int] = set()
        # Maps the ticket of each unfinished save to its block.
        self.unsaved: dict[int, int] = {}
        # Frames of dropped saves.
        self.dropped: set[int] = set()
        # Maps each frame to the length of the log when its save was submitted.
        self.saved_after: dict[int, int] = {}

    def teardown(self) -> None:
        try:
            self.take(self.mover.drain())
            assert not self.unsaved and not self.waiting_loads
            self.check_order()
        finally:
            self.patch.undo()

    def check_awaited(self, stream: Any, blocks: set[int]) -> None:
        """Check that every sent gather that may still read ``blocks`` runs before the next command
        of ``stream``.

        Gathers in one stream run in order, and pieces alternate between the streams.
        """
        saves: Any = self.mover.save_lane
        awaited = [saves.num_done - 1] * NUM_SLOTS
        for entry in self.clock.log:
            if entry[0] == "wait" and entry[1] is stream:
                turn = entry[2] % NUM_SLOTS
                awaited[turn] = max(awaited[turn], entry[2])
        late = [
            i
            for i, (piece, _) in enumerate(saves.pieces)
            if i > awaited[i % NUM_SLOTS] and blocks & set(piece.block_ids.tolist())
        ]
        assert not late, "blocks can be overwritten before a gather has read them"

    def load_is_sent(self, piece: Any) -> None:
        self.check_awaited(
            self.mover.load_lane.next_kernel_stream(0), set(piece.block_ids.tolist())
        )

    def take(self, done: Any) -> None:
        assert not done.bad_blocks
        self.dropped.update(done.failed)
        for ticket in (*done.saved, *done.failed):
            del self.unsaved[ticket]
        for result in done.loads:
            self.waiting_loads.remove(result.load_id)

    @rule(
        seed=st.randoms(use_true_random=False),
        num_saves=st.integers(0, 30),
        num_loads=st.integers(0, 20),
    )
    def step(self, seed: Any, num_saves: int, num_loads: int) -> None:
        blocks = seed.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        rewritten = [
            block for block in blocks[: seed.randrange(10)] if block in self.unsaved.values()
        ]
        read = {ticket for ticket, block in self.unsaved.items() if block in rewritten}
        self.mover.begin_step([BlockId(block) for block in rewritten], has_loads=num_loads > 0)
        sent = self.sent_saves()
        assert read - set(self.mover._shared.done.failed) <= sent, (
            "a forward pass can overwrite blocks of a save that was not sent yet"
        )
        self.check_awaited(self.compute, set(rewritten))
        num_forwards = sum(entry[0] == "forward" for entry in self.clock.log)
        # vLLM 0.29 and older submit loads before the forward pass, and newer releases after it.
        forward_is_first = seed.random() < 0.5
        if forward_is_first:
            self.clock.log.append(("forward",))
        if num_loads:
            frames = seed.sample(range(LOADED), num_loads)
            copies = [
                ChunkCopy(f, ChunkKey(f.to_bytes(32, "little")), 1, 0, (BlockId(blocks[i]),))
                for i, f in enumerate(frames)
            ]
            self.loaded_after += [num_forwards] * num_loads
            plans = [
                LoadPlan(ReqId("l"), self.next_load + nth, batch_of(part))
                for nth, part in enumerate((copies[: num_loads // 2], copies[num_loads // 2 :]))
            ]
            self.waiting_loads.update(plan.load_id for plan in plans)
            self.next_load += len(plans)
            self.mover.submit_loads(plans)
        if not forward_is_first:
            self.clock.log.append(("forward",))
        if num_saves:
            places = range(self.next_frame, self.next_frame + num_saves)
            self.next_frame += num_saves
            saves = [
                ChunkCopy(
                    f,
                    ChunkKey(f.to_bytes(32, "little")),
                    1,
                    0,
                    (BlockId(seed.choice(blocks)),),
                    Ticket(f),
                )
                for f in places
            ]
            self.unsaved.update((copy.ticket, copy.blocks[0]) for copy in saves)
            self.saved_after.update((copy.frame, len(self.clock.log)) for copy in saves)
            self.mover.submit_saves([SavePlan(ReqId("s"), batch_of(saves))])

    @rule(num_saves=st.integers(0, 4), num_loads=st.integers(0, 4))
    def pieces_finish(self, num_saves: int, num_loads: int) -> None:
        for lane, count in ((self.mover.save_lane, num_saves), (self.mover.load_lane, num_loads)):
            lane.num_done = min(len(lane.pieces), lane.num_done + count)  # type: ignore[attr-defined]

    @rule()
    def engine_polls(self) -> None:
        self.take(self.mover.poll())

    @precondition(lambda self: self.mover.is_behind)
    @rule()
    def feeders_run(self) -> None:
        for half in (self.mover._saves, self.mover._loads):
            if half.awaited() is not None:
                half.lane.num_done += 1  # type: ignore[union-attr]
                half.feed()

    @invariant()
    def few_pieces_are_ahead_of_the_link(self) -> None:
        for half in (self.mover._saves, self.mover._loads):
            num_bytes = sum(flight.piece.num_bytes for flight in half.in_flight)
            assert num_bytes == half.num_bytes
            if half.lane is self.mover.load_lane:
                assert num_bytes <= SLOTS_AHEAD * CHUNKS_A_SLOT * PART
            assert len(half.in_flight) + len(half.queued) <= MAX_PIECES

    @invariant()
    def it_is_behind_until_everything_was_sent(self) -> None:
        unsent_saves = (
            set(self.saved_after)
            - self.sent_saves()
            - self.dropped
            - set(self.mover._shared.done.failed)
        )
        num_loads_sent = sum(len(frames) for _, frames in self.mover.load_lane.pieces)  # type: ignore[attr-defined]
        assert self.mover.is_behind == (
            bool(unsent_saves) or num_loads_sent < len(self.loaded_after)
        )

    def sent_saves(self) -> set[int]:
        return {int(frame) for _, frames in self.mover.save_lane.pieces for frame in frames}  # type: ignore[attr-defined]

    def check_order(self) -> None:
        """Check when kernels start. The kernel of a save starts after the forward pass that wrote
        its blocks and does not wait for later forward passes. The kernel of a load starts after the
        work that precedes its step.
        """
        forwards = [i for i, entry in enumerate(self.clock.log) if entry[0] == "forward"]
        after: dict[Any, int] = {}
        loads = iter(self.loaded_after)
        for entry in self.clock.log:
            if entry[0] == "after":
                after[entry[1]] = sum(forward < entry[2] for forward in forwards)
            elif entry[0] == "save":
                for frame in self.mover.save_lane.pieces[entry[2]][1]:  # type: ignore[attr-defined]
                    assert after[entry[1]] == sum(
                        forward < self.saved_after[int(frame)] for forward in forwards
                    )
            elif entry[0] == "load":
                for _ in self.mover.load_lane.pieces[entry[2]][1]:  # type: ignore[attr-defined]
                    assert after[entry[1]] == next(loads)
        assert next(loads, None) is None, "a load was never sent"


Queues.TestCase.settings = settings(
    max_examples=max(10, settings().max_examples // 4), stateful_step_count=25
)
TestQueues = Queues.TestCase
