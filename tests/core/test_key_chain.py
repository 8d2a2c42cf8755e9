"""Tests which Python inputs a KeyChain accepts and which inputs it rejects.

A rejected call does not change the chain.
"""

import array
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core
from kvloft.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1]))
from model import keys as model

ROOT = _core.root_key(bytes(32), None, None)


def keys_of(chain: _core.KeyChain) -> list[bytes]:
    return [chain.key(block) for block in range(chain.num_blocks)]


def token_keys(ids: list[int], block_tokens: int) -> list[bytes]:
    return model.chain_keys(ROOT, [model.Token(token) for token in ids], [], block_tokens)


@given(st.integers(0, 90), st.integers(0, 12), st.integers(0, 2**32 - 1), st.integers(0, 40))
def test_chunks_of_groups_have_separate_keys(
    num_tokens: int, first: int, group: int, more: int
) -> None:
    """Keys of full-attention groups are computed as the chain grows. Keys of other groups are
    computed on request.
    """
    ids = list(range(num_tokens + more))
    chain, keys = _core.KeyChain(ROOT, block_tokens=8), token_keys(ids, 8)
    groups = [
        (group, "full", 8, 1, 1, 0, 0, None),
        ((group + 1) % 2**32, "window", 8, 1, 1, 1, 0, None),
    ]
    store = _core.Session(
        frame_bytes=4096, host_bytes=4096 * 64, namespace=bytes(32), groups=groups
    )
    store.watch(8)
    chain.append_tokens(ids[:num_tokens])
    assert store.lookup(chain) == (0, 0)
    table, first = list(range(1, len(keys) + 1)), min(first, len(keys))
    (chunks,), dropped = store.reserve(
        [(chain, ids, len(ids), 0, len(keys), [table, [0] * first + table[first:]])]
    )
    found = (
        {nth: [(chunk.key, *chunk.blocks) for chunk in batch] for nth, batch in chunks.by_group()}
        if chunks
        else {}
    )
    every = [(model.group_key(key, group), block) for key, block in zip(keys, table, strict=True)]
    alone = [
        (model.group_key(key, (group + 1) % 2**32), block)
        for key, block in zip(keys, table, strict=True)
    ][first:]
    assert found == {nth: rows for nth, rows in enumerate((every, alone)) if rows}
    assert dropped == [0]
    assert store.settle(chunks.tickets() if chunks else []) == (len(every) + len(alone), 0)
    assert store.lookup(chain) == (len(keys), len(keys))
    rows, _ = store.changes([model.group_key(key, (group + 1) % 2**32) for key in keys], 0)
    assert [tiers for _, tiers in rows] == [0] * first + [1] * len(alone)
    assert keys_of(chain) == keys


class Index:
    """An object that ``__index__`` converts to an integer, like numpy's integer scalars."""

    def __index__(self) -> int:
        return 7


def test_any_sequence_of_ints_gives_the_keys_of_a_list() -> None:
    ids = [7, 1, 7, 2**32 - 1] * 8
    odd: list[Any] = [Index() if token == 7 else token for token in ids]
    sequences: list[Any] = [
        ids,
        tuple(ids),
        array.array("L", ids),
        memoryview(array.array("I", ids)),
        odd,
        tuple(odd),
    ]
    for sequence in sequences:
        chain = _core.KeyChain(ROOT, block_tokens=4)
        chain.append_tokens(sequence)
        assert keys_of(chain) == token_keys(ids, 4)


def test_a_part_of_a_list_is_appended_and_no_more() -> None:
    ids = list(range(20))
    chain = _core.KeyChain(ROOT, block_tokens=4)
    chain.append_tokens(ids, 3, 8)
    chain.append_tokens(ids, 8)
    chain.append_tokens(ids, 20)
    chain.append_tokens(ids, 4, 4)
    assert keys_of(chain) == token_keys(ids[3:], 4)
    assert chain.num_tokens == 17


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 3), (0, -1), (3, 2), (0, 6), (6, None), (2**62, None)]
)
def test_bounds_outside_the_sequence_raise(start: int, stop: int | None) -> None:
    chain = _core.KeyChain(ROOT, block_tokens=1)
    for sequence in ([1] * 5, (1,) * 5):
        with pytest.raises(ConfigError, match="token_ids"):
            chain.append_tokens(sequence, start, stop)
    assert chain.num_tokens == 0


