"""Tests that `_core.Session` produces the same batches and ticket counts as the models in
`tests/model`, for any order of events.
"""

from typing import Any

import pytest
from batches import reserve
from chunk_batch import Chunks, InFlight, chunks_to_load
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloft import _core
from kvloft.errors import ConfigError, StoreError

FRAME = 4096
NAMESPACE = b"s" * 32


def session(num_frames: int, **kwargs: Any) -> _core.Session:
    return _core.Session(
        frame_bytes=FRAME, host_bytes=num_frames * FRAME, namespace=NAMESPACE, **kwargs
    )


def chain_of(prompt: list[int]) -> _core.KeyChain:
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(prompt)
    return chain


@given(
    num_blocks=st.integers(1, 14),
    stored=st.integers(0, 14),
    span=st.tuples(st.integers(0, 14), st.integers(0, 14)),
    as_list=st.booleans(),
)
def test_a_lease_returns_the_chunks_of_any_part_of_a_prompt(
    num_blocks: int, stored: int, span: tuple[int, int], as_list: bool
) -> None:
    """Units after the last stored unit add no chunks."""
    store, chain = session(16), chain_of(list(range(num_blocks)))
    stored = min(stored, num_blocks)
    rows, dropped = reserve(store, chain, 0, stored)
    assert dropped == 0
    assert store.settle([row[0] for row in rows]) == (len(rows), 0)
    begin, end = sorted(min(at, num_blocks) for at in span)
    table = [1000 + 3 * i for i in range(num_blocks)]
    leased = [(frame, key, "host") for _, frame, key, _ in rows]
    found = store.acquire(chain).batch([table if as_list else tuple(table)], begin, end)
    model, by_tier = chunks_to_load(leased, table, begin, end)
    assert (tuple(found[0]), found[1]) == (tuple(model), by_tier)
    assert found[0].columns() == model.columns()


@pytest.mark.parametrize(
    "table", [[5, 6], [5, 6, -1], [5, 6, 2**31], [5, 6, "7"], b"567", [5, 6, None]]
)
def test_a_table_that_is_none_is_refused_and_nothing_stays_reserved(table: Any) -> None:
    """The scheduler side builds the worker's batch, because the worker could not attribute an error
    to the request.
    """
    store, chain = session(8), chain_of([1, 2, 3])
    store.settle([row[0] for row in reserve(store, chain, 0, 2)[0]])
    lease = store.acquire(chain)
    with pytest.raises((ConfigError, TypeError)):
        store.reserve([(chain, [], 3, 0, 3, [table])])
    with pytest.raises((ConfigError, TypeError)):
        other = chain_of([7, 8, 9])
        store.reserve([(other, [], 3, 0, 3, [[4, 5, 6]]), (chain, [], 3, 0, 3, [table])])
    try:
        assert not lease.batch([table], 0, 3)[0], "the table is too short"
    except (ConfigError, TypeError):
        assert len(table) == 3
    stats = store.stats()
    assert (store.num_in_flight, stats["frames_reserved"]) == (0, 0)


def test_a_chain_in_two_rows_is_rejected_without_reservations() -> None:
    """A row locks its chain until the store responds, so a second row with the same chain would
    deadlock.
    """
    store, other, twice = session(8), chain_of([7]), chain_of([1, 2])
    rows = [(chain, [], chain.num_tokens, 0, 1, [[4, 5]]) for chain in (other, twice, twice)]
    with pytest.raises(StoreError, match="in use"):
        store.reserve(rows)
    assert (store.num_in_flight, store.stats()["frames_reserved"]) == (0, 0)
    assert [len(chunks or ()) for chunks in store.reserve(rows[:2])[0]] == [1, 1]


STATES = [
    (None, "full", 1, 1, 1, 0, 0, None),
    (2, "state", 1, 1, 1, 0, 0, None),
    (3, "state", 1, 1, 1, 0, 0, None),
]


def test_missing_states_are_reserved_for_many_requests() -> None:
    store, one, other = session(3, groups=STATES), chain_of([1, 2]), chain_of([1, 3])
    found = store.reserve_states(
        [(one, 1, 0, 7), (one, 1, 1, 8), (other, 1, 0, 9), (other, 1, 1, 10), (one, 2, 1, 11)]
    )
    assert [chunks and chunks.block_ids() for chunks in found] == [[7], [8], None, [10], None], (
        "the first chunk belongs to another save, the last has no frame"
    )
    with pytest.raises(ConfigError, match="block has no key yet"):
        store.reserve_states([(one, 2, 0, 7), (one, 2, 2, 8)])
    assert store.num_in_flight == 3


