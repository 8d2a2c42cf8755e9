"""Which chunk's KV blocks hold to their last position, where a chunk has several blocks of a group."""

from types import SimpleNamespace
from typing import Any

from kvloft.plan.block_writers import BlockWriters
from kvloft.seam.batch import Tables


def tracker(keys: str, tables: list[list[int]], num_local: int = 0) -> Any:
    """A request whose chunks have these keys, and chunks of one block in the first group and of two in the second."""
    chain = SimpleNamespace(key=keys.__getitem__)
    return SimpleNamespace(chain=chain, blocks=Tables(tables, 0, [1, 2]), num_local_blocks=num_local, num_noted=0, num_complete=2)  # type: ignore[arg-type]


def test_all_blocks_of_a_chunk_are_of_its_continuation() -> None:
    """The second request has the first one's blocks, and goes on otherwise in its second chunk."""
    known = BlockWriters()
    known.note(tracker("ab", [[1, 2], [11, 12, 13, 14]]))
    same, other = (tracker(keys, [[1, 2, 3], [11, 12, 13, 14, 15, 16]], num_local=2) for keys in ("abc", "axc"))
    assert known.are_its_own(same, [1, 2, 11, 12, 13, 14])
    assert known.are_its_own(other, [1, 11, 12])
    assert not any(known.are_its_own(other, [block]) for block in (2, 13, 14))
    assert known.are_its_own(other, [3, 15, 16]), "they are not vLLM's own"
    known.forget(tracker("axc", [[1, 2, 3], [0, 0, 13, 14, 15, 16]], num_local=1))
    assert known.are_its_own(same, [1, 11, 12])
    assert not any(known.are_its_own(same, [block]) for block in (2, 13, 14))
