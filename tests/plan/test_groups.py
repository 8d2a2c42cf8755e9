"""Several KV cache groups: what a prefix needs of each kind, and the deepest boundary at which all have it, against brute force."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft.plan.groups import GroupedChunks, GroupLease
from kvloft.seam.batch import GroupBatches, Tables
from kvloft.seam.shape import CacheShape, GroupShape

BLOCK = 4
"""Tokens of a chunk, which has one block of a group, or several."""
MAX_BLOCKS = 12

SIZES = st.sampled_from([(BLOCK, 1), (BLOCK, 1), (2, 2), (1, 4)])
"""Tokens of a block, and blocks in a chunk."""
WINDOWS = st.builds(lambda size, reach: GroupShape(*size, kind="window", reach=reach), SIZES, st.integers(0, 40))
SOME_WINDOW = WINDOWS.filter(lambda group: group.reach > 0)
"""Without full attention a boundary must need something."""
LOCALS = st.builds(lambda size, reach: GroupShape(*size, kind="local", reach=reach), SIZES, st.integers(1, 40))
OTHERS = WINDOWS | LOCALS | SIZES.map(lambda size: GroupShape(*size, kind="state"))
FULL = GroupShape(BLOCK)
FULLS = SIZES.map(lambda size: GroupShape(*size))


def attended_blocks(group: GroupShape, boundary: int) -> set[int]:
    """Blocks with a token that the query at the position behind ``boundary`` may attend to, or the state that it goes on from."""
    query = boundary * BLOCK
    if group.kind == "state":
        return {at // group.block_tokens for at in range(max(0, query - 1), query)}
    seen = {
        "full": lambda at: True,
        "window": lambda at: query - at <= group.reach,
        "local": lambda at: at // group.reach == query // group.reach,
    }[group.kind]
    return {at // group.block_tokens for at in range(query) if seen(at)}


def attended(group: GroupShape, boundary: int) -> set[int]:
    """The same in chunks."""
    return {block // group.blocks_per_chunk for block in attended_blocks(group, boundary)}


@given(OTHERS | FULLS, st.integers(0, MAX_BLOCKS))
def test_a_prefix_needs_what_its_next_token_attends_to(group: GroupShape, boundary: int) -> None:
    assert set(range(group.first_chunk(boundary), boundary)) == attended(group, boundary)
    assert set(range(group.first_block(boundary), boundary * group.blocks_per_chunk)) == attended_blocks(group, boundary)


@given(OTHERS | FULLS, st.integers(0, MAX_BLOCKS))
def test_what_is_kept_of_chunks_is_all_that_any_prefix_needs(group: GroupShape, boundary: int) -> None:
    first_kept = group.blocks_per_chunk - group.kept_blocks
    assert group.kept_blocks >= 1
    assert all(block % group.blocks_per_chunk >= first_kept for block in attended_blocks(group, boundary))


class Chain:
    """The blocks of one prompt."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks


class Lease:
    """All of what was asked for is there, or it is not; names of chunks in the order of the question."""

    def __init__(self, store: "Store", names: Sequence[tuple[int, int]]) -> None:
        self.store, self.names, self.lost, self.released = store, list(names), 0, 0

    def poll(self) -> tuple[int, int]:
        host, stored = ([name in tier for name in self.names] for tier in self.store.tiers)
        return sum(host) - self.lost, sum(stored) - sum(host)

    def batches(self, rows: Sequence[Any]) -> tuple[list[Any], dict[str, int]] | None:
        assert self.poll()[0] == len(self.names) == sum(stop - start for _, start, stop, *_ in rows)
        names, found = list(self.names), []
        for table, start, stop, begin, (each, kept) in rows:
            own, names = names[: stop - start], names[stop - start :]
            assert [name[1] for name in own] == list(range(start, stop))
            held = [(name, block) for name in own for block in range((name[1] + 1) * each - kept, (name[1] + 1) * each)]
            pairs = [(name, table[block]) for name, block in held if block >= begin]
            if len(pairs) != stop * each - begin or 0 in [block for _, block in pairs]:
                return None
            found.append(pairs)
        return found, {"host": len({name for name, _ in found[0]})}

    def release(self) -> None:
        self.released += 1


