"""Tests the attribution of a block's KV to a prefix when chunks have multiple blocks."""

from types import SimpleNamespace
from typing import Any

from kvloft.plan.block_writers import BlockWriters
from kvloft.seam.batch import Tables
from kvloft.seam.views import StepView


def tracker(keys: str, tables: list[list[int]], num_local: int = 0) -> Any:
    """Return a request with these keys.

    Chunks have one block in the first group and two blocks in the second group.
    """
    chain = SimpleNamespace(key=keys.__getitem__, num_blocks=len(keys))
    return SimpleNamespace(
        chain=chain,
        prefix_chain=chain,
        blocks=Tables(tables, 0, [1, 2]),
        num_local_units=num_local,
        num_noted=0,
        num_complete=2,
    )  # type: ignore[arg-type]


def test_all_blocks_of_a_chunk_are_of_its_continuation() -> None:
    """The second request has the blocks of the first request but a different second chunk."""
    known = BlockWriters(4)
    known.note(tracker("ab", [[1, 2], [11, 12, 13, 14]]))
    same, other = (
        tracker(keys, [[1, 2, 3], [11, 12, 13, 14, 15, 16]], num_local=2) for keys in ("abc", "axc")
    )
    assert known.are_of_continuation(same, [1, 2, 11, 12, 13, 14])
    assert known.are_of_continuation(other, [1, 11, 12])
    assert not any(known.are_of_continuation(other, [block]) for block in (2, 13, 14))
    assert known.are_of_continuation(other, [3, 15, 16]), (
        "these blocks are not from vLLM's own cache"
    )
    known.forget(tracker("axc", [[1, 2, 3], [0, 0, 13, 14, 15, 16]], num_local=1))
    assert known.are_of_continuation(same, [1, 11, 12])
    assert not any(known.are_of_continuation(same, [block]) for block in (2, 13, 14))


def test_without_full_attention_the_blocks_of_all_groups_are_checked() -> None:
    known = BlockWriters(4)
    known.note(tracker("ab", [[1, 2], [11, 12, 13, 14]]))
    known.note(tracker("xy", [[3, 4], [15, 16, 17, 18]]))

    def knows(*tables: list[int]) -> bool:
        return known.know_hit(tracker("abz", list(tables), num_local=2))

    assert knows([1, 2, 5], [11, 12, 13, 14, 19, 20])
    assert knows([1, 2, 5], [0, 0, 0, 14, 19, 20]), "null blocks before a window"
    assert knows([1, 2, 5], [11, 12, 13, 99]), "vLLM replaced this block before it was recorded"
    assert not knows([1, 2, 5], [11, 12, 13, 18])
    assert not knows([1, 2, 5], [11, 18, 13, 14])
    assert not knows([1, 4, 5], [11, 12, 13, 14])
    assert not knows([1, 99, 5], [11, 12, 13, 14])


def test_without_all_groups_only_full_attention_blocks_are_recorded() -> None:
    known = BlockWriters(4, all_groups=False)
    known.note(tracker("ab", [[1, 2], [11, 12, 13, 14]]))
    known.note(tracker("xy", [[3, 4], [1, 2, 1, 2]]))
    assert known.know_hit(tracker("abz", [[1, 2, 5], [11, 12, 13, 14]], num_local=2))


def test_prefixes_that_differ_later_in_a_unit_share_its_first_block() -> None:
    known = BlockWriters(4)
    known.note(tracker("ab", [[1, 2], [11, 12, 13, 14]]))
    known.note(tracker("ac", [[1, 3], [11, 12, 13, 15]], num_local=1))
    assert known.know_hit(tracker("abz", [[1, 2, 5], [11, 12, 13, 14]], num_local=2))
    assert known.know_hit(tracker("acz", [[1, 3, 5], [11, 12, 13, 15]], num_local=2))


def single(req_id: str, keys: str, table: Any, num_local: int = 0, num_complete: int = 0) -> Any:
    """Return a request with one group and an unverified hit."""
    chain = SimpleNamespace(key=keys.__getitem__, num_blocks=len(keys))
    return SimpleNamespace(
        req_id=req_id,
        chain=chain,
        prefix_chain=chain,
        blocks=Tables([table]),
        num_local_units=num_local,
        num_noted=0,
        num_complete=num_complete,
        lookahead=0,
        is_hit_unchecked=num_local > 0,
        save_blocked=False,
        kv_outdated=False,
        extend_chains=lambda _: 0,
    )


def test_allocated_blocks_are_not_trusted_until_they_are_filled() -> None:
    writers = BlockWriters(4)
    writers.note(single("a", "ab", [1, 2], num_complete=2))
    assert writers.know_hit(single("b", "ab", [1, 2], num_local=2))
    given: Any = [("c", [2])]
    writers.drop_given(StepView(grown=given), {}, ())
    assert writers.know_hit(single("b", "ab", [1, 2], num_local=1))
    assert not writers.know_hit(single("b", "ab", [1, 2], num_local=2))


def test_an_allocated_block_is_of_no_continuation_although_its_prefix_is_computed_again() -> None:
    """Uses a draft model: the second request finished before the tokens after its block were
    known.
    """
    writers = BlockWriters(4, lookahead=1)
    writers.note(single("a", "ab", [1, 2], num_complete=2))
    hit = single("c", "ab", [1, 2], num_local=2)
    assert writers.are_of_continuation(hit, [1, 2])
    given: Any = [("b", [2])]
    writers.drop_given(StepView(grown=given), {}, ())
    again = single("b", "ab", [1, 2], num_local=1, num_complete=2)
    again.chain = SimpleNamespace(key="ab".__getitem__, num_blocks=1)
    writers.note(again)
    assert writers.know_hit(hit)
    assert not writers.are_of_continuation(hit, [2])


def test_kv_computed_on_an_unverified_hit_is_not_trusted() -> None:
    writers = BlockWriters(4)
    writers.note(single("a", "ab", [1, 2], num_complete=2))
    hit = single("b", "axy", [1, 2, 3], num_local=2, num_complete=3)
    writers.record(hit)
    assert not writers.know_hit(single("c", "axy", [1, 5, 3], num_local=3))
    writers.note(single("c", "axy", [4, 5, 3], num_complete=3))
    assert writers.find_strange([hit], [hit]) == [hit]
    assert not writers.know_hit(single("d", "axy", [4, 5, 3], num_local=3)), (
        "the hit has written to the third block since then"
    )


def test_a_hit_on_blocks_that_another_hit_fills_in_the_same_step_is_known() -> None:
    writers = BlockWriters(4)
    writers.note(single("a", "a", [1], num_complete=1))
    second = single("b", "ab", [1, 2], num_local=1, num_complete=2)
    third = single("c", "abc", [1, 2, 3], num_local=2, num_complete=3)
    assert writers.find_strange([third, second], [second, third]) == []
