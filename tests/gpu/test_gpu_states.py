"""Tests CudaMover with state-space layers and attention, for tensors in each of vLLM's layouts.
Every byte is compared.

A state is smaller than an attention page, so padding follows it. A state's tensors (convolution and
recurrence) have different types and, since vLLM 0.32, form a single byte tensor.
`test_emulated_states.py` runs the same tests on the emulated GPU.
"""

from itertools import product
from math import prod

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import gpu_support
from batches import batch_of_groups
from gpu_support import POISON, Frames, copies_of, part_bytes_for

from kvloft.seam.batch import ChunkBatch, ChunkCopy
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.cuda.lanes import Tuning
from kvloft.transfer.cuda.mover import CudaMover
from kvloft.transfer.layout import PagedLayout, read_layout

pytestmark = pytest.mark.gpu
NUM_BLOCKS, NUM_SLOTS = 37, 2
"""The numbers of blocks and of slots (one slot per layer of a group).

Groups share the slots, because a block belongs to one group at a time.
"""
HEADS, TOKENS, HEAD_BYTES = 2, 12, 88
PAGE = HEADS * TOKENS * HEAD_BYTES
CONV, SSM = (3, 10), (4, 7, 15)
"""Shapes of a state's two tensors, bfloat16 and float32: 60 + 1,680 bytes in a page of 2,112."""
STRIDES = {
    "layers outermost": (NUM_BLOCKS * PAGE, PAGE),
    "blocks outermost": (PAGE, NUM_SLOTS * PAGE),
}
"""Strides of a slot and of a block, in bytes, for vLLM's layouts L... and BL... Within a page,
heads or tokens come first.
"""
KINDS = ("full", "bytes", "tensors")
GROUPS = ("full", "bytes", "tensors", "bytes")
Views = list[torch.Tensor]


def views_of(
    memory: torch.Tensor, kind: str, strides: tuple[int, int], *, heads_first: bool
) -> dict[str, torch.Tensor | Views]:
    """Return each layer's tensors in ``memory``, in the form in which an engine registers them. A
    state is one byte tensor or one tensor per part.
    """
    of_slot, of_block = strides
    found: dict[str, torch.Tensor | Views] = {}
    for slot in range(NUM_SLOTS):
        if kind == "full":
            inner = (
                (TOKENS * HEAD_BYTES, HEAD_BYTES)
                if heads_first
                else (HEAD_BYTES, HEADS * HEAD_BYTES)
            )
            shape, stride = (NUM_BLOCKS, HEADS, TOKENS, HEAD_BYTES), (of_block, *inner, 1)
            found[f"full.{slot}"] = memory.as_strided(shape, stride, slot * of_slot).view(
                torch.bfloat16
            )
            continue
        num_bytes = prod(CONV) * 2 + prod(SSM) * 4
        page = memory.as_strided(
            (NUM_BLOCKS, 1, 1, num_bytes), (of_block, num_bytes, num_bytes, 1), slot * of_slot
        )
        conv, ssm = page[:, 0, 0].split([prod(CONV) * 2, prod(SSM) * 4], dim=1)
        parts = [
            conv.view(torch.bfloat16).view(NUM_BLOCKS, *CONV),
            ssm.view(torch.float32).view(NUM_BLOCKS, *SSM),
        ]
        found[f"{kind}.{slot}"] = page if kind == "bytes" else parts
    return found


class Rig:
    """Full attention and states in shared memory. Each group has some of the blocks."""

    def __init__(self, layout: str, *, heads_first: bool, slot_bytes: int = 1 << 16) -> None:
        self.memory = torch.empty(
            NUM_BLOCKS * NUM_SLOTS * PAGE, dtype=torch.int8, device=gpu_support.DEVICE
        )
        self.raw = self.memory.view(torch.uint8)
        self.of_slot, self.of_block = STRIDES[layout]
        self.layouts: list[PagedLayout] = [
            read_layout(
                views_of(self.memory, kind, STRIDES[layout], heads_first=heads_first), NUM_BLOCKS
            )
            for kind in KINDS
        ]
        self.frames = Frames(
            NUM_BLOCKS, part_bytes_for(max(layout.block_bytes for layout in self.layouts))
        )
        self.mover = CudaMover(
            [(layout, gpu_support.make_kernels(layout)) for layout in self.layouts],
            [self.frames.memory] * len(self.layouts),
            blocks_per_chunk=[1] * len(self.layouts),
            tuning=Tuning(2, slot_bytes, 66),
            kind_of={(group, 0): KINDS.index(kind) for group, kind in enumerate(GROUPS)},
            gathers_first=True,
        )
        self.mover.wait_registered()
        self.copies = [
            copies_of(blocks, [[block] for block in blocks], first_key=1 + 100 * group)
            for group, blocks in enumerate(
                list(range(group, NUM_BLOCKS, len(GROUPS))) for group in range(len(GROUPS))
            )
        ]

    def used(self, group: int, block: int) -> list[slice]:
        """Return the locations of a group's bytes in a block, excluding padding after a state."""
        num_bytes = PAGE if GROUPS[group] == "full" else prod(CONV) * 2 + prod(SSM) * 4
        begins = [slot * self.of_slot + block * self.of_block for slot in range(NUM_SLOTS)]
        return [slice(begin, begin + num_bytes) for begin in begins]

    def step(self, saves: ChunkBatch | None = None, loads: ChunkBatch | None = None) -> None:
        self.mover.begin_step((), has_loads=loads is not None)
        if loads is not None:
            self.mover.submit_loads([LoadPlan(ReqId("l"), 7, loads)])
        if saves is not None:
            self.mover.submit_saves([SavePlan(ReqId("s"), saves)])

    def batches(self, targets: dict[BlockId, int] | None = None) -> ChunkBatch:
        """Return all chunks. If ``targets`` is given, it maps each block to its replacement."""
        moved = [
            [c._replace(blocks=(BlockId(targets[c.blocks[0]]),)) if targets else c for c in group]
            for group in self.copies
        ]
        return batch_of_groups(((group, copies) for group, copies in enumerate(moved)))


