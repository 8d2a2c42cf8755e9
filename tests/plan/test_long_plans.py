"""Plans made in columns are those made chunk by chunk, null blocks and chunks stored already left out; and tickets settle alike."""

import gc
import pickle
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_engine import SymbolicEngine
from sim_request import Request, Setup

from kvloft.plan import queue, saves
from kvloft.plan.copies import MANY, chunk_copies, collector_at_rest
from kvloft.plan.loads import _copies, _copies_of_longer
from kvloft.plan.tickets import Tickets
from kvloft.seam.batch import ChunkCopy, ReservedChunks
from kvloft.seam.ids import BlockId, ChunkKey, ReqId, Ticket
from kvloft.seam.plan import StepReport
from kvloft.seam.views import NewRequest, StepView


def numbers(*tickets: int) -> tuple[Ticket, ...]:
    return tuple(map(Ticket, tickets))


def test_a_copy_made_of_columns_is_like_any_other() -> None:
    (made,) = chunk_copies([3], [b"k" * 32], [1], [(BlockId(7),)], [5])
    assert type(made) is ChunkCopy
    assert made == ChunkCopy(3, ChunkKey(b"k" * 32), 1, 0, (BlockId(7),), Ticket(5))


# -- saves ---------------------------------------------------------------------------------------------------------


def saved(num_blocks: int, blocks_per_chunk: int, null: set[int], stored: int, few: int) -> tuple[Any, ...]:
    """Plan of a prompt whose first chunks are stored, and the store after it; with ``few`` chunks or less made one by one."""
    engine = SymbolicEngine(Setup(block_tokens=1, blocks_per_chunk=blocks_per_chunk, num_frames=2 * MANY))
    request = Request("a", [i % 3 for i in range(num_blocks)], 2)
    if stored:
        other = Request("b", request.token_ids[:stored], 2)
        engine.core.admit(other, 0, list(range(1, stored + 1)))  # type: ignore[arg-type]
        view: Any = StepView(new=[NewRequest("b", 0, list(range(1, stored + 1)))], num_scheduled_tokens={"b": stored})  # type: ignore[arg-type]
        engine.core.plan_step(view)
    table = [0 if i in null else 1000 + i for i in range(num_blocks)]
    engine.core.admit(request, 0, table)  # type: ignore[arg-type]
    view = StepView(new=[NewRequest("a", 0, table)], num_scheduled_tokens={"a": num_blocks})  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "_FEW", few)
        plan = engine.core.plan_step(view)
    in_store = {ticket: entry.frame for ticket, entry in engine.store.tickets.items()}
    assert set(in_store) == set(engine.core._tickets), "I5"
    assert not any(0 in chunk.blocks for save in plan.saves for chunk in save.chunks), "I6: the null block"
    return plan.saves, in_store, dict(engine.core.counters), set(engine.core._fences.everything())


@given(
    num_blocks=st.integers(1, 40),
    blocks_per_chunk=st.sampled_from([1, 1, 3]),
    null=st.sets(st.integers(0, 40), max_size=3),
    stored=st.integers(0, 40),
)
def test_saves_planned_in_columns_are_those_planned_one_by_one(
    num_blocks: int, blocks_per_chunk: int, null: set[int], stored: int
) -> None:
    case = num_blocks, blocks_per_chunk, null, min(stored, num_blocks)
    assert saved(*case, few=0) == saved(*case, few=1 << 30)


def test_a_long_plan_leaves_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    plan, *_ = saved(MANY + 1, 1, set(), 0, 2)
    assert len(plan[0].chunks) == MANY + 1
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="planning"), collector_at_rest():
        assert not gc.isenabled()
        raise RuntimeError("planning")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_reserved_chunks_with_a_gap_are_planned_with_their_own_blocks() -> None:
    """No store reserves such chunks of a prefix."""
    tracker: Any = SimpleNamespace(blocks=list(map(BlockId, (7, 8, 9))), req_id=ReqId("r"))
    rows = [(4, 50, b"a" * 32, 0, 1), (5, 51, b"b" * 32, 2, 1)]
    plan = saves._plan_of_blocks(tracker, rows)
    assert plan is not None
    keys = [ChunkKey(row[2]) for row in rows]
    wanted = (ChunkCopy(50, keys[0], 1, 0, (BlockId(7),), Ticket(4)), ChunkCopy(51, keys[1], 1, 0, (BlockId(9),), Ticket(5)))
    assert plan.chunks == wanted and hash(plan.chunks) == hash(wanted)
    assert pickle.loads(pickle.dumps(plan)) == plan, "plans go to the workers of other processes"
    assert isinstance(plan.chunks, ReservedChunks) and isinstance(plan.chunks.blocks, tuple), "a plan is a value"
    whole = saves._plan_of_blocks(tracker, [(4, 50, b"a" * 32, 0, 1), (5, 51, b"b" * 32, 1, 1)])
    assert whole is not None and isinstance(whole.chunks, ReservedChunks)
    tracker.blocks[:] = []  # the request's table changes; a plan does not
    assert whole.chunks.blocks == (7, 8)
    assert plan.chunks[-1] == wanted[1] and plan.chunks[:1] == wanted[:1]


