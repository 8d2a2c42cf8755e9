"""Property test of CudaMover on the emulated GPU: random steps rewrite, read, save and load blocks.
The results are compared with a dict of each block's content.

A save stores the content that its blocks have when the save is requested, regardless of later
writes. A forward pass reads the most recently written bytes, even if blocks are loaded in between.
Damaged frames are reported. Saves of a group without pages, as on some pipeline stages, write only
trailers.
"""

import os
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

pytest.importorskip("torch", reason="torch is not installed")

from batches import batch_of, batch_of_groups
from emulated_gpu import emulated
from gpu_support import (
    POISON,
    Frames,
    Paged,
    key_of,
    make_mover,
    part_bytes_for,
    per_layer,
    trailers_of,
    turned,
)
from kernels_oracle import chunk_tag

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda import mover as mover_module
from kvloft.transfer.cuda.trailers import TRAILER
from kvloft.transfer.mover import Finished

NUM_BLOCKS, NUM_FRAMES, CHUNK = 23, 61, 3
KIND_OF = (0, 1, 0, 2)
"""The kind of each group in tests with multiple groups.

The second group has the same pages in a different order. The fourth group has no pages.
"""
SIZES = (CHUNK, CHUNK, 7)
"""Number of blocks in a chunk, by kind."""
FIELDS = ("magic", "key", "layout", "tag", "payload_bytes", "num_blocks", "rank")
"""The trailer fields that are in use."""
SHAPES = {
    "chunks share a piece": (37, {"ring": (2, 2 * 4096)}),
    "a chunk takes many pieces": (4099, {"ring": (2, 12 << 10)}),
    "three slots": (37, {"ring": (3, 3 * 4096)}),
}


def no_pages(paged: Paged) -> Paged:
    """Return the layout of a group without layers on this stage."""
    return Paged(paged.buffers, [], paged.num_blocks, digest=bytes([9] * 32))


@dataclass
class Saved:
    """A requested save with the expected content of its frame."""

    frame: int
    key: ChunkKey
    blocks: list[int]
    payload: np.ndarray
    group: int = 0
    is_damaged: bool = False
    before: np.ndarray | None = None
    """The bytes of the frame before the trailer, if the save must not change these bytes."""


@dataclass
class Wanted:
    """A chunk to load, with the expected content of its blocks after the load.

    If ``is_bad`` is set, the chunk must be reported as bad instead.
    """

    saved: Saved
    copy: ChunkCopy
    payload: np.ndarray
    is_bad: bool


class Pins:
    """Host memory that the test registers."""

    def __init__(self, size_bytes: int, num_registered_bytes: int) -> None:
        self.size_bytes, self.num_registered_bytes, self.is_over = (
            size_bytes,
            num_registered_bytes,
            num_registered_bytes == size_bytes,
        )

    @property
    def is_complete(self) -> bool:
        return self.num_registered_bytes == self.size_bytes

    def wait(self, _: object) -> bool:
        return True

    def close(self) -> None: ...


