"""The model of the symbolic engine: KV at a position is the hash of all that came before it, and so is the next token.

Must not know vLLM or kvloft: it is the oracle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

VOCAB = 40
_MASK = (1 << 62) - 1


def root(adapter: str | None, salt: str | None) -> int:
    """Symbol of the empty prefix."""
    return int.from_bytes(blake2b(repr((adapter, salt)).encode(), digest_size=7).digest(), "little")


def extend(symbol: int, content: int) -> int:
    """Symbol of a prefix with one more position; ``content`` is a token id or the hash of an embedding row."""
    mixed = (symbol * 6364136223846793005 + content * 1442695040888963407 + 1) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(symbol: int) -> int:
    """What greedy decoding says after a prefix."""
    return 3 + (symbol >> 7) % (VOCAB - 3)


def row_content(row: bytes) -> int:
    """Content of an embedding row: never a token id."""
    return VOCAB + int.from_bytes(blake2b(row, digest_size=6).digest(), "little")


@dataclass
class Prefix:
    """Contents of one request's positions, and their symbols; ``symbols[i]`` is the KV at position i."""

    start: int
    contents: list[int] = field(default_factory=list)
    symbols: list[int] = field(default_factory=list)

    def append(self, content: int) -> None:
        self.symbols.append(extend(self.symbols[-1] if self.symbols else self.start, content))
        self.contents.append(content)

    def truncate(self, length: int) -> None:
        del self.contents[length:], self.symbols[length:]

    def __len__(self) -> int:
        return len(self.contents)

    @property
    def last(self) -> int:
        return self.symbols[-1] if self.symbols else self.start


@dataclass(frozen=True)
class Turn:
    """One input of a streaming session after the first: its tokens, and how many to generate after it."""

    ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Spec:
    """One request: contents of its prompt, and what vLLM is given for it. ``turns`` make it a streaming session."""

    id: str
    contents: tuple[int, ...]
    max_tokens: int
    ids: tuple[int, ...] | None = None
    embeds: Any = None
    is_token: tuple[bool, ...] | None = None
    salt: str | None = None
    adapter: str | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def start(self) -> int:
        return root(self.adapter, self.salt)

    def truth(self) -> list[int]:
        """All tokens that are said, over all turns; a session forgets the last one it said before each new turn."""
        prefix, said = Prefix(self.start), list[int]()
        for content in self.contents:
            prefix.append(content)
        _say(prefix, self.max_tokens, said)
        for turn in self.turns:
            prefix.truncate(len(prefix) - 1)
            for content in turn.ids:
                prefix.append(content)
            _say(prefix, turn.max_tokens, said)
        return said


def _say(prefix: Prefix, count: int, said: list[int]) -> None:
    for _ in range(count):
        said.append(next_token(prefix.last))
        prefix.append(said[-1])


def contents_of(ids: Sequence[int] | None, rows: Sequence[bytes] | None, is_token: Sequence[bool] | None) -> tuple[int, ...]:
    """Contents of a prompt of ids, of embedding rows, or of both."""
    if rows is None:
        return tuple(ids or ())
    mask = is_token or [False] * len(rows)
    return tuple((ids or ())[i] if mask[i] else row_content(rows[i]) for i in range(len(rows)))
