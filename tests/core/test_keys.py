"""Compares keys with golden vectors and an independent oracle. A prefix has the same key on every
machine.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloft import _core

sys.path.append(str(Path(__file__).parents[1]))
from model import keys as model

CASES: list[dict[str, Any]] = json.loads(model.VECTORS.read_text(encoding="utf-8"))["cases"]
ROOT = _core.root_key(bytes(32), None, None)


def chain_of(
    content: Sequence[model.Position],
    items: Sequence[model.Item],
    root: bytes,
    block_tokens: int,
    lookahead: int = 0,
) -> _core.KeyChain:
    """Build a chain by appending one position of ``content`` at a time."""
    chain = _core.KeyChain(root, block_tokens=block_tokens, lookahead=lookahead)
    for item in items:
        chain.add_item(item.identifier, item.start, item.num_tokens)
    for position in content:
        if isinstance(position, model.Token):
            chain.append_tokens([position.id])
        else:
            chain.append_embeds(position.raw, dtype=position.dtype, width=position.width)
    return chain


def keys_of(chain: _core.KeyChain) -> list[bytes]:
    return [chain.key(block) for block in range(chain.num_blocks)]


def test_vectors_match_the_oracle() -> None:
    assert model.render(model.make_vectors()) == model.VECTORS.read_text(encoding="utf-8")
    assert _core.KEY_SCHEMA == 2


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_vector(case: dict[str, Any]) -> None:
    namespace = _core.namespace_digest([(name, value) for name, value in case["fields"]])
    assert namespace.hex() == case["namespace"]
    root = _core.root_key(namespace, case["adapter"] and tuple(case["adapter"]), case["salt"])
    assert root.hex() == case["root"]
    items = [model.Item(start, identifier, num) for identifier, start, num in case["items"]]
    chain = chain_of(model.parse_content(case["content"]), items, root, case["block_tokens"])
    assert [key.hex() for key in keys_of(chain)] == case["keys"]


def test_no_vector_shares_a_key_with_another_prefix() -> None:
    owner: dict[str, Any] = {}
    for case in CASES:
        content, size = model.parse_content(case["content"]), case["block_tokens"]
        for block, key in enumerate(case["keys"]):
            stop = (block + 1) * size
            items = sorted(item for item in case["items"] if item[1] < stop)
            prefix = (
                sorted(case["fields"]),
                case["adapter"],
                case["salt"],
                size,
                items,
                content[:stop],
            )
            assert owner.setdefault(key, prefix) == prefix


positions = st.lists(
    st.one_of(
        st.builds(model.Token, st.integers(0, 3) | st.integers(0, 2**32 - 1)),
        st.builds(lambda raw: model.Row("bfloat16", 1, raw), st.binary(min_size=2, max_size=2)),
        st.builds(lambda raw: model.Row("bfloat16", 2, raw), st.binary(min_size=4, max_size=4)),
        st.builds(lambda raw: model.Row("float32", 1, raw), st.binary(min_size=4, max_size=4)),
    ),
    max_size=60,
)
media = st.lists(
    st.builds(
        model.Item, st.integers(0, 70), st.sampled_from(["", "a", "b", "é"]), st.integers(1, 70)
    ),
    max_size=4,
    unique_by=lambda item: (item.start, item.identifier),
)


@given(positions, media, st.integers(1, 20), st.integers(0, 70), st.sampled_from([0, 0, 1, 3]))
def test_any_prompt_has_the_oracles_keys(
    content: list[model.Position],
    items: list[model.Item],
    block_tokens: int,
    cut: int,
    lookahead: int,
) -> None:
    lookahead = min(lookahead, block_tokens)
    chain = chain_of(content, items, ROOT, block_tokens, lookahead)
    wanted = model.chain_keys(ROOT, content, items, block_tokens, lookahead)
    assert keys_of(chain) == wanted
    part = chain_of(content[:cut], items, ROOT, block_tokens, lookahead)
    num_tokens = min(cut, len(content))
    assert (part.num_tokens, part.num_blocks) == (
        num_tokens,
        max(0, num_tokens - lookahead) // block_tokens,
    )
    assert keys_of(part) == wanted[: part.num_blocks]


@given(
    st.lists(
        st.tuples(st.text(max_size=4), st.text(max_size=4)),
        max_size=5,
        unique_by=lambda field: field[0],
    ),
    st.none() | st.tuples(st.text(max_size=3), st.text(max_size=3)),
    st.none() | st.text(max_size=3),
)
def test_any_root_is_the_oracles(
    fields: list[tuple[str, str]], adapter: tuple[str, str] | None, salt: str | None
) -> None:
    namespace = _core.namespace_digest(fields)
    assert namespace == model.namespace_digest(fields) == _core.namespace_digest(fields[::-1])
    assert _core.root_key(namespace, adapter, salt) == model.root_key(namespace, adapter, salt)


def test_a_whole_list_at_once_has_the_keys_of_single_ids() -> None:
    ids = [number * 2_654_435_761 % 151_936 for number in range(9000)]
    for block_tokens, lookahead in ((16, 0), (40, 0), (256, 0), (300, 0), (16, 1), (256, 3)):
        chain = _core.KeyChain(ROOT, block_tokens=block_tokens, lookahead=lookahead)
        chain.append_tokens(ids)
        assert keys_of(chain) == model.chain_keys(
            ROOT, [model.Token(token) for token in ids], [], block_tokens, lookahead
        )
