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
MAX_BLOCKS = 12

WINDOWS = st.builds(lambda reach: GroupShape(BLOCK, kind="window", reach=reach), st.integers(0, 40))
LOCALS = st.builds(lambda reach: GroupShape(BLOCK, kind="local", reach=reach), st.integers(1, 40))
OTHERS = WINDOWS | LOCALS | st.just(GroupShape(BLOCK, kind="state"))
FULL = GroupShape(BLOCK)


def attended(group: GroupShape, boundary: int) -> set[int]:
    """Chunks with a token that the query at the position behind ``boundary`` may attend to, or the state that it goes on from."""
    query = boundary * BLOCK
    if group.kind == "state":
        return {boundary - 1} & set(range(boundary))
    seen = {
        "full": lambda at: True,
        "window": lambda at: query - at <= group.reach,
        "local": lambda at: at // group.reach == query // group.reach,
    }[group.kind]
    return {at // BLOCK for at in range(query) if seen(at)}


@given(OTHERS | st.just(FULL), st.integers(0, MAX_BLOCKS))
def test_a_prefix_needs_the_chunks_that_its_next_token_attends_to(group: GroupShape, boundary: int) -> None:
    assert set(range(group.first_chunk(boundary), boundary)) == attended(group, boundary)


class Chain:
    """Names of chunks: (group, block), of the blocks of one prompt."""

    def __init__(self, names: Sequence[tuple[int, int]]) -> None:
        self.names = list(names)
        self.num_blocks = len(self.names)

    def prefix(self, num_blocks: int, group: int | None = None) -> "Chain":
        return Chain([(own if group is None else group, block) for own, block in self.names[:num_blocks]])

    def attached(self, block: int, group: int) -> "Chain":
        return Chain([(group, self.names[block][1])])


class Lease:
    """All of a chain is there, or it is not."""

    def __init__(self, chain: Chain, found: tuple[int, int]) -> None:
        self.chain, self.found, self.released = chain, found, 0

    def poll(self) -> tuple[int, int]:
        host, stored = self.found
        return host, stored - host

    def batch(self, table: Sequence[int], begin: int, end: int) -> tuple[Any, dict[str, int]]:
        pairs = Pairs(zip(self.chain.names[begin:end], table[begin:end], strict=True))
        return pairs, {"host": len(pairs)}

    def release(self) -> None:
        self.released += 1


class Pairs(list[Any]):
    """A batch: (name, block)."""

    def concat(self, batches: Sequence[Any]) -> "Pairs":
        return Pairs(pair for batch in batches for pair in batch)


class Store:
    """What a session has of chains, in host and in any tier."""

    def __init__(self, host: set[tuple[int, int]], stored: set[tuple[int, int]]) -> None:
        self.tiers = (host, host | stored)
        self.leases: list[Lease] = []

    def lookup(self, chain: Chain) -> tuple[int, int]:
        found = [next((n for n, name in enumerate(chain.names) if name not in tier), chain.num_blocks) for tier in self.tiers]
        return found[0], found[1]

    def acquire(self, chain: Chain) -> Lease:
        self.leases.append(Lease(chain, self.lookup(chain)))
        return self.leases[-1]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[CacheShape, Store, int, int]:
    groups = draw(st.permutations([FULL, *draw(st.lists(OTHERS | st.just(FULL), max_size=3))]))
    shape = CacheShape(tuple(groups))
    names = [(number(shape, nth), block) for nth in range(len(groups)) for block in range(MAX_BLOCKS)]
    sparse = st.sets(st.sampled_from(names))
    absent, on_disk = draw(st.sets(st.sampled_from(names), max_size=6) | sparse), draw(sparse)
    host = set(names) - absent - on_disk
    return shape, Store(host, on_disk - absent), draw(st.integers(0, MAX_BLOCKS)), draw(st.integers(0, MAX_BLOCKS))


def number(shape: CacheShape, nth: int) -> int:
    """As groups are numbered in keys."""
    return 0 if nth == shape.main else nth + 1


def needs(shape: CacheShape, boundary: int) -> set[tuple[int, int]]:
    return {(number(shape, nth), block) for nth, group in enumerate(shape.groups) for block in attended(group, boundary)}


@given(scenes())
def test_a_hit_is_the_deepest_boundary_at_which_every_group_has_what_it_needs(scene: tuple[CacheShape, Store, int, int]) -> None:
    shape, store, num_blocks, most = scene
    chunks = GroupedChunks(store, shape)  # type: ignore[arg-type]
    chain: Any = Chain([(0, block) for block in range(num_blocks)])
    wanted = tuple(max(at for at in range(min(num_blocks, most) + 1) if needs(shape, at) <= tier) for tier in store.tiers)
    assert chunks.deepest(chain, most) == wanted


@given(scenes(), st.integers(0, MAX_BLOCKS))
def test_a_lease_has_exactly_what_its_boundary_needs_behind_the_blocks_at_hand(
    scene: tuple[CacheShape, Store, int, int], begin: int
) -> None:
    shape, store, num_blocks, most = scene
    chunks = GroupedChunks(store, shape)  # type: ignore[arg-type]
    chain: Any = Chain([(0, block) for block in range(num_blocks)])
    host, boundary = chunks.deepest(chain, most)
    lease = chunks.acquire(chain, most)
    assert lease.poll() in {(boundary, 0), (0, boundary)}
    is_ready = lease.poll() == (boundary, 0)
    assert is_ready or host < boundary
    begin = min(begin, boundary)
    tables = Tables([[1000 * (nth + 1) + block for block in range(MAX_BLOCKS)] for nth in range(len(shape.groups))], shape.main)  # type: ignore[misc]
    if is_ready and begin < boundary:
        batches, by_tier = lease.batch(tables, begin, boundary)
        loaded = {(name, block) for _, batch in batches.batches for name, block in batch}
        assert {name for name, _ in loaded} == {name for name in needs(shape, boundary) if name[1] >= begin}
        assert all(block == 1000 * (name[0] or shape.main + 1) + name[1] for name, block in loaded)
        assert sum(by_tier.values()) == boundary - begin
        assert len({group for group, _ in batches.batches}) == len(batches.batches)
    lease.release()
    assert [each.released for each in store.leases] == [1] * len(store.leases)


def test_a_lease_gives_nothing_where_a_group_has_no_block_for_a_chunk() -> None:
    shape = CacheShape((FULL, GroupShape(BLOCK, kind="window", reach=5)))
    store = Store({(group, block) for group in (0, 2) for block in range(4)}, set())
    lease = GroupedChunks(store, shape).acquire(Chain([(0, block) for block in range(4)]), 4)  # type: ignore[arg-type]
    tables = Tables([[1, 2, 3, 4], [0, 0, 7, 8]], 0)  # type: ignore[list-item]
    assert len(lease.batch(tables, 0, 4)[0]) == 6
    assert lease.batch(Tables([[1, 2, 3, 4], [0, 0, 0, 8]], 0), 0, 4) == (GroupBatches(), {})  # type: ignore[list-item]
    assert lease.batch(tables, 0, 3) == (GroupBatches(), {}), "a shorter prefix needs other chunks"


@pytest.mark.parametrize("found", [(0, 0), (1, 1)])
def test_a_lease_whose_part_will_not_come_has_nothing(found: tuple[int, int]) -> None:
    shape = CacheShape((FULL, GroupShape(BLOCK, kind="state")))
    store = Store({(group, block) for group in (0, 2) for block in range(3)}, set())
    lease: GroupLease = GroupedChunks(store, shape).acquire(Chain([(0, block) for block in range(3)]), 3)  # type: ignore[arg-type]
    assert lease.poll() == (3, 0)
    store.leases[0].found = found
    assert lease.poll() == (0, 0)


def test_a_group_that_had_what_it_needs_is_asked_again_of_a_shorter_prefix() -> None:
    window = GroupShape(BLOCK, kind="window", reach=2 * BLOCK)
    shape = CacheShape((FULL, window, window))
    names = {(group, block) for group in (0, 2, 3) for block in range(8)}
    chunks = GroupedChunks(Store(names - {(2, 4), (3, 6)}, set()), shape)  # type: ignore[arg-type]
    assert chunks.deepest(Chain([(0, block) for block in range(8)]), 8) == (4, 4)  # type: ignore[arg-type]