class Store:
    """What a session has of one prompt's chunks, (group, block), in host and in any tier."""

    def __init__(self, host: set[tuple[int, int]], stored: set[tuple[int, int]]) -> None:
        self.tiers = (host, host | stored)
        self.leases: list[Lease] = []
        self.num_asked = 0

    def lookup(self, chain: Chain, group: int | None = None) -> tuple[int, int]:
        names = [(group or 0, block) for block in range(chain.num_blocks)]
        found = [next((n for n, name in enumerate(names) if name not in tier), chain.num_blocks) for tier in self.tiers]
        return found[0], found[1]

    def lookup_attached(self, chain: Chain, rows: Sequence[tuple[int, int, int]]) -> list[tuple[bytes, bytes]]:
        self.num_asked += 1
        assert all(0 <= start < stop <= chain.num_blocks for _, start, stop in rows), "a question about nothing"
        host, stored = ([bytes((n, b) in tier for b in range(start, stop)) for n, start, stop in rows] for tier in self.tiers)
        return list(zip(host, stored, strict=True))

    def acquire_groups(
        self, chain: Chain, num_blocks: int, full: Sequence[int | None], rows: Sequence[tuple[int, int, int]]
    ) -> Lease:
        assert num_blocks <= chain.num_blocks
        whole = [(number or 0, 0, num_blocks) for number in full]
        self.leases.append(Lease(self, [(n, block) for n, start, stop in [*whole, *rows] for block in range(start, stop)]))
        return self.leases[-1]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[CacheShape, Store, int, int]:
    groups = draw(st.permutations([draw(FULLS | SOME_WINDOW), *draw(st.lists(OTHERS | FULLS, max_size=3))]))
    shape = CacheShape(tuple(groups))
    names = [(number(shape, nth), block) for nth in range(len(groups)) for block in range(MAX_BLOCKS)]
    sparse = st.sets(st.sampled_from(names))
    absent, on_disk = draw(st.sets(st.sampled_from(names), max_size=6) | sparse), draw(sparse)
    host = set(names) - absent - on_disk
    return shape, Store(host, on_disk - absent), draw(st.integers(0, MAX_BLOCKS)), draw(st.integers(0, MAX_BLOCKS))


def number(shape: CacheShape, nth: int) -> int:
    """As groups are numbered in keys."""
    return 0 if nth == shape.main and shape.main_group.kind == "full" else nth + 1


def needs(shape: CacheShape, boundary: int) -> set[tuple[int, int]]:
    return {(number(shape, nth), block) for nth, group in enumerate(shape.groups) for block in attended(group, boundary)}


@given(scenes())
def test_a_hit_is_the_deepest_boundary_at_which_every_group_has_what_it_needs(scene: tuple[CacheShape, Store, int, int]) -> None:
    shape, store, num_blocks, most = scene
    chunks = GroupedChunks(store, shape)  # type: ignore[arg-type]
    chain: Any = Chain(num_blocks)
    wanted = tuple(max(at for at in range(min(num_blocks, most) + 1) if needs(shape, at) <= tier) for tier in store.tiers)
    assert chunks.deepest(chain, chunks.lookup(chain), most) == wanted


