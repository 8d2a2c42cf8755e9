"""Tests that a step lists exactly the blocks that it assigns to a new writer while a save still
reads them (I2).
"""

from typing import Any

from chunk_batch import Chunk, InFlight
from hypothesis import given
from hypothesis import strategies as st

from kvloft.plan import complete_units
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.views import NewRequest, StepView


class Saves:
    """Saves in flight, tracked as in a session."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.being_read = self.in_flight.being_read

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight.left)

    def add(self, ticket: int, *blocks: int) -> None:
        self.in_flight.add([Chunk(0, b"k" * 32, len(blocks), 0, blocks, ticket)])

    def settle(self, ticket: int) -> None:
        self.in_flight.settle([ticket], [])


def rewritten(saves: Any, computed: int, *blocks: int) -> tuple[BlockId, ...]:
    return complete_units.rewritten_blocks(
        StepView(new=(NewRequest(ReqId("n"), computed, tuple(map(BlockId, blocks))),)), saves, 16
    )


def test_reallocated_blocks_are_reported_while_a_save_reads_them() -> None:
    saves = Saves()
    saves.add(1, 5, 6)
    assert rewritten(saves, 0, 4, 6, 7) == (6,)
    saves.settle(1)
    assert rewritten(saves, 0, 4, 6, 7) == ()


def test_blocks_that_a_new_request_only_reads_are_not_named() -> None:
    saves = Saves()
    saves.add(1, 5, 6)
    assert rewritten(saves, 16, 5, 6) == (6,)
    assert rewritten(saves, 31, 5, 6) == (6,)
    assert rewritten(saves, 32, 5, 6) == ()


def test_blocks_appended_to_a_running_request_are_named() -> None:
    saves = Saves()
    saves.add(1, 5)
    view = StepView(grown=[(ReqId("b"), (BlockId(4), BlockId(5)))])
    assert complete_units.rewritten_blocks(view, saves, 16) == (5,)  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 5), st.lists(st.integers(1, 9), max_size=4)),
        max_size=30,
    )
)
def test_named_are_exactly_the_blocks_that_a_save_in_flight_reads(
    events: list[tuple[bool, int, list[int]]],
) -> None:
    saves, reads, settled = Saves(), dict[int, list[int]](), set()
    for is_add, ticket, blocks in events:
        if is_add and ticket not in settled and ticket not in reads:
            saves.add(ticket, *blocks)
            reads[ticket] = blocks
        elif not is_add:
            saves.settle(ticket)
            settled.add(ticket)
        want = {
            block for ticket, blocks in reads.items() if ticket not in settled for block in blocks
        }
        assert set(rewritten(saves, 0, *range(1, 10))) == want