@pytest.fixture(
    params=[*product(STRIDES, (True, False), (1 << 16,)), ("layers outermost", True, 6144)]
)
def rig(request: pytest.FixtureRequest) -> Rig:
    """Return a rig with large slots (multiple chunks per piece) or small slots (one chunk)."""
    layout, heads_first, slot_bytes = request.param
    return Rig(layout, heads_first=heads_first, slot_bytes=slot_bytes)


def test_a_states_page_has_its_bytes_in_any_type(rig: Rig) -> None:
    full, as_bytes, as_tensors = rig.layouts
    state_bytes = prod(CONV) * 2 + prod(SSM) * 4
    assert full.page_bytes == (PAGE, PAGE) and as_bytes.page_bytes == (state_bytes, state_bytes)
    assert as_tensors.page_bytes == (prod(CONV) * 2, prod(SSM) * 4) * NUM_SLOTS
    assert len({layout.digest for layout in rig.layouts}) == 3
    rig.mover.close()


def test_states_and_attention_come_back_and_padding_stays_as_it_was(rig: Rig) -> None:
    rig.raw.random_(0, 256)
    before = rig.raw.clone()
    rig.step(saves=rig.batches())
    assert len(rig.mover.drain().saved) == NUM_BLOCKS
    assert torch.equal(rig.raw, before), "a save changed a page"
    for group, copies in enumerate(rig.copies):
        for copy in copies:
            payload = torch.cat([before[place] for place in rig.used(group, copy.blocks[0])]).cpu()
            assert torch.equal(
                torch.from_numpy(rig.frames.parts[copy.frame, : len(payload)]), payload
            )
            assert (rig.frames.parts[copy.frame, len(payload) : -128] == POISON).all(), (
                "bytes after a payload were overwritten"
            )
    rig.raw.fill_(POISON)
    wanted = rig.raw.clone()
    targets = {BlockId(block): NUM_BLOCKS - 1 - block for block in range(NUM_BLOCKS)}
    for group, copies in enumerate(rig.copies):
        for copy in copies:
            pairs = zip(
                rig.used(group, targets[copy.blocks[0]]),
                rig.used(group, copy.blocks[0]),
                strict=True,
            )
            for to, source in pairs:
                wanted[to] = before[source]
    rig.step(loads=rig.batches(targets))
    done = rig.mover.drain()
    assert [(result.load_id, result.bad_keys, result.failed) for result in done.loads] == [
        (7, (), False)
    ]
    assert torch.equal(rig.raw, wanted)
    rig.mover.close()


def test_a_states_frame_is_not_read_as_another_groups(rig: Rig) -> None:
    """Groups normally have different keys. Here, only the layouts differ, so every load fails."""
    rig.raw.random_(0, 256)
    rig.step(saves=rig.batches())
    assert rig.mover.drain().saved
    as_bytes, as_tensors = rig.copies[1][0], rig.copies[2][0]
    swapped: list[tuple[ChunkCopy, ...]] = [(as_tensors,), (as_bytes,)]
    rig.step(
        loads=batch_of_groups(
            ((group, copies) for group, copies in zip((0, 2), swapped, strict=True))
        )
    )
    done = rig.mover.drain()
    assert {key for result in done.loads for key, _ in result.bad_keys} == {
        as_bytes.key,
        as_tensors.key,
    }
    assert done.bad_blocks == {as_bytes.blocks[0], as_tensors.blocks[0]}
    rig.mover.close()