def test_each_block_is_fenced_by_its_own_save() -> None:
    engine = SymbolicEngine(Setup(block_tokens=1, num_frames=64))
    engine.store.check_visible = lambda *_: None  # nobody computes any KV here
    request, table = Request("a", [i % 3 for i in range(9)], 2), list(map(BlockId, range(101, 110)))
    engine.core.admit(request, 0, table)
    plan = engine.core.plan_step(StepView(new=[NewRequest(ReqId("a"), 0, table)], num_scheduled_tokens={ReqId("a"): 8}))
    (save,) = plan.saves
    assert [chunk.blocks for chunk in save.chunks] == [(block,) for block in table[:8]]
    for num_settled, chunk in enumerate(save.chunks, 1):
        engine.core.absorb(StepReport(saved=(chunk.ticket,)))
        assert sorted(engine.core._fences.everything()) == table[num_settled:8]


# -- lookups -------------------------------------------------------------------------------------------------------


def offered(num_tokens: int, stored: int, blocks_per_chunk: int, first_look: int) -> tuple[int | None, int, int, bool]:
    """What is offered of a prompt of which so many tokens are stored; how many got keys for it, in how many lookups; whether its
    lease is kept when it is asked for again."""
    engine = SymbolicEngine(Setup(block_tokens=2, blocks_per_chunk=blocks_per_chunk, num_frames=64))
    request = Request("a", [i % 3 for i in range(num_tokens)], 2)
    blocks = list(map(BlockId, range(1, stored // 2 + 1)))
    engine.store.check_visible = lambda *_: None  # nobody computes any KV here
    if blocks:
        other = Request("b", request.token_ids[:stored], 2)
        engine.core.admit(other, 0, blocks)
        view = StepView(new=[NewRequest(ReqId("b"), 0, blocks)], num_scheduled_tokens={ReqId("b"): stored})
        plan = engine.core.plan_step(view)
        engine.core.absorb(StepReport(saved=tuple(chunk.ticket for save in plan.saves for chunk in save.chunks)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "FIRST_LOOK_TOKENS", first_look)
        lookups, look_up = count(), engine.store.lookup
        patch.setattr(engine.store, "lookup", lambda chain: (next(lookups), look_up(chain))[1])
        found = engine.core.match(request, 0)
        tracker = engine.core._trackers[ReqId("a")]
        num_keyed, num_lookups, lease = tracker.chain.num_tokens, next(lookups), tracker.lease
        assert engine.core.match(request, 0) == found
    return found, num_keyed, num_lookups, tracker.lease is lease


@given(
    num_tokens=st.integers(1, 90),
    stored=st.integers(0, 90),
    blocks_per_chunk=st.sampled_from([1, 3]),
    first_look=st.integers(1, 20),
)
def test_what_is_offered_does_not_depend_on_how_far_keys_are_made_at_first(
    num_tokens: int, stored: int, blocks_per_chunk: int, first_look: int
) -> None:
    stored = min(stored, num_tokens)
    found, num_keyed, _, is_kept = offered(num_tokens, stored, blocks_per_chunk, first_look)
    assert is_kept
    assert found == offered(num_tokens, stored, blocks_per_chunk, 1 << 30)[0]
    chunk_tokens = 2 * blocks_per_chunk
    assert num_keyed <= max(first_look, 4 * (stored + chunk_tokens + 2)), "the keys of what is not stored were waited for"


def test_a_prompt_that_nobody_has_seen_gets_keys_of_its_beginning_and_of_what_is_saved() -> None:
    """The rest is not waited for by its first forward."""
    engine = SymbolicEngine(Setup(block_tokens=16, num_frames=1024))
    request, table = Request("a", [i % 7 for i in range(9000)], 2), list(map(BlockId, range(1, 601)))
    tracker = engine.core._tracker(request)
    assert engine.core.match(request, 0) == 0
    assert tracker.chain.num_tokens == queue.FIRST_LOOK_TOKENS
    engine.core.admit(request, 0, table[:240])
    engine.core.plan_step(StepView(new=[NewRequest(ReqId("a"), 0, table[:240])], num_scheduled_tokens={ReqId("a"): 3840}))
    assert tracker.chain.num_tokens == 3840


def test_a_long_prompt_that_is_found_is_looked_up_a_few_times() -> None:
    found, num_keyed, num_lookups, is_kept = offered(90, 80, 1, 1)
    assert (found, num_keyed) == (80, 90)
    assert num_lookups == 5, "1, 4, 16, 64 tokens, and all"
    assert is_kept


# -- loads ---------------------------------------------------------------------------------------------------------


@given(
    tiers=st.lists(st.sampled_from(["host", "host", "disk"]), max_size=12),
    begin=st.integers(0, 14),
    length=st.integers(0, 14),
)
def test_loads_planned_in_columns_are_those_planned_one_by_one(tiers: list[str], begin: int, length: int) -> None:
    table = list(map(BlockId, range(100, 130)))
    leased = [(50 + i, bytes([i]) * 32, i, 1, tier) for i, tier in enumerate(tiers)]
    copies, by_tier, covered = _copies(table, leased, begin, begin + length)
    assert (copies, by_tier, covered) == _copies_of_longer(table, leased, begin, begin + length)
    assert [block for chunk in copies for block in chunk.blocks] == table[begin:covered]
    assert covered == max(begin, min(len(tiers), begin + length)), "what is not covered is lost"


def test_a_longer_chunk_behind_a_short_one_is_loaded_whole() -> None:
    """No store leases such a prefix; if one did, no block may be left out unheard of."""
    table = list(map(BlockId, range(100, 110)))
    copies, by_tier, covered = _copies(table, [(50, b"a" * 32, 0, 1, "host"), (51, b"b" * 32, 1, 2, "host")], 0, 4)
    assert [chunk.blocks for chunk in copies] == [(100,), (101, 102)]
    assert (by_tier, covered) == ({"host": 3}, 3)


def test_a_block_table_shorter_than_promised_is_an_error_where_it_is_planned() -> None:
    """Not in the worker, where the request would hear nothing."""
    leased = [(50 + i, bytes([i]) * 32, i, 1, "host") for i in range(4)]
    with pytest.raises(ValueError, match="4 chunks for 3 blocks"):
        _copies(list(map(BlockId, (7, 8, 9))), leased, 0, 4)


def test_leased_chunks_with_a_gap_are_planned_one_by_one() -> None:
    """No store leases such a prefix either."""
    leased = [(50, b"a" * 32, 0, 1, "host"), (51, b"b" * 32, 2, 1, "host")]
    copies, _, covered = _copies(list(map(BlockId, (7, 8, 9))), leased, 0, 3)
    assert [chunk.blocks for chunk in copies] == [(7,), (9,)] and covered == 3


# -- tickets -------------------------------------------------------------------------------------------------------


class OneByOne:
    """How tickets settle, obviously."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.left: dict[int, int] = {}
        self.failed: set[int] = set()

    def settle(self, saved: list[int], failed: list[int]) -> tuple[list[int], list[int]]:
        self.failed |= set(failed) & self.left.keys()
        done = []
        for ticket in saved + failed:
            if ticket in self.left:
                self.left[ticket] -= 1
                if not self.left[ticket]:
                    del self.left[ticket]
                    done.append(ticket)
        return [t for t in done if t not in self.failed], [t for t in done if t in self.failed]


reports = st.tuples(st.lists(st.integers(0, 6), max_size=7), st.lists(st.integers(0, 6), max_size=2))


@given(num_ranks=st.integers(1, 3), whole=st.lists(st.booleans(), max_size=8), events=st.lists(reports, max_size=8))
def test_tickets_settle_once_every_rank_reported_whatever_a_report_names(
    num_ranks: int, whole: list[bool], events: list[tuple[list[int], list[int]]]
) -> None:
    """Reports of all tickets, as a rank makes them, between reports of any: some twice, some unknown, some settled."""
    tickets, model = Tickets(num_ranks), OneByOne(num_ranks)
    tickets.add_many(numbers(*range(5)))
    model.left = dict.fromkeys(range(5), num_ranks)
    for is_whole, (saved_, failed) in zip([*whole, *[False] * 8], [*events, *[([], [])] * 8], strict=False):
        if is_whole:
            saved_, failed = list(range(5)), []
        settled = tickets.settle(numbers(*saved_), numbers(*failed))
        assert (list(settled.committed), list(settled.aborted)) == model.settle(saved_, failed)
        assert set(tickets) == set(model.left)
    if not tickets:
        assert not tickets._failed


def test_what_a_failed_ticket_would_have_superseded_stays() -> None:
    for is_failed in (False, True):
        tickets = Tickets(1)
        tickets.add([ChunkCopy(0, ChunkKey(b"k" * 32), 1, 0, (BlockId(1),), ticket) for ticket in numbers(1, 2)])
        tickets.supersede(Ticket(2), ChunkKey(b"t" * 32))
        settled = tickets.settle(numbers(1), ()) if is_failed else tickets.settle(numbers(1, 2), ())
        if is_failed:
            settled = tickets.settle((), numbers(2))
        assert settled.superseded == ([] if is_failed else [b"t" * 32])
        assert not tickets._supersedes
