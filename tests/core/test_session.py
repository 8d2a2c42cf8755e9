"""`_core.Session` makes batches and counts tickets as the doubles of `tests/model` do, in any order of events."""

from typing import Any

import pytest
from batches import reserve
from chunk_batch import Chunks, InFlight, chunks_to_load
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvloft import _core

FRAME = 4096
NAMESPACE = b"s" * 32


def session(num_frames: int, **kwargs: Any) -> _core.Session:
    return _core.Session(frame_bytes=FRAME, host_bytes=num_frames * FRAME, namespace=NAMESPACE, **kwargs)


def chain_of(prompt: list[int]) -> _core.KeyChain:
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(prompt)
    return chain


@given(
    num_blocks=st.integers(1, 14), per_chunk=st.integers(1, 4), stored=st.integers(0, 14),
    span=st.tuples(st.integers(0, 14), st.integers(0, 14)), as_list=st.booleans(),
)  # fmt: skip
def test_a_lease_gives_the_chunks_of_any_part_of_a_prompt(
    num_blocks: int, per_chunk: int, stored: int, span: tuple[int, int], as_list: bool
) -> None:
    """Chunks at either end may be wanted in part; behind the last one that is stored there is nothing."""
    store, chain = session(16, blocks_per_chunk=per_chunk), chain_of(list(range(num_blocks)))
    stored = min(stored, num_blocks)
    rows, dropped = reserve(store, chain, 0, stored // per_chunk, stored % per_chunk)
    assert dropped == 0
    assert store.settle([row[0] for row in rows]) == (len(rows), 0)
    begin, end = sorted(min(at, num_blocks) for at in span)
    table = [1000 + 3 * i for i in range(num_blocks)]
    leased = [(frame, key, first, num, "host") for _, frame, key, first, num in rows]
    found = store.acquire(chain).batch(table if as_list else tuple(table), begin, end)
    model, by_tier = chunks_to_load(leased, table, begin, end)
    assert (tuple(found[0]), found[1]) == (tuple(model), by_tier)
    assert found[0].columns() == model.columns()


@pytest.mark.parametrize("table", [[5, 6], [5, 6, -1], [5, 6, 2**31], [5, 6, "7"], b"567", [5, 6, None]])
def test_a_table_that_is_none_is_refused_and_nothing_stays_reserved(table: Any) -> None:
    """What the worker is told is made here: there the request would hear nothing of it."""
    store, chain = session(8), chain_of([1, 2, 3])
    store.settle([row[0] for row in reserve(store, chain, 0, 2)[0]])
    lease = store.acquire(chain)
    with pytest.raises((_core.ConfigError, TypeError)):
        store.reserve(chain, 0, 3, 0, table)
    with pytest.raises((_core.ConfigError, TypeError)):
        other = chain_of([7, 8, 9])
        store.reserve_all([(other, [], 3, 0, 3, 0, [4, 5, 6], 0), (chain, [], 3, 0, 3, 0, table, 0)])
    with pytest.raises((_core.ConfigError, TypeError)):
        lease.batch(table, 0, 3)
    stats = store.stats()
    assert (store.num_in_flight, stats["frames_reserved"]) == (0, 0)


def test_a_chain_may_be_in_one_row_only_and_else_nothing_stays_reserved() -> None:
    """Rows hold their chains until the store has answered: a second row of the same one must not wait for the first."""
    store, other, twice = session(8), chain_of([7]), chain_of([1, 2])
    rows = [(chain, [], chain.num_tokens, 0, 1, 0, [4, 5], 0) for chain in (other, twice, twice)]
    with pytest.raises(_core.StoreError, match="in use"):
        store.reserve_all(rows)
    assert (store.num_in_flight, store.stats()["frames_reserved"]) == (0, 0)
    assert [len(chunks or ()) for chunks in store.reserve_all(rows[:2])[0]] == [1, 1]


WHOLE = (1, 1)
FULL, OTHER, ALONE = (0, None, False), (1, 2, False), (2, 3, True)
"""A group with the chain's own keys, another that keeps the prefix, and one that keeps each block alone. Not said: how each table
is cut."""
Held = list[list[tuple[int, int]]]
"""Of each group and block of the chain: (where in the table, block) of what its chunk holds."""
SIZES = st.integers(1, 3)


def held_by(tables: list[list[int]], cuts: list[tuple[int, int]], num_blocks: int) -> list[Held]:
    """The last ones of each block of the chain."""
    return [
        [list(enumerate(table))[(n + 1) * each - kept : (n + 1) * each] for n in range(num_blocks)]
        for table, (each, kept) in zip(tables, cuts, strict=True)
    ]


@given(
    num_blocks=st.integers(1, 9), gone=st.integers(0, 12), begins=st.tuples(*[st.integers(0, 27)] * 3),
    sizes=st.tuples(SIZES, SIZES, SIZES), num_kept=SIZES,
    missing=st.none() | st.tuples(st.sampled_from(["lost", "null", "short"]), st.integers(0, 2)),
)  # fmt: skip
@example(num_blocks=2, gone=1, begins=(0, 0, 3), sizes=(1, 1, 2), num_kept=2, missing=None)
@example(num_blocks=2, gone=0, begins=(0, 0, 0), sizes=(1, 1, 2), num_kept=1, missing=None)
def test_a_lease_on_groups_gives_each_its_blocks_or_nothing(
    num_blocks: int, gone: int, begins: tuple[int, ...], sizes: tuple[int, ...], num_kept: int, missing: tuple[str, int] | None
) -> None:
    """``gone``: blocks that the last group has given up. Each is loaded from a block of its own table on, anywhere in a chunk."""
    store, chain = session(64), chain_of(list(range(num_blocks)))
    cuts = [(size, size) for size in sizes[:2]] + [(sizes[2], min(num_kept, sizes[2]))]
    ends = [num_blocks * size for size in sizes]
    tables = [[100 * (nth + 1) + block for block in range(end)] for nth, end in enumerate(ends)]
    given_up = [0] * min(gone, ends[2]) + tables[2][gone:]
    held = held_by([*tables[:2], given_up], cuts, num_blocks)
    groups = [(*group, cut) for group, cut in zip((FULL, OTHER, ALONE), cuts, strict=True)]
    ((batches, num_dropped),) = store.reserve_groups([(chain, [], 0, 0, num_blocks, [*tables[:2], given_up])], groups)
    saved = {nth: [(copy.blocks, copy.key) for copy in batch] for nth, batch in batches}
    assert num_dropped == 0
    wanted = [[tuple(block for _, block in own) for own in rows if all(block for _, block in own)] for rows in held]
    assert saved.keys() == {nth for nth, rows in enumerate(wanted) if rows}
    assert all([blocks for blocks, _ in rows] == wanted[nth] for nth, rows in saved.items())
    store.settle([ticket for _, batch in batches for ticket in batch.tickets()])

    starts, how, nth = [0, 0, num_blocks - len(wanted[2])], *(missing or ("", 0))
    begins = tuple(min(end, max(begin, start * size)) for begin, end, start, size in zip(begins, ends, starts, sizes, strict=True))
    if how == "lost" and nth in saved:
        assert store.discard([saved[nth][-1][1]]) == 1
    lease = store.acquire_groups(chain, num_blocks, [None, 2], [(3, starts[2], num_blocks)])
    if how == "null" and begins[nth] < ends[nth]:
        tables[nth][-1] = 0
    elif how == "short":
        tables[nth].pop()
    found = lease.batches([(tables[n], starts[n], num_blocks, begins[n], cuts[n]) for n in range(3)])
    there = [{at for own in rows[start:] for at, _ in own} for rows, start in zip(held, starts, strict=True)]
    has_all = all(set(range(begin, end)) <= own for begin, end, own in zip(begins, ends, there, strict=True))
    is_hurt = how == "short" or (how == "lost" and nth in saved) or (how == "null" and begins[nth] < ends[nth])
    assert (found is not None) == (has_all and not is_hurt)
    if found is not None:
        loaded = [[(copy.blocks, copy.key) for copy in batch] for batch in found[0]]
        assert loaded == [
            [
                (own, key)
                for (blocks, key) in saved.get(n, [])
                if (own := tuple(block for block in blocks if block in tables[n][begins[n] :]))
            ]
            for n in range(3)
        ]
        num_loaded = num_blocks - begins[0] // sizes[0]
        assert found[1] == ({"host": num_loaded} if num_loaded else {})
    if not how:
        assert lease.poll() == (2 * num_blocks + len(wanted[2]), 0)
    lease.release()
    assert store.stats()["pins"] == 0


@pytest.mark.parametrize("cut", [(0, 0), (2, 0), (1, 2), (-1, 1), (1,)])
def test_a_table_that_cannot_be_cut_so_is_an_error(cut: Any) -> None:
    store, chain = session(4), chain_of([7])
    with pytest.raises((_core.ConfigError, OverflowError, ValueError)):
        store.reserve_groups([(chain, [], 0, 0, 1, [[], [], [1, 2]])], [(*ALONE, cut)])
    lease = store.acquire_groups(chain, 1, [None], [])
    with pytest.raises((_core.ConfigError, OverflowError, ValueError)):
        lease.batches([([1, 2], 0, 1, 0, cut)])
    assert store.num_in_flight == 0


@pytest.mark.parametrize(("groups", "dropped"), [([ALONE], 4), ([FULL, ALONE], 0)])
def test_blocks_that_are_kept_alone_count_as_dropped_where_nothing_else_is_kept(groups: list[Any], dropped: int) -> None:
    store, chain, tables = session(8), chain_of(list(range(12))), [list(range(1, 13)), [], list(range(21, 33))]
    num_blocks = 12 if len(groups) == 1 else 8  # of eight all of the first group find a frame
    cut = [(*group, WHOLE) for group in groups]
    ((batches, num_dropped),) = store.reserve_groups([(chain, [], 0, 0, num_blocks, tables)], cut)
    assert (sum(len(batch) for _, batch in batches), num_dropped) == (8, dropped)


def test_states_are_reserved_for_many_requests_and_those_that_are_there_are_left_out() -> None:
    store, one, other = session(3), chain_of([1, 2]), chain_of([1, 3])
    found = store.reserve_attached([(one, 4, 0, 7), (one, 4, 1, 8), (other, 4, 0, 9), (other, 4, 1, 10), (one, 5, 1, 11)])
    assert [chunks and chunks.block_ids() for chunks in found] == [[7], [8], None, [10], None], (
        "the first is one's, the last has no frame"
    )
    with pytest.raises(_core.ConfigError, match="no such full block"):
        store.reserve_attached([(one, 6, 0, 7), (one, 6, 2, 8)])
    assert store.num_in_flight == 3


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
    """Reports of ranks over chunks of one block, or of two where the first is replaced; beside them the model's count."""

    @initialize(num_ranks=st.integers(1, 3))
    def open(self, num_ranks: int) -> None:
        self.store = session(64, num_ranks=num_ranks, blocks_per_chunk=2)
        self.model = InFlight(num_ranks)
        self.visible: dict[tuple[int, ...], bool] = {}
        self.prompt_of: dict[int, tuple[int, ...]] = {}
        self.every: list[int] = []
        self.next_prompt = 0

    @rule(blocks=st.lists(st.integers(0, 6), min_size=1, max_size=5), random=st.randoms(use_true_random=False))
    def saves_are_planned(self, blocks: list[int], random: Any) -> None:
        """Of requests that share blocks, as happens over time; block 0 belongs to no request. Some take another chunk's place."""
        first, self.next_prompt = self.next_prompt, self.next_prompt + len(blocks)
        tails = [prompt for prompt in self.visible if len(prompt) == 1]
        wanted = []
        for nth, block in zip(range(first, self.next_prompt), blocks, strict=True):
            begun = random.choice(tails) if tails and random.random() < 0.3 else ()
            wanted.append(((*begun, nth), [random.randrange(1, 7), block] if begun else [block], len(begun)))
        rows = [(chain_of([]), list(prompt), len(prompt), 0, num, 1 - num, table, num) for prompt, table, num in wanted]
        for (prompt, table, num), chunks, dropped in zip(wanted, *self.store.reserve_all(rows), strict=True):
            if dropped or chunks is None:
                assert dropped or not table[-1]
                continue
            assert [chunk.blocks for chunk in chunks] == ([tuple(table)] if table[-1] else []), "the null block was saved"
            self.model.add(Chunks(chunks))
            for ticket in chunks.tickets():
                self.prompt_of[ticket] = prompt
                self.model.supersedes |= {ticket: chain_of(list(prompt)).key(0)} if num else {}
                self.every.append(ticket)

    @precondition(lambda self: self.every)
    @rule(random=st.randoms(use_true_random=False), with_unknown=st.booleans(), is_whole=st.booleans())
    def a_rank_reports(self, random: Any, with_unknown: bool, is_whole: bool) -> None:
        """All that is in flight, as a rank does; or any, some twice, some settled long ago, some never heard of."""
        tickets = list(self.model.left) if is_whole else random.choices(self.every, k=random.randrange(6)) if self.every else []
        failed = [ticket for ticket in tickets if random.random() < 0.2]
        saved = [ticket for ticket in tickets if ticket not in failed] + [10**9] * with_unknown
        committed, aborted, superseded = self.model.settle(saved, failed)
        assert self.store.settle(saved, failed) == (len(committed), len(aborted))
        self.visible |= {self.prompt_of[ticket]: True for ticket in committed}
        for key in superseded:
            self.visible |= {prompt: False for prompt in self.visible if len(prompt) == 1 and chain_of([*prompt]).key(0) == key}

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
            found = {prompt for prompt in self.prompt_of.values() if self.store.lookup(chain_of([*prompt]))[0] == len(prompt)}
            assert found <= {prompt for prompt, visible in self.visible.items() if visible}, "I3"
            if self.next_prompt <= 60:
                assert found == {prompt for prompt, visible in self.visible.items() if visible}


TestSaves = Saves.TestCase
TestSaves.settings = settings(max_examples=settings().max_examples * 3, stateful_step_count=40)
