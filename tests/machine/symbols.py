"""The model that the correctness machine runs: both KV and the next token are functions of the
prefix.

A symbol identifies a whole prefix: tokens, embedding rows, media, adapter and salt. The KV of a
group is the symbol combined with the number of the group and the version of the weights. This
module is the oracle, so it must not import vLLM or kvloft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

VOCAB = 40
ADAPTERS = ("lora", "rola")
POISON = -1
"""The content of memory before the first write. Rejected draft tokens leave `GARBAGE`."""
GARBAGE = -2
_MASK = (1 << 62) - 1


def digest(value: object) -> int:
    """Return a 62-bit hash of ``value``."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little") & _MASK


@lru_cache
def root(adapter: str | None, salt: str | None) -> int:
    """Return the symbol of the empty prefix."""
    return digest((adapter, salt))


def extend(symbol: int, content: int) -> int:
    """Return the symbol of a prefix extended by one position.

    ``content`` is a token id, or identifies an embedding row or a media item.
    """
    mixed = (symbol * 6364136223846793005 + content * 1442695040888963407 + 1) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(symbol: int) -> int:
    """Return the token that greedy decoding gives after a prefix. The token does not depend on the
    weights.
    """
    return 3 + (symbol >> 7) % (VOCAB - 3)


def row_content(row: bytes) -> int:
    """Return the content of an embedding row, which never equals a token id."""
    return VOCAB + digest(row)


def item_content(token: int, identifier: str, at: int) -> int:
    """Return the content at offset ``at`` in a media item, which never equals a token id."""
    return VOCAB + digest((token, identifier, at))


@dataclass
class Prefix:
    """The contents of a request's positions and their symbols.

    ``symbols[i]`` identifies positions 0 to i.
    """

    start: int
    contents: list[int] = field(default_factory=list)
    symbols: list[int] = field(default_factory=list)

    def append(self, *contents: int) -> None:
        symbol = self.last
        for content in contents:
            symbol = extend(symbol, content)
            self.symbols.append(symbol)
        self.contents += contents

    def truncate(self, length: int) -> None:
        del self.contents[length:], self.symbols[length:]

    def __len__(self) -> int:
        return len(self.contents)

    @property
    def last(self) -> int:
        return self.symbols[-1] if self.symbols else self.start


@dataclass(frozen=True)
class Turn:
    """A further input of a streaming session: its tokens and the number of tokens to generate."""

    ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Item:
    """A media item at positions [start, start + length)."""

    identifier: str
    start: int
    length: int


@dataclass(frozen=True)
class Spec:
    """A request: the contents of its prompt and the input for vLLM.

    With ``turns``, the request is a streaming session.
    """

    id: str
    contents: tuple[int, ...]
    max_tokens: int
    ids: tuple[int, ...] | None = None
    embeds: Any = None
    is_token: tuple[bool, ...] | None = None
    items: tuple[Item, ...] = ()
    salt: str | None = None
    adapter: str | None = None
    turns: tuple[Turn, ...] = ()
    skips_cache: bool = False
    saves: str | None = None

    @property
    def most_tokens(self) -> int:
        """Maximum number of positions in the prompts and outputs of all turns."""
        return (
            len(self.contents)
            + self.max_tokens
            + sum(len(turn.ids) + turn.max_tokens for turn in self.turns)
        )

    def prefix(self, ids: Sequence[int] = ()) -> Prefix:
        """Return the prefix that consists of the prompt and the tokens that follow the prompt in
        ``ids``.
        """
        prefix = Prefix(root(self.adapter, self.salt))
        prefix.append(*self.contents, *ids[len(self.contents) :])
        return prefix

    def truth(self) -> list[int]:
        """Return the output tokens of all turns.

        A session drops the last token of a turn before the next turn.
        """
        prefix, said = self.prefix(), list[int]()
        _say(prefix, self.max_tokens, said)
        for turn in self.turns:
            prefix.truncate(len(prefix) - 1)
            prefix.append(*turn.ids)
            _say(prefix, turn.max_tokens, said)
        return said


def _say(prefix: Prefix, count: int, said: list[int]) -> None:
    for _ in range(count):
        said.append(next_token(prefix.last))
        prefix.append(said[-1])