@pytest.mark.parametrize(("has_full", "dropped"), [(False, 4), (True, 0)])
def test_windows_without_a_frame_count_as_dropped_without_full_attention(
    has_full: bool, dropped: int
) -> None:
    groups = [(None, "full", 1, 1, 1, 0, 0, None)] * has_full + [(5, "window", 1, 1, 1, 3, 0, None)]
    store, num_units = (
        session(8, groups=groups),
        8 if has_full else 12,
    )  # with eight frames, every complete chunk gets a frame
    chain, tables = (
        chain_of(list(range(12))),
        [list(range(1, 13)), list(range(21, 33))][-len(groups) :],
    )
    (chunks,), (num_dropped,) = store.reserve([(chain, [], 0, 0, num_units, tables)])
    assert (len(chunks or ()), num_dropped) == (8, dropped)


def test_a_session_that_ends_leaves_nothing_reserved_or_pinned() -> None:
    store, chain = session(8), chain_of([1, 2, 3])
    rows, _ = reserve(store, chain, 0, 3)
    store.settle([rows[0][0]])
    lease = store.acquire(chain)
    assert (store.stats()["pins"], store.stats()["frames_reserved"]) == (1, 2)
    del lease
    assert store.stats()["pins"] == 0
    store.close()
    assert store.stats()["frames_reserved"] == 0
    assert store.settle([row[0] for row in rows]) == (0, 0)


class Saves(RuleBasedStateMachine):
    """Sends ranks' reports about one-block chunks, and compares the results with the model's
    counts.
    """

    @initialize(num_ranks=st.integers(1, 3))
    def open(self, num_ranks: int) -> None:
        self.store = session(64, num_ranks=num_ranks)
        self.model = InFlight(num_ranks)
        self.visible: set[int] = set()
        self.prompt_of: dict[int, int] = {}
        self.every: list[int] = []
        self.next_prompt = 0

    @rule(blocks=st.lists(st.integers(0, 6), min_size=1, max_size=5))
    def saves_are_planned(self, blocks: list[int]) -> None:
        """Plan saves of new requests, which can reuse blocks of earlier requests.

        Block 0 does not belong to any request.
        """
        first, self.next_prompt = self.next_prompt, self.next_prompt + len(blocks)
        prompts = range(first, self.next_prompt)
        rows = [
            (chain_of([]), [prompt], 1, 0, 1, [[block]])
            for prompt, block in zip(prompts, blocks, strict=True)
        ]
        for prompt, block, chunks, dropped in zip(
            prompts, blocks, *self.store.reserve(rows), strict=True
        ):
            if dropped or chunks is None:
                assert dropped or not block
                continue
            assert [chunk.blocks for chunk in chunks] == ([(block,)] if block else []), (
                "the null block was saved"
            )
            self.model.add(Chunks(chunks))
            for ticket in chunks.tickets():
                self.prompt_of[ticket] = prompt
                self.every.append(ticket)

    @precondition(lambda self: self.every)
    @rule(
        random=st.randoms(use_true_random=False), with_unknown=st.booleans(), is_whole=st.booleans()
    )
    def a_rank_reports(self, random: Any, with_unknown: bool, is_whole: bool) -> None:
        """Report all saves in flight for one rank, or arbitrary tickets, which can be repeated, old
        or unknown.
        """
        tickets = (
            list(self.model.left)
            if is_whole
            else random.choices(self.every, k=random.randrange(6))
            if self.every
            else []
        )
        failed = [ticket for ticket in tickets if random.random() < 0.2]
        saved = [ticket for ticket in tickets if ticket not in failed] + [10**9] * with_unknown
        committed, aborted = self.model.settle(saved, failed)
        assert self.store.settle(saved, failed) == (len(committed), len(aborted))
        self.visible |= {self.prompt_of[ticket] for ticket in committed}

    @precondition(lambda self: self.model.left)
    @rule(random=st.randoms(use_true_random=False), everything=st.booleans())
    def plans_are_given_up(self, random: Any, everything: bool) -> None:
        tickets = [ticket for ticket in self.model.left if everything or random.random() < 0.3]
        self.store.abort(None if everything else tickets)
        self.model.forget(tickets)

    @precondition(lambda self: self.every)
    @rule()
    def everything_is_forgotten(self) -> None:
        self.store.clear()
        self.model.failed |= self.model.left.keys()
        self.visible.clear()

    @invariant()
    def it_counts_as_the_model(self) -> None:
        if hasattr(self, "store"):
            assert self.store.num_in_flight == len(self.model.left)
            assert self.store.stats()["frames_reserved"] == len(self.model.left), "I5"
            assert sorted(self.store.being_read()) == self.model.being_read(None), "I2"
            assert self.store.being_read(list(range(9))) == self.model.being_read(range(9))
            found = {
                prompt
                for prompt in self.prompt_of.values()
                if self.store.lookup(chain_of([prompt]))[0]
            }
            assert found <= self.visible, "I3"
            if self.next_prompt <= 60:
                assert found == self.visible


TestSaves = Saves.TestCase
TestSaves.settings = settings(max_examples=settings().max_examples * 3, stateful_step_count=40)
