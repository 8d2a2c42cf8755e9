"""Compares hits, leases and saves of multiple KV cache groups in the real store with a brute-force
search of the saved chunks.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloft import _core
from kvloft.errors import ConfigError
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.store import groups_of

UNIT = 4
"""Number of tokens in a unit, which contains one or more blocks of a group."""
MAX_UNITS = 12
FRAME = 4096

SIZES = st.sampled_from([(UNIT, 1), (UNIT, 1), (2, 2), (1, 4)])
"""Number of tokens per block and number of blocks per unit."""
WINDOWS = st.builds(
    lambda size, reach: GroupShape(*size, kind="window", reach=reach), SIZES, st.integers(0, 40)
)
SOME_WINDOW = WINDOWS.filter(lambda group: group.reach > 0)
"""Without full attention, a hit must require at least some blocks of a group."""
LOCALS = st.builds(
    lambda size, reach: GroupShape(*size, kind="local", reach=reach), SIZES, st.integers(1, 40)
)
STATES = SIZES.map(lambda size: GroupShape(*size, kind="state"))
OTHERS = WINDOWS | LOCALS | STATES
FULL = GroupShape(UNIT)
FULLS = SIZES.map(lambda size: GroupShape(*size))


def attended_blocks(group: GroupShape, boundary: int) -> set[int]:
    """Return the blocks with tokens that the query after ``boundary`` units can attend to, or the
    block with the state that the query continues from.
    """
    query = boundary * UNIT
    if group.kind == "state":
        return {at // group.block_tokens for at in range(max(0, query - 1), query)}
    seen = {
        "full": lambda at: True,
        "window": lambda at: query - at <= group.reach,
        "local": lambda at: at // group.reach == query // group.reach,
    }[group.kind]
    return {at // group.block_tokens for at in range(query) if seen(at)}


def attended(group: GroupShape, boundary: int) -> set[int]:
    """Return the units that contain the `attended_blocks`."""
    return {block // group.blocks_per_unit for block in attended_blocks(group, boundary)}


@given(OTHERS | FULLS, st.integers(0, MAX_UNITS))
def test_chunks_keep_all_blocks_that_any_prefix_needs(group: GroupShape, boundary: int) -> None:
    first_kept = group.blocks_per_unit - group.kept_blocks
    assert group.kept_blocks >= 1
    assert all(
        block % group.blocks_per_unit >= first_kept for block in attended_blocks(group, boundary)
    )


def block_of(nth: int, block: int) -> int:
    """Return the paged block id of a group's block. Groups have separate block ids."""
    return 1000 * (nth + 1) + block


