"""Tests `_core.first_of_each` with columns in which only a few rows have values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core
from kvloft.errors import ConfigError

TABLES = (
    st.none()
    | st.just(())
    | st.tuples(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(), max_size=2))
)


@given(st.lists(TABLES, max_size=40))
def test_the_first_of_each_present_value_has_its_key(
    values: list[tuple[list[int], ...] | None],
) -> None:
    keys = [f"request-{nth}" for nth in range(len(values))]
    found = _core.first_of_each(keys, values)
    expected = [(key, value[0]) for key, value in zip(keys, values, strict=True) if value]
    assert found == expected
    assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True)), (
        "must be vLLM's own lists, not copies"
    )


def test_columns_of_two_lengths_and_no_lists_are_refused() -> None:
    for keys in (["a"], ["a", "b", "c"]):
        with pytest.raises(ConfigError, match=f"{len(keys)} keys for 2 values"):
            _core.first_of_each(keys, [None, ([1],)])
    with pytest.raises(TypeError):
        _core.first_of_each(("a",), [None])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _core.first_of_each(["a"], [7])
    assert _core.first_of_each([], []) == []


def test_a_value_that_takes_rows_away_while_it_is_read_is_an_error() -> None:
    values: list[object] = []

    class Rude:
        def __bool__(self) -> bool:
            values.clear()
            return False

    values += [Rude(), None, None]
    with pytest.raises(IndexError):
        _core.first_of_each(["a", "b", "c"], values)