@given(scenes(), st.integers(0, MAX_BLOCKS))
def test_a_lease_has_exactly_what_its_boundary_needs_behind_the_blocks_at_hand(
    scene: tuple[CacheShape, Store, int, int], begin: int
) -> None:
    shape, store, num_blocks, most = scene
    chunks = GroupedChunks(store, shape)  # type: ignore[arg-type]
    chain: Any = Chain(num_blocks)
    host, boundary = chunks.deepest(chain, chunks.lookup(chain), most)
    lease = chunks.acquire(chain, boundary)
    assert sorted(store.leases[0].names) == sorted(needs(shape, boundary))
    assert lease.poll() in {(boundary, 0), (0, boundary)}
    is_ready = lease.poll() == (boundary, 0)
    assert is_ready or host < boundary
    begin = min(begin, boundary)
    sizes = [group.blocks_per_chunk for group in shape.groups]
    tables = Tables(
        [[1000 * (nth + 1) + block for block in range(MAX_BLOCKS * size)] for nth, size in enumerate(sizes)], shape.main, sizes
    )  # type: ignore[misc]
    if is_ready and begin < boundary:
        batches, by_tier = lease.batch(tables, begin, boundary)
        loaded: set[Any] = {pair for _, batch in batches.batches for pair in batch}
        wanted = [(nth, at) for nth, group in enumerate(shape.groups) for at in attended_blocks(group, boundary)]
        wanted = [(nth, at) for nth, at in wanted if at >= begin * sizes[nth]]
        assert loaded == {((number(shape, nth), at // sizes[nth]), 1000 * (nth + 1) + at) for nth, at in wanted}
        assert sum(by_tier.values()) == boundary - begin
        assert len({group for group, _ in batches.batches}) == len(batches.batches)
    lease.release()
    assert [each.released for each in store.leases] == [1]


def test_a_lease_gives_nothing_where_a_group_has_no_block_for_a_chunk() -> None:
    shape = CacheShape((FULL, GroupShape(BLOCK, kind="window", reach=5)))
    store = Store({(group, block) for group in (0, 2) for block in range(4)}, set())
    lease = GroupedChunks(store, shape).acquire(Chain(4), 4)  # type: ignore[arg-type]
    tables = Tables([[1, 2, 3, 4], [0, 0, 7, 8]], 0)  # type: ignore[list-item]
    assert len(lease.batch(tables, 0, 4)[0]) == 6
    assert lease.batch(Tables([[1, 2, 3, 4], [0, 0, 0, 8]], 0), 0, 4) == (GroupBatches(), {})  # type: ignore[list-item]
    assert lease.batch(tables, 0, 3) == (GroupBatches(), {}), "a shorter prefix needs other chunks"


@pytest.mark.parametrize(("lost", "on_disk"), [(1, 0), (4, 0), (1, 2)])
def test_a_lease_whose_part_will_not_come_has_nothing(lost: int, on_disk: int) -> None:
    shape = CacheShape((FULL, GroupShape(BLOCK, kind="state")))
    names = [(group, block) for group in (0, 2) for block in range(3)]
    store = Store(set(names), set())
    lease: GroupLease = GroupedChunks(store, shape).acquire(Chain(3), 3)  # type: ignore[arg-type]
    assert lease.poll() == (3, 0)
    store.tiers = (set(names[on_disk:]), set(names))
    store.leases[0].lost = lost
    assert lease.poll() == (0, 0)


def test_a_group_that_had_what_it_needs_is_asked_again_of_a_shorter_prefix() -> None:
    window = GroupShape(BLOCK, kind="window", reach=2 * BLOCK)
    shape = CacheShape((FULL, window, window))
    names = {(group, block) for group in (0, 2, 3) for block in range(8)}
    chunks = GroupedChunks(Store(names - {(2, 4), (3, 6)}, set()), shape)  # type: ignore[arg-type]
    chain: Any = Chain(8)
    assert chunks.deepest(chain, chunks.lookup(chain), 8) == (4, 4)


def test_between_two_local_chunks_a_hit_needs_neither() -> None:
    others = GroupShape(BLOCK, kind="local", reach=4 * BLOCK), GroupShape(BLOCK, kind="window", reach=BLOCK)
    names = {(0, block) for block in range(10)} | {(2, block) for block in range(3)} | {(3, block) for block in range(7)}
    chunks = GroupedChunks(Store(names, set()), CacheShape((FULL, *others)))  # type: ignore[arg-type]
    chain: Any = Chain(10)
    assert chunks.deepest(chain, chunks.lookup(chain), 10) == (4, 4)


@pytest.mark.parametrize(("first", "most"), [(0, 1), (1999, 2), (1930, 3), (0, 6)])
def test_few_questions_find_a_window_wherever_it_is(first: int, most: int) -> None:
    """Over a server each is a round trip. ``first`` 0 with six: all that is there is the beginning."""
    windows = (GroupShape(BLOCK, kind="window", reach=64 * BLOCK),) * 6
    names = {(0, block) for block in range(2000)}
    kept = range(2000) if most == 1 else range(first - 63, first + 1) if first else range(80)
    names |= {(2 + nth, block) for nth in range(6) for block in kept}
    store = Store(names, set())
    chunks = GroupedChunks(store, CacheShape((FULL, *windows)))  # type: ignore[arg-type]
    chain: Any = Chain(2000)
    boundary = kept[-1] + 1
    assert chunks.deepest(chain, chunks.lookup(chain), 2000) == (boundary, boundary)
    assert store.num_asked <= most


@pytest.mark.parametrize(("stored", "wanted"), [(range(40, 100), 100), (range(3), 3), (range(60, 62), 62), (range(0), 0)])
def test_without_full_attention_a_hit_may_begin_anywhere(stored: range, wanted: int) -> None:
    """Nothing before a window is looked for, and nothing behind it is needed."""
    shape = CacheShape((GroupShape(BLOCK, kind="window", reach=2 * BLOCK),))
    store = Store(set(), {(1, block) for block in stored})
    chunks = GroupedChunks(store, shape)  # type: ignore[arg-type]
    chain: Any = Chain(100)
    assert chunks.lookup(chain) == (100, 100)
    assert chunks.deepest(chain, chunks.lookup(chain), 100) == (0, wanted)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_windows_leave_out_counts_as_from_where_they_are(tier: str) -> None:
    shape = CacheShape((GroupShape(BLOCK, kind="window", reach=2 * BLOCK),))
    lease = GroupedChunks(Store({(1, 8), (1, 9)}, set()), shape).acquire(Chain(10), 10)  # type: ignore[arg-type]
    found: Any = lease._lease
    original = found.batches
    found.batches = lambda rows: (original(rows)[0], {tier: 2})
    tables = Tables([[0] * 8 + [7, 9]], shape.main)  # type: ignore[list-item]
    assert lease.batch(tables, 3, 10)[1] == {tier: 7}