class Steps(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        shape=st.sampled_from(sorted(SHAPES)),
        zeroes=st.booleans(),
        num_groups=st.sampled_from([1, 3, 4, 4]),
        num_registered=st.sampled_from([0, NUM_FRAMES, NUM_FRAMES, NUM_FRAMES]),
        few_pieces=st.booleans(),
        more_bytes=st.sampled_from([0, 5 * 4096]),
    )
    def start(
        self,
        seed: int,
        shape: str,
        zeroes: bool,
        num_groups: int,
        num_registered: int,
        few_pieces: bool,
        more_bytes: int,
    ) -> None:
        """Start a mover. Each shard has ``more_bytes`` additional bytes, for the layers of another
        stage.
        """
        self.zeroes, self.num_groups = zeroes, num_groups
        self.context = emulated(seed)
        self.gpu = self.context.__enter__()
        self.patch = pytest.MonkeyPatch()
        no_thread = SimpleNamespace(wake=lambda: None, close=lambda: None)
        self.patch.setattr(mover_module, "Submitter", lambda *_, **__: no_thread)
        for module in ("lanes", "saves", "shared") if few_pieces else ():
            self.patch.setattr(f"kvloft.transfer.cuda.{module}.MAX_PIECES", 8)
        page, tuning = SHAPES[shape]
        self.paged = per_layer(2, NUM_BLOCKS, page, offset=3, gap=5)
        self.paged.poison()
        self.frames = Frames(
            NUM_FRAMES,
            part_bytes_for(CHUNK * self.paged.block_bytes) + more_bytes,
            rank=1,
            num_ranks=2,
        )
        size_bytes = self.frames.memory.size_bytes
        self.pins = Pins(size_bytes, num_registered * self.frames.memory.frame_bytes)
        self.patch.setattr(mover_module, "RegisteredRange", lambda *_, **__: self.pins)
        self.kinds = [self.paged, turned(self.paged), no_pages(self.paged)][
            : max(KIND_OF[:num_groups]) + 1
        ]
        several: Any = {"others": self.kinds[1:], "kind_of": KIND_OF[:num_groups]}
        self.mover = make_mover(
            self.paged,
            self.frames,
            SIZES[: len(self.kinds)],
            gathers_first=zeroes,
            **several,
            **tuning,
        )
        self.buffers = [buffer.numpy() for buffer in self.paged.buffers]
        self.random = np.random.default_rng(seed)
        self.held: dict[int, np.ndarray | None] = dict.fromkeys(
            range(NUM_BLOCKS)
        )  # None if the content is undefined
        self.free = set(range(NUM_FRAMES))
        self.unsaved: dict[int, Saved] = {}
        self.saved: list[Saved] = []
        self.loads: dict[int, list[Wanted]] = {}
        self.bad_blocks: set[int] = set()
        self.wrong: list[str] = []
        self.next_ticket = self.next_load = 1
        for block in range(NUM_BLOCKS):
            self.enqueue_write(block)

    def teardown(self) -> None:
        if not hasattr(self, "gpu"):
            return
        try:
            self.take(self.mover.drain())
            self.mover.close()
            assert not self.unsaved and not self.loads, "a save or a load was not reported"
            if not self.gpu.is_broken:
                self.gpu.run_until(lambda: self.gpu.is_idle)
                for block, payload in self.held.items():
                    assert payload is None or np.array_equal(self.now(block), payload)
            assert not self.wrong, self.wrong
            self.check_nothing_else_was_written()
            self.context.__exit__(None, None, None)
        finally:
            self.patch.undo()
            self.context.gen.close()  # type: ignore[attr-defined]

    # -- the engine's side
    # ----------------------------------------------------------------------------------------

    def pages(self, block: int) -> list[np.ndarray]:
        return [
            self.buffers[i][o + block * s : o + block * s + n] for i, o, s, n in self.paged.planes
        ]

    def now(self, block: int) -> np.ndarray:
        return np.concatenate(self.pages(block))

    def enqueue_write(self, block: int) -> None:
        payload = self.random.integers(0, 256, self.paged.block_bytes, np.uint8)

        def write() -> None:
            at = 0
            for page in self.pages(block):
                page[:] = payload[at : at + len(page)]
                at += len(page)

        self.gpu.compute.enqueue(write)
        self.held[block] = payload

    def enqueue_read(self, block: int) -> None:
        want = self.held[block]

        def read() -> None:
            if not np.array_equal(self.now(block), want):
                self.wrong.append(f"a forward pass read wrong bytes of block {block}")

        self.gpu.compute.enqueue(read)

    def enqueue_forward(self, random: Random, blocks: list[int]) -> None:
        for block in random.sample(blocks, min(len(blocks), 4)):
            if self.held[block] is not None:
                self.enqueue_read(block)

    # -- rules
    # -----------------------------------------------------------------------------------------

    @rule(
        random=st.randoms(use_true_random=True),
        num_written=st.integers(0, 6),
        num_saves=st.integers(0, 9),
        num_loads=st.integers(0, 6),
    )
    def step(self, random: Random, num_written: int, num_saves: int, num_loads: int) -> None:
        loading = {
            int(block)
            for chunks in self.loads.values()
            for wanted in chunks
            for block in wanted.copy.blocks
        }
        mine = random.sample(sorted(set(range(NUM_BLOCKS)) - loading), NUM_BLOCKS - len(loading))
        loads = self.choose_loads(random, mine, num_loads)  # removes blocks from ``mine``
        written = mine[:num_written]
        read_by_saves = {block for saved in self.unsaved.values() for block in saved.blocks}
        if self.zeroes and not self.gpu.is_broken:
            for block in written:  # vLLM zeroes new blocks before any hook of the step
                self.enqueue_write(block)
        self.mover.begin_step(
            [BlockId(block) for block in written if block in read_by_saves],
            has_loads=random.random() < 0.8,
        )
        if not self.gpu.is_broken:
            self.enqueue_forward(random, mine)
            for block in written:
                self.enqueue_write(block)
            self.enqueue_forward(random, written)
        if loads:
            for wanted in loads:
                if self.kinds[KIND_OF[wanted.saved.group]].planes:
                    self.held.update(dict.fromkeys(map(int, wanted.copy.blocks)))
            self.loads[self.next_load] = loads
            plan = LoadPlan(
                ReqId("l"),
                self.next_load,
                self.batch([(wanted.saved.group, wanted.copy) for wanted in loads]),
            )
            self.next_load += 1
            self.mover.submit_loads([plan])
        saves = self.choose_saves(
            random, [block for block in mine if self.held[block] is not None], num_saves
        )
        if saves:
            self.mover.submit_saves([SavePlan(ReqId("s"), self.batch(saves))])

    def batch(self, copies: list[tuple[int, ChunkCopy]]) -> Any:
        """Return a batch of ``copies``, which contains (group, copy) pairs."""
        if self.num_groups == 1:
            return batch_of(copy for _, copy in copies)
        groups = sorted({group for group, _ in copies})
        return batch_of_groups(
            (nth, [copy for group, copy in copies if group == nth]) for nth in groups
        )

    def seen_by(self, group: int, payload: np.ndarray) -> np.ndarray:
        """Convert a payload between the layouts of the first group and of ``group``. The conversion
        is its own inverse.
        """
        if not self.kinds[KIND_OF[group]].planes:
            return payload[:0]
        return (
            payload
            if not KIND_OF[group]
            else payload.reshape(-1, 2, self.paged.block_bytes // 2)[:, ::-1].reshape(-1)
        )

    def choose_loads(self, random: Random, mine: list[int], count: int) -> list[Wanted]:
        wanted: list[Wanted] = []
        for saved in random.sample(self.saved, min(count, len(self.saved))):
            first = random.randrange(len(saved.blocks))
            num = random.randint(1, len(saved.blocks) - first)
            if num > len(mine):
                break
            blocks = tuple(BlockId(mine.pop()) for _ in range(num))
            key = key_of(10**6) if random.random() < 0.1 else saved.key
            size = self.paged.block_bytes
            copy = ChunkCopy(saved.frame, key, len(saved.blocks), first, blocks)
            payload = self.seen_by(saved.group, saved.payload[first * size : (first + num) * size])
            wanted.append(Wanted(saved, copy, payload, saved.is_damaged or key != saved.key))
        return wanted

    def choose_saves(
        self, random: Random, blocks: list[int], count: int
    ) -> list[tuple[int, ChunkCopy]]:
        copies: list[tuple[int, ChunkCopy]] = []
        for _ in range(min(count, len(self.free))):
            group = random.randrange(self.num_groups)
            size = SIZES[KIND_OF[group]]
            if len(blocks) < size:
                break
            mine = random.sample(blocks, size)
            frame = random.choice(sorted(self.free))
            self.free.remove(frame)
            ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
            payload = self.seen_by(group, np.concatenate([self.held[block] for block in mine]))  # type: ignore[misc]
            before = None if len(payload) else self.frames.parts[frame, : -TRAILER.itemsize].copy()
            self.unsaved[ticket] = Saved(frame, key_of(ticket), mine, payload, group, before=before)
            copies.append(
                (
                    group,
                    ChunkCopy(
                        frame,
                        key_of(ticket),
                        len(mine),
                        0,
                        tuple(map(BlockId, mine)),
                        Ticket(ticket),
                    ),
                )
            )
        return copies

    @rule(num_commands=st.integers(1, 60))
    def gpu_runs(self, num_commands: int) -> None:
        self.gpu.advance(num_commands)

    @rule()
    def engine_polls(self) -> None:
        self.take(self.mover.poll())

    @rule()
    def engine_sleeps(self) -> None:
        """Complete all earlier saves, so that their chunks can be loaded.

        Without this rule, most runs end before a load.
        """
        self.take(self.mover.drain())

    @rule()
    def feeders_run(self) -> None:
        for half in (self.mover._saves, self.mover._loads):
            with self.mover._shared.lock:
                if (event := half.awaited()) is not None and (
                    self.gpu.is_broken or event.is_done()
                ):
                    half.feed()

    @rule(random=st.randoms(use_true_random=True))
    def a_bit_flips(self, random: Random) -> None:
        being_loaded = {wanted.saved.frame for chunks in self.loads.values() for wanted in chunks}
        idle = [
            saved
            for saved in self.saved
            if saved.frame not in being_loaded and not saved.is_damaged
        ]  # a second flip may restore the bit
        if idle and random.random() < 0.5:
            saved = random.choice(idle)
            dtype, offset = TRAILER.fields[random.choice(FIELDS)][:2]  # type: ignore[index]
            in_trailer = offset - TRAILER.itemsize + random.randrange(dtype.itemsize)
            in_payload = random.randrange(max(1, len(saved.payload)))
            at = in_trailer if not len(saved.payload) or random.random() < 0.4 else in_payload
            self.frames.parts[saved.frame, at] ^= 1 << random.randrange(8)
            saved.is_damaged = True

    @rule(num_frames=st.integers(1, 40), is_last=st.booleans())
    def memory_is_pinned(self, num_frames: int, is_last: bool) -> None:
        """Register more memory. With ``is_last``, the remaining memory cannot be registered."""
        pins, num_bytes = self.pins, num_frames * self.frames.memory.frame_bytes
        if not pins.is_over:
            pins.num_registered_bytes = min(pins.size_bytes, pins.num_registered_bytes + num_bytes)
            pins.is_over = is_last or pins.is_complete
            self.mover._feed_saves()

    @rule()
    def frames_are_given_to_others(self) -> None:
        being_loaded = {wanted.saved.frame for chunks in self.loads.values() for wanted in chunks}
        gone = [saved for saved in self.saved if saved.frame not in being_loaded][::2]
        self.saved = [saved for saved in self.saved if saved not in gone]
        self.free.update(saved.frame for saved in gone)

    @precondition(lambda self: self.next_ticket > 60)
    @rule()
    def the_gpu_breaks(self) -> None:
        self.gpu.stop_forever()
        self.held = dict.fromkeys(range(NUM_BLOCKS))

    # -- results
    # ------------------------------------------------------------------------------------------

    def take(self, done: Finished) -> None:
        broken = self.mover._shared.broken
        assert broken is None or self.gpu.is_broken, f"the mover stopped: {broken}"
        suspects = {
            int(b)
            for chunks in self.loads.values()
            for w in chunks
            if w.is_bad or self.gpu.is_broken
            for b in w.copy.blocks
        }
        assert done.bad_blocks <= suspects, "an intact chunk was reported as bad"
        self.bad_blocks |= (
            done.bad_blocks
        )  # these blocks can be reported before their load completes
        for result in done.loads:
            chunks = self.loads.pop(result.load_id)
            bad_keys = sorted(key for key, _ in result.bad_keys)
            assert not result.failed or self.gpu.is_broken
            assert self.gpu.is_broken or bad_keys == sorted(
                wanted.copy.key for wanted in chunks if wanted.is_bad
            )
            for wanted in chunks:
                blocks = list(map(int, wanted.copy.blocks))
                if wanted.is_bad or self.bad_blocks.issuperset(blocks):
                    assert self.bad_blocks.issuperset(blocks), (
                        "a block with wrong content was not reported as bad"
                    )
                    self.bad_blocks.difference_update(blocks)
                    continue
                if not len(wanted.payload):
                    continue  # the load of a group without pages changes no block
                got = np.concatenate([self.now(block) for block in blocks])
                assert np.array_equal(got, wanted.payload), "a load returned wrong bytes"
                self.held.update(zip(blocks, wanted.payload.reshape(len(blocks), -1), strict=True))
        for ticket in done.failed:
            self.free.add(self.unsaved.pop(ticket).frame)
        trailers = trailers_of(self.frames.memory)
        for ticket in done.saved:
            saved = self.unsaved.pop(ticket)
            assert np.array_equal(
                self.frames.parts[saved.frame, : len(saved.payload)], saved.payload
            ), "a save stored wrong bytes"
            if saved.before is not None:
                assert np.array_equal(
                    self.frames.parts[saved.frame, : -TRAILER.itemsize], saved.before
                ), "the save wrote more than a trailer"
            page_bytes = [plane[3] for plane in self.kinds[KIND_OF[saved.group]].planes]
            assert int(trailers[saved.frame]["tag"]) == chunk_tag(
                saved.payload, page_bytes, len(saved.blocks)
            )
            self.saved.append(saved)

    def check_nothing_else_was_written(self) -> None:
        assert (self.frames.raw[:, 0] == POISON).all(), "another rank's shard was overwritten"
        for saved in self.saved:
            payload = self.frames.parts[saved.frame, : len(saved.payload)]
            assert saved.is_damaged or np.array_equal(payload, saved.payload), (
                "a saved frame was overwritten"
            )
        for buffer, (_, offset, stride, size) in zip(self.buffers, self.paged.planes, strict=True):
            is_gap = np.ones(len(buffer), bool)
            for block in range(NUM_BLOCKS):
                is_gap[offset + block * stride : offset + block * stride + size] = False
            assert (buffer[is_gap] == POISON).all(), "bytes between pages were overwritten"


Steps.TestCase.settings = settings(
    max_examples=max(10, settings().max_examples // 4),
    stateful_step_count=40,
    derandomize="CI" in os.environ,
)
TestSteps: Any = Steps.TestCase