@dataclass
class Bench:
    """A store with some chunks of one prompt, identified by group and unit."""

    shape: CacheShape
    num_units: int
    stored: set[tuple[int, int]]
    store: _core.Session = field(init=False)
    chain: _core.KeyChain = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        self.store = _core.Session(
            frame_bytes=FRAME, host_bytes=FRAME * 4096, namespace=bytes(32), groups=groups_of(shape)
        )
        self.chain = _core.KeyChain(_core.root_key(bytes(32), None, None), block_tokens=UNIT)
        self.chain.append_tokens(list(range(self.num_units * UNIT)))
        for unit in range(self.num_units):
            self._save(unit)

    def _save(self, unit: int) -> None:
        """Save the chunks of one unit that are listed in `stored`.

        Missing chunks of sliding-window groups have null blocks.
        """
        has_full = all(
            (nth, unit) in self.stored
            for nth, group in enumerate(self.shape.groups)
            if group.kind == "full"
        )
        tables = self.tables(lambda nth, at: (nth, at) in self.stored)
        if has_full or not self.shape.is_dense:
            (chunks,), _ = self.store.reserve([(self.chain, (), 0, unit, unit + 1, tables)])
            self.store.settle(chunks.tickets() if chunks else ())
        elif others := {
            nth
            for nth, group in enumerate(self.shape.groups)
            if (nth, unit) in self.stored and group.kind != "full"
        }:
            # Reserve the whole unit, but fail the chunks of full-attention groups.
            (chunks,), _ = self.store.reserve([(self.chain, (), 0, unit, unit + 1, tables)])
            for nth, batch in chunks.by_group() if chunks else ():
                self.store.settle(batch.tickets(), () if nth in others else batch.tickets())
        states = [
            nth
            for nth, group in enumerate(self.shape.groups)
            if group.kind == "state" and (nth, unit) in self.stored
        ]
        for chunks in self.store.reserve_states([(self.chain, nth, unit, 7) for nth in states]):
            self.store.settle(chunks.tickets() if chunks else ())

    def tables(self, is_there: object = None) -> list[list[int]]:
        """Return block tables of full length, with null blocks for missing units."""
        tables = []
        for nth, group in enumerate(self.shape.groups):
            blocks = range(self.num_units * group.blocks_per_unit)
            own = group.kind == "full" or not callable(is_there)
            tables.append(
                [
                    block_of(nth, at) if own or is_there(nth, at // group.blocks_per_unit) else 0
                    for at in blocks
                ]
            )  # type: ignore[operator]
        return tables

    def hit(self, most: int = MAX_UNITS) -> int:
        host, stored = self.store.lookup(self.chain)
        found = self.store.deepest_hit(self.chain, min(host, most), min(stored, most))
        assert found[0] == found[1], "all chunks are in host memory"
        return found[1]


def needs(shape: CacheShape, boundary: int) -> set[tuple[int, int]]:
    return {
        (nth, unit) for nth, group in enumerate(shape.groups) for unit in attended(group, boundary)
    }


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    groups = draw(
        st.permutations([draw(FULLS | SOME_WINDOW), *draw(st.lists(OTHERS | FULLS, max_size=3))])
    )
    shape, num_units = CacheShape(tuple(groups)), draw(st.integers(0, MAX_UNITS))
    names = [(nth, unit) for nth in range(len(groups)) for unit in range(num_units)]
    absent = (
        draw(st.sets(st.sampled_from(names), max_size=6) | st.sets(st.sampled_from(names)))
        if names
        else set()
    )
    # In all full-attention groups, chunks end before the first unit that one of the groups lacks.
    full = [nth for nth, group in enumerate(groups) if group.kind == "full"]
    end = min((unit for nth, unit in absent if nth in full), default=num_units)
    stored = {(nth, unit) for nth, unit in names if nth not in full or unit < end}
    return Bench(shape, num_units, stored - absent)


@settings(max_examples=300)
@given(benches(), st.integers(0, MAX_UNITS), st.integers(0, MAX_UNITS))
def test_a_hit_is_the_deepest_boundary_with_all_chunks_in_every_group(
    bench: Bench, most: int, begin: int
) -> None:
    shape = bench.shape
    wanted = max(
        at for at in range(min(bench.num_units, most) + 1) if needs(shape, at) <= bench.stored
    )
    assert bench.hit(most) == wanted
    pins = bench.store.stats()["pins"]
    lease = bench.store.acquire(bench.chain, wanted)
    assert bench.store.stats()["pins"] - pins == len(needs(shape, wanted))
    assert lease.poll() == (wanted, 0)
    begin = min(begin, wanted)
    chunks, by_tier = lease.batch(bench.tables(), begin, wanted)
    loaded = {
        (nth, block, copy.key)
        for nth, batch in chunks.by_group()
        for copy in batch
        for block in copy.blocks
    }
    expected = [
        (nth, at) for nth, group in enumerate(shape.groups) for at in attended_blocks(group, wanted)
    ]
    sizes = [group.blocks_per_unit for group in shape.groups]
    expected = [(nth, at) for nth, at in expected if at >= begin * sizes[nth]]
    assert loaded == {
        (nth, block_of(nth, at), bench.chain.key(at // sizes[nth], shape.number_of(nth)))
        for nth, at in expected
    }
    if begin < wanted:
        assert by_tier == {"host": wanted - begin}
    lease.release()
    assert bench.store.stats()["pins"] == pins


def whole(shape: CacheShape, num_units: int) -> Bench:
    return Bench(
        shape,
        num_units,
        {(nth, unit) for nth in range(len(shape.groups)) for unit in range(num_units)},
    )


def test_a_lease_returns_no_chunks_if_a_group_lacks_a_block() -> None:
    bench = whole(CacheShape((FULL, GroupShape(UNIT, kind="window", reach=5))), 4)
    lease = bench.store.acquire(bench.chain, 4)
    assert len(lease.batch([[1, 2, 3, 4], [0, 0, 7, 8]], 0, 4)[0]) == 6
    assert lease.batch([[1, 2, 3, 4], [0, 0, 0, 8]], 0, 4) == (_core.ChunkBatch([], b""), {})
    assert not lease.batch([[1, 2, 3, 4], [0, 0, 7]], 0, 4)[0], "the table is too short"
    assert not lease.batch([[1, 2, 3, 4], [0, 0, 7, 8]], 0, 3)[0], (
        "a shorter prefix needs different chunks"
    )


def test_a_lease_with_a_removed_chunk_is_empty() -> None:
    shape = CacheShape((FULL, GroupShape(UNIT, kind="state")))
    bench = whole(shape, 3)
    assert bench.store.acquire(bench.chain, 3).poll() == (3, 0)
    bench.store.discard([bench.chain.key(2, shape.number_of(1))])
    assert bench.store.acquire(bench.chain, 3).poll() == (0, 0)


def test_a_chunk_whose_block_vllm_has_freed_is_left_out_and_so_is_one_without_a_block() -> None:
    bench = Bench(CacheShape((FULL, GroupShape(2, 2, kind="window", reach=3))), 3, set())
    (chunks,), dropped = bench.store.reserve(
        [(bench.chain, (), 0, 0, 3, [[1, 2, 3], [0, 0, 0, 14]])]
    )
    assert chunks is not None
    assert {nth: batch.block_ids() for nth, batch in chunks.by_group()} == {0: [1, 2, 3]}
    assert dropped == [0]
    bench.store.abort()
    (chunks,), _ = bench.store.reserve([(bench.chain, (), 0, 0, 3, [[1, 2, 3], [0, 0, 13, 14]])])
    assert chunks is not None
    assert {nth: batch.block_ids() for nth, batch in chunks.by_group()} == {
        0: [1, 2, 3],
        1: [13, 14],
    }


def test_between_two_local_chunks_a_hit_needs_neither() -> None:
    shape = CacheShape(
        (
            FULL,
            GroupShape(UNIT, kind="local", reach=4 * UNIT),
            GroupShape(UNIT, kind="window", reach=UNIT),
        )
    )
    stored = (
        {(0, unit) for unit in range(10)}
        | {(1, unit) for unit in range(3)}
        | {(2, unit) for unit in range(7)}
    )
    assert Bench(shape, 10, stored).hit() == 4


def test_a_complete_group_is_looked_up_again_for_a_shorter_prefix() -> None:
    window = GroupShape(UNIT, kind="window", reach=2 * UNIT)
    stored = {(nth, unit) for nth in range(3) for unit in range(8)} - {(1, 4), (2, 6)}
    assert Bench(CacheShape((FULL, window, window)), 8, stored).hit() == 4


@pytest.mark.parametrize(
    ("stored", "wanted"), [(range(40, 100), 100), (range(3), 3), (range(60, 62), 62), (range(0), 0)]
)
def test_without_full_attention_a_hit_may_begin_anywhere(stored: range, wanted: int) -> None:
    """Chunks before the window are not looked up, and chunks after the window are not needed."""
    bench = Bench(
        CacheShape((GroupShape(UNIT, kind="window", reach=2 * UNIT),)),
        100,
        {(0, unit) for unit in stored},
    )
    assert bench.store.lookup(bench.chain) == (100, 100)
    assert bench.hit(100) == wanted


def test_units_before_a_window_count_as_from_the_tier_of_the_window() -> None:
    bench = Bench(
        CacheShape((GroupShape(UNIT, kind="window", reach=2 * UNIT),)), 10, {(0, 8), (0, 9)}
    )
    lease = bench.store.acquire(bench.chain, 10)
    assert lease.batch([[0] * 8 + [7, 9]], 3, 10)[1] == {"host": 7}


ODD = [
    (None, "full", 0, 1, 1, 0, 0, None),
    (2, "local", 4, 1, 1, 0, 0, None),
    (2, "round", 4, 1, 1, 0),
    (2, "window", 4, 1, 2, 0, 0, None),
]


@pytest.mark.parametrize("groups", [[], *([group] for group in ODD)])
def test_groups_that_cannot_be_are_refused(
    groups: list[tuple[int | None, str, int, int, int, int]],
) -> None:
    with pytest.raises(ConfigError):
        _core.Session(frame_bytes=FRAME, host_bytes=FRAME, namespace=bytes(32), groups=groups)