@pytest.mark.parametrize(
    "bad", [-1, 2**32, 2**32 + 5, 2**63, -(2**63), 2**64 + 5, -(2**70), 1.0, "1", None, b"1", [1]]
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_bad_element_raises_and_names_its_place(bad: object, kind: Any) -> None:
    chain = _core.KeyChain(ROOT, block_tokens=1)
    with pytest.raises(ConfigError, match=r"token_ids\[2\]"):
        chain.append_tokens(kind([1, 2, bad, 3]))
    assert chain.num_tokens == 0
    chain.append_tokens([1])
    assert chain.num_tokens == 1


@pytest.mark.parametrize("bad", [b"\1\2", bytearray(4), "12", 5, None, {1, 2}, range])
def test_a_value_that_is_no_sequence_of_ints_raises(bad: Any) -> None:
    chain = _core.KeyChain(ROOT, block_tokens=1)
    with pytest.raises((TypeError, ValueError)):
        chain.append_tokens(bad)
    assert chain.num_tokens == 0


def test_a_list_that_shrinks_while_it_is_read_raises() -> None:
    class Shrinks:
        def __index__(self) -> int:
            ids.clear()
            return 1

    ids: list[Any] = [10**6, Shrinks(), 10**6 + 1, 10**6 + 2]
    chain = _core.KeyChain(ROOT, block_tokens=1)
    with pytest.raises(IndexError):
        chain.append_tokens(ids)
    assert chain.num_tokens == 0


def test_rows_may_come_as_any_contiguous_buffer() -> None:
    raw = struct.pack("<24f", *range(24))
    wanted = model.chain_keys(
        ROOT, [model.Row("float32", 3, raw[at : at + 12]) for at in range(0, 96, 12)], [], 4
    )
    views = [memoryview(raw).cast("B", [8, 12]), memoryview(raw).cast("f", [8, 3])]
    for rows in (raw, bytearray(raw), array.array("f", range(24)), *views):
        chain = _core.KeyChain(ROOT, block_tokens=4)
        chain.append_embeds(rows, dtype="float32", width=3)
        assert keys_of(chain) == wanted


def test_rows_of_a_wrong_type_raise() -> None:
    chain = _core.KeyChain(ROOT, block_tokens=4)
    raw = bytes(96)
    bad: list[tuple[Any, str, int]] = [
        (raw[:95], "float32", 3),
        (raw, "float32", 0),
        (raw, "float", 3),
        (raw, "torch.float32", 3),
        (memoryview(raw)[::2], "float32", 3),
        (memoryview(raw).cast("B", [8, 12]), "float32", 6),
        (memoryview(raw).cast("f", [8, 3]), "bfloat16", 3),
    ]
    for rows, dtype, width in bad:
        with pytest.raises(ConfigError):
            chain.append_embeds(rows, dtype=dtype, width=width)
    with pytest.raises((TypeError, BufferError)):
        chain.append_embeds([1.0, 2.0], dtype="float32", width=2)
    assert chain.num_tokens == 0


def test_items_late_or_contradicting_raise() -> None:
    chain = _core.KeyChain(ROOT, block_tokens=4)
    chain.add_item("a", 2, 6)
    chain.append_tokens([1] * 6)
    chain.add_item("a", 2, 6)
    for identifier, start, num in [
        ("b", 5, 1),
        ("b", 0, 9),
        ("a", 2, 7),
        ("b", 8, 0),
        ("b", 2**32 - 1, 2),
    ]:
        with pytest.raises(ConfigError):
            chain.add_item(identifier, start, num)
    chain.add_item("b", 6, 1)
    with pytest.raises(OverflowError):
        chain.add_item("c", -1, 3)


def test_arguments_of_another_shape_raise() -> None:
    with pytest.raises(ConfigError, match="root must be 32 bytes"):
        _core.KeyChain(bytes(31), block_tokens=4)
    with pytest.raises(ConfigError, match="block_tokens"):
        _core.KeyChain(ROOT, block_tokens=0)
    with pytest.raises(ConfigError, match="namespace must be 32 bytes"):
        _core.root_key(bytes(33), None, None)
    with pytest.raises(ConfigError, match="twice"):
        _core.namespace_digest([("a", "1"), ("a", "1")])
    with pytest.raises(ConfigError, match="block has no key yet"):
        _core.KeyChain(ROOT, block_tokens=4).key(0)


def test_repr_tells_the_chain_without_its_content() -> None:
    chain = _core.KeyChain(ROOT, block_tokens=4)
    chain.append_tokens([123_456] * 6)
    assert repr(chain).startswith("KeyChain(block_tokens=4, num_tokens=6, num_blocks=1, last=")
    assert chain.key(0).hex()[:16] in repr(chain)
    assert "123456" not in repr(chain)


def test_threads_may_share_a_chain() -> None:
    """Appends are atomic: with two threads, the keys match some sequential order of their calls."""
    per_call, calls = 5000, 20
    chain = _core.KeyChain(ROOT, block_tokens=per_call)

    def append(token: int) -> None:
        ids = [token] * per_call
        for _ in range(calls):
            chain.append_tokens(ids)

    threads = [threading.Thread(target=append, args=(token,)) for token in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = {
        token: model.content_digest([model.Token(token)] * per_call, 0, []) for token in (1, 2)
    }
    key, seen = ROOT, []
    for block in range(chain.num_blocks):
        [token] = [
            t
            for t, digest in content.items()
            if model.keyed("chain", key + digest) == chain.key(block)
        ]
        seen.append(token)
        key = chain.key(block)
    assert sorted(seen) == [1] * calls + [2] * calls
