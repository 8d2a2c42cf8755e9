"""Blocks that a save still reads are named in the step that gives them to another writer, and in no other (I2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.plan.fences import Fences
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.views import NewRequest, StepView


class Saves:
    """Saves in flight, and the fences of their blocks."""

    def __init__(self) -> None:
        self.in_flight: set[Ticket] = set()
        self.fences = Fences(self.in_flight)

    def add(self, ticket: int, *blocks: int) -> None:
        """Odd tickets as one chunk, even ones as chunks of one block each."""
        if ticket % 2:
            self.fences.add([ChunkCopy(0, ChunkKey(b"k" * 32), len(blocks), 0, tuple(map(BlockId, blocks)), Ticket(ticket))])
        else:
            self.fences.add_many([BlockId(block) for block in blocks], [Ticket(ticket)] * len(blocks))
        self.in_flight.add(Ticket(ticket))

    def settle(self, ticket: int) -> None:
        self.in_flight.discard(Ticket(ticket))


def rewritten(saves: Saves, computed: int, *blocks: int) -> tuple[BlockId, ...]:
    return saves.fences.rewritten(StepView(new=(NewRequest(ReqId("n"), computed, tuple(map(BlockId, blocks))),)), 16)


def test_blocks_given_to_a_new_request_are_named_while_a_save_reads_them() -> None:
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
    assert saves.fences.rewritten(StepView(grown=[(ReqId("b"), (BlockId(4), BlockId(5)))]), 16) == (5,)


def test_a_save_that_waits_keeps_its_fence_when_a_later_one_of_the_block_is_dropped() -> None:
    saves = Saves()
    saves.add(1, 5)
    saves.add(2, 5, 6)
    saves.settle(2)
    assert rewritten(saves, 0, 5) == (5,)
    saves.settle(1)
    assert rewritten(saves, 0, 5) == ()
    saves.add(3, 7)
    assert saves.fences._reader_of.keys() == {7} and not saves.fences._earlier, "what was settled is forgotten"


@pytest.mark.parametrize("tickets", [(1, 3, 5), (2, 4, 6), (1, 2, 3), (2, 3, 4)])
def test_of_three_saves_of_a_block_the_first_keeps_its_fence_when_the_others_are_dropped(tickets: tuple[int, ...]) -> None:
    saves = Saves()
    for ticket in tickets:
        saves.add(ticket, 5)
    for ticket in tickets[:0:-1]:
        saves.settle(ticket)
        assert rewritten(saves, 0, 5) == (5,)
    saves.settle(tickets[0])
    assert rewritten(saves, 0, 5) == ()


@pytest.mark.parametrize("ticket", [3, 4])
def test_what_was_settled_is_forgotten_and_what_waits_is_not_kept_for_ever(ticket: int) -> None:
    saves = Saves()
    saves.add(1, 5)
    saves.add(2, 5)
    saves.settle(1)
    saves.add(6, 5)
    assert saves.fences._earlier == {5: (2,)}, "a save that was settled is still among those of its block"
    saves.settle(2)
    saves.settle(6)
    saves.add(ticket, 7)
    assert saves.fences._reader_of.keys() == {7} and not saves.fences._earlier


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.lists(st.integers(1, 9), max_size=4)), max_size=30))
def test_named_are_exactly_the_blocks_that_a_save_in_flight_reads(events: list[tuple[bool, int, list[int]]]) -> None:
    saves, reads, settled = Saves(), dict[int, list[int]](), set()
    for is_add, ticket, blocks in events:
        if is_add and ticket not in settled and ticket not in reads:
            saves.add(ticket, *blocks)
            reads[ticket] = blocks
        elif not is_add:
            saves.settle(ticket)
            settled.add(ticket)
        want = {block for ticket, blocks in reads.items() if ticket not in settled for block in blocks}
        assert set(saves.fences.everything()) == want
        assert set(rewritten(saves, 0, *range(1, 10))) == want
