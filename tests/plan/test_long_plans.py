"""Tests offers and saves of long prompts that are split arbitrarily into steps and lookups."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from chunk_batch import chunks_to_load
from hypothesis import given
from hypothesis import strategies as st
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import tables

from kvloft.plan import load_planner, lookup
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.plan import StepReport
from kvloft.seam.views import NewRequest, StepView


def test_each_block_is_fenced_by_its_own_save() -> None:
    engine = SymbolicEngine(Setup(block_tokens=1, num_frames=64))
    engine.store.check_visible = lambda *_: None  # no KV is computed here
    request, table = Request("a", [i % 3 for i in range(9)], 2), list(map(BlockId, range(101, 110)))
    engine.core.admit(request, 0, tables(table))
    plan = engine.core.plan_step(
        StepView(new=[NewRequest(ReqId("a"), 0, table)], num_scheduled_tokens={ReqId("a"): 8})
    )
    (save,) = plan.saves
    assert [chunk.blocks for chunk in save.chunks] == [(block,) for block in table[:8]]
    for num_settled, chunk in enumerate(save.chunks, 1):
        engine.core.absorb(StepReport(saved=(chunk.ticket,)))
        assert sorted(engine.store.being_read()) == table[num_settled:8]


# -- lookups ---------------------------------------------------------------------------------------


def offered(num_tokens: int, stored: int, first_look: int) -> tuple[int | None, int, int, bool]:
    """Return the offer for a prompt with ``stored`` stored tokens, the number of computed keys, the
    number of lookups, and whether the lease is kept when vLLM repeats the call.
    """
    engine = SymbolicEngine(Setup(block_tokens=2, num_frames=64))
    request = Request("a", [i % 3 for i in range(num_tokens)], 2)
    blocks = list(map(BlockId, range(1, stored // 2 + 1)))
    engine.store.check_visible = lambda *_: None  # no KV is computed here
    if blocks:
        other = Request("b", request.token_ids[:stored], 2)
        engine.core.admit(other, 0, tables(blocks))
        view = StepView(
            new=[NewRequest(ReqId("b"), 0, blocks)], num_scheduled_tokens={ReqId("b"): stored}
        )
        plan = engine.core.plan_step(view)
        engine.core.absorb(
            StepReport(saved=tuple(chunk.ticket for save in plan.saves for chunk in save.chunks))
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "FIRST_LOOKUP_TOKENS", first_look)
        lookups, look_up = count(), engine.store.lookup
        patch.setattr(engine.store, "lookup", lambda chain: (next(lookups), look_up(chain))[1])
        found = engine.match(request, 0)
        tracker = engine.core._requests[ReqId("a")]
        num_keyed, num_lookups, lease = tracker.chain.num_tokens, next(lookups), tracker.lease
        assert engine.match(request, 0) == found
    return found, num_keyed, num_lookups, tracker.lease is lease


@given(
    num_tokens=st.integers(1, 90),
    stored=st.integers(0, 90),
    first_look=st.integers(1, 20),
)
def test_offers_do_not_depend_on_the_first_lookups_length(
    num_tokens: int, stored: int, first_look: int
) -> None:
    stored = min(stored, num_tokens)
    found, num_keyed, _, is_kept = offered(num_tokens, stored, first_look)
    assert is_kept
    assert found == offered(num_tokens, stored, 1 << 30)[0]
    assert num_keyed <= max(first_look, 4 * (stored + 4)), (
        "computed keys of chunks that are not stored"
    )


def test_a_new_prompt_gets_keys_for_its_start_and_its_saves() -> None:
    """The first forward pass must not wait for the keys of the rest of the prompt."""
    engine = SymbolicEngine(Setup(block_tokens=16, num_frames=1024))
    request, table = (
        Request("a", [i % 7 for i in range(9000)], 2),
        list(map(BlockId, range(1, 601))),
    )
    tracker = engine.core._request(request)
    assert engine.match(request, 0) == 0
    assert tracker.chain.num_tokens == lookup.FIRST_LOOKUP_TOKENS
    engine.core.admit(request, 0, tables(table[:240]))
    engine.core.plan_step(
        StepView(
            new=[NewRequest(ReqId("a"), 0, table[:240])], num_scheduled_tokens={ReqId("a"): 3840}
        )
    )
    assert tracker.chain.num_tokens == 3840


def test_a_long_prompt_that_is_found_is_looked_up_a_few_times() -> None:
    found, num_keyed, num_lookups, is_kept = offered(90, 80, 1)
    assert (found, num_keyed) == (80, 90)
    assert num_lookups == 5, "expected lookups of 1, 4, 16, 64 and all tokens"
    assert is_kept


# -- null blocks -----------------------------------------------------------------------------------


@given(
    num_blocks=st.integers(1, 40),
    null=st.sets(st.integers(0, 40), max_size=3),
    stored=st.integers(0, 40),
)
def test_every_missing_chunk_is_saved_from_its_own_blocks_but_for_those_with_a_null_block(
    num_blocks: int, null: set[int], stored: int
) -> None:
    engine = SymbolicEngine(Setup(block_tokens=1, num_frames=128))
    engine.store.check_visible = lambda *_: None  # no KV is computed here
    request = Request("a", [i % 3 for i in range(num_blocks)], 2)
    stored = min(stored, num_blocks)
    if stored:
        table = list(map(BlockId, range(1, stored + 1)))
        engine.core.admit(Request("b", request.token_ids[:stored], 2), 0, tables(table))
        view = StepView(
            new=[NewRequest(ReqId("b"), 0, table)], num_scheduled_tokens={ReqId("b"): stored}
        )
        plan = engine.core.plan_step(view)
        engine.core.absorb(
            StepReport(saved=tuple(chunk.ticket for save in plan.saves for chunk in save.chunks))
        )
    table = [BlockId(0 if i in null else 1000 + i) for i in range(num_blocks)]
    engine.core.admit(request, 0, tables(table))
    plan = engine.core.plan_step(
        StepView(
            new=[NewRequest(ReqId("a"), 0, table)], num_scheduled_tokens={ReqId("a"): num_blocks}
        )
    )
    wanted = [(block,) for unit, block in enumerate(table) if unit >= stored and block]
    assert [chunk.blocks for save in plan.saves for chunk in save.chunks] == wanted
    assert set(engine.store.tickets) == {
        chunk.ticket for save in plan.saves for chunk in save.chunks
    }, "I5"


# -- loads -----------------------------------------------------------------------------------------


@given(num_leased=st.integers(0, 9), local=st.integers(0, 9), promised=st.integers(0, 9))
def test_blocks_that_were_promised_and_are_not_leased_are_lost(
    num_leased: int, local: int, promised: int
) -> None:
    table = list(map(BlockId, range(100, 120)))
    rows = [(50 + i, bytes([i]) * 32, "disk" if i % 2 else "host") for i in range(num_leased)]
    lease = SimpleNamespace(
        store_lease=SimpleNamespace(
            batch=lambda every, begin, end: chunks_to_load(rows, every[0], begin, end)
        )
    )
    tracker: Any = SimpleNamespace(
        lease=lease, blocks=tables(table), local_tokens=2 * local, req_id=ReqId("a")
    )
    load = load_planner.plan_load(tracker, 2, 2 * promised, 3)
    covered = max(local, min(num_leased, local + promised))
    assert [block for chunk in load.plan.chunks for block in chunk.blocks] == table[local:covered]
    assert list(load.plan.lost) == table[covered : local + promised]
    assert sorted(load.plan.blocks()) == table[local : local + promised]
    assert (load.lease, tracker.lease, sum(load.tokens_by_tier.values())) == (
        lease,
        None,
        2 * (covered - local),
    )
