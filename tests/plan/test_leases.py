"""Tests that each stride of a prefix is counted once, even if multiple requests use it."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core
from kvloft.plan.leases import StrideCounts, Strides


def chain_of(token_ids: list[int]) -> _core.KeyChain:
    chain = _core.KeyChain(_core.root_key(bytes(32), None, None), block_tokens=1)
    chain.append_tokens(token_ids)
    return chain


CHAINS = [chain_of([*range(40), *range(first, first + 60)]) for first in (0, 100, 200)]
"""Chains that share their first 40 units."""


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 100), st.integers(0, 3))))
def test_a_stride_counts_once_until_its_last_user_is_removed(
    calls: list[tuple[int, int, int]],
) -> None:
    counts, used = StrideCounts(max_units=64 * 7), list[Strides]()

    def total(*more: Strides) -> int:
        users = Counter(stride for strides in [*used, *more] for stride in strides.items())
        return sum(num_units for _, num_units in users)

    for chain, num_units, what in calls:
        strides = counts.strides(CHAINS[chain], num_units)
        assert sum(strides.values()) == num_units
        assert counts.total_with(strides) == total(strides)
        if used and what == 0:
            counts.remove(used.pop(num_units % len(used)))
        else:
            counts.add(strides)
            used.append(strides)
        assert counts.total == total()
    for strides in used:
        counts.remove(strides)
    assert counts.total == 0
