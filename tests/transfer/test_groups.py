"""GroupedMover: one mover a group; a load has ended once all its groups' parts have, and is reported once."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from batches import batch_of
from idle_mover import IdleMover

from kvloft.seam.batch import ChunkCopy, GroupBatches
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.groups import GroupedMover
from kvloft.transfer.mover import Finished


class SlowMover(IdleMover):
    """Takes copies; a test says what finished."""

    def __init__(self) -> None:
        self.loads: list[LoadPlan] = []
        self.saves: list[SavePlan] = []
        self.done = Finished()

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        self.loads += plans

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        self.saves += plans

    def poll(self) -> Finished:
        done, self.done = self.done, Finished()
        return done


def chunk(block: int, ticket: int = -1) -> ChunkCopy:
    return ChunkCopy(block, ChunkKey(bytes([block]) * 32), 1, 0, (BlockId(block),), Ticket(ticket))


def load(load_id: int, *groups: int, lost: tuple[int, ...] = ()) -> LoadPlan:
    batches = GroupBatches(tuple((group, batch_of([chunk(10 * group + load_id)])) for group in groups))
    return LoadPlan(ReqId(f"r{load_id}"), load_id, batches, tuple(BlockId(block) for block in lost))


@pytest.fixture
def movers() -> list[SlowMover]:
    return [SlowMover() for _ in range(3)]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_load_is_reported_once_and_only_when_its_last_group_has(movers: list[SlowMover], order: tuple[int, ...]) -> None:
    mover = GroupedMover(movers)
    mover.submit_loads([load(1, 0, 1, 2), load(2, 1)])
    assert [[plan.load_id for plan in each.loads] for each in movers] == [[1], [1, 2], [1]]
    movers[1].done.loads.append(LoadResult(ReqId("r2"), 2))
    assert mover.poll().loads == [LoadResult(ReqId("r2"), 2)]
    told = []
    for group in order:
        movers[group].done.loads.append(LoadResult(ReqId("r1"), 1))
        told.append(mover.poll().loads)
    assert told == [[], [], [LoadResult(ReqId("r1"), 1)]]
    assert not mover.drain().loads


@pytest.mark.parametrize("group", range(3))
def test_one_group_s_failure_is_the_load_s(movers: list[SlowMover], group: int) -> None:
    mover = GroupedMover(movers)
    mover.submit_loads([load(1, 0, 1, 2), load(2, 0, 1, 2), load(3, 0, 1, 2)])
    key = ChunkKey(bytes([7]) * 32)
    for nth, each in enumerate(movers):
        is_bad = nth == group
        each.done.loads += [
            LoadResult(ReqId("r1"), 1, failed=is_bad), LoadResult(ReqId("r2"), 2, ((key, "tag"),) if is_bad else ()),
            LoadResult(ReqId("r3"), 3),
        ]  # fmt: skip
        each.done.bad_blocks |= {BlockId(5)} if is_bad else set()
    done = mover.poll()
    assert done.loads == [
        LoadResult(ReqId("r1"), 1, failed=True), LoadResult(ReqId("r2"), 2, ((key, "tag"),)), LoadResult(ReqId("r3"), 3),
    ]  # fmt: skip
    assert done.bad_blocks == {5}


def test_a_load_that_lacks_a_part_is_not_begun_and_is_reported(movers: list[SlowMover]) -> None:
    mover = GroupedMover(movers)
    mover.submit_loads([load(1, 0, 1, lost=(3, 4)), LoadPlan(ReqId("r2"), 2, GroupBatches(), (BlockId(9),))])
    assert not any(each.loads for each in movers)
    done = mover.poll()
    assert [result.load_id for result in done.loads] == [1, 2]
    assert done.bad_blocks == {3, 4, 9}
    assert mover.poll() == Finished()


def test_saves_go_to_their_groups_and_come_back_with_all_numbers(movers: list[SlowMover]) -> None:
    mover = GroupedMover(movers)
    batches = GroupBatches(((0, batch_of([chunk(1, 11), chunk(2, 12)])), (2, batch_of([chunk(3, 13)]))))
    mover.submit_saves([SavePlan(ReqId("s"), batches)])
    assert [[save.chunks.tickets() for save in each.saves] for each in movers] == [[[11, 12]], [], [[13]]]
    movers[0].done = Finished([Ticket(11)], [Ticket(12)], num_bytes_saved=5, seconds_saving=1.0)
    movers[2].done = Finished([Ticket(13)], num_bytes_saved=7, num_bytes_loaded=2, seconds_loading=0.5)
    done = mover.poll()
    assert done == Finished(
        [Ticket(11), Ticket(13)], [Ticket(12)], num_bytes_saved=12, num_bytes_loaded=2, seconds_saving=1.0, seconds_loading=0.5
    )
