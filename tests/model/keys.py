"""The oracle for keys: a slow second implementation of docs/design/keys.md.

The oracle uses the `blake3` package, recomputes all keys from a flat list of positions, shares no
code with kvloft and must not import kvloft. `python tests/model/keys.py --write` writes
tests/vectors/keys.json, and `--check` checks that the file is up to date.
"""

import argparse
import json
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

VECTORS = Path(__file__).parents[1] / "vectors" / "keys.json"


@dataclass(frozen=True, slots=True)
class Token:
    """A position whose input is a token id."""

    id: int


@dataclass(frozen=True, slots=True)
class Row:
    """A position whose input is an embedding row, identified by its raw bytes."""

    dtype: str
    width: int
    raw: bytes


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """A multimodal item at positions [start, start + num_tokens)."""

    start: int
    identifier: str
    num_tokens: int


Position = Token | Row


def keyed(mode: str, data: bytes) -> bytes:
    """Return the 32-byte keyed hash of ``data`` for ``mode``."""
    return blake3(data, key=blake3(b"kvloft key v2 " + mode.encode()).digest()).digest()


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def text(value: str) -> bytes:
    raw = value.encode()
    return u32(len(raw)) + raw


def namespace_digest(fields: Iterable[tuple[str, str]]) -> bytes:
    return keyed("namespace", b"".join(text(name) + text(value) for name, value in sorted(fields)))


def root_key(namespace: bytes, adapter: tuple[str, str] | None, salt: str | None) -> bytes:
    adapter_bytes = b"\0" if adapter is None else b"\1" + text(adapter[0]) + text(adapter[1])
    salt_bytes = b"\0" if salt is None else b"\1" + text(salt)
    tag = bytes(8) if salt is None else keyed("salt", salt.encode())[-8:]
    return keyed("root", namespace + adapter_bytes + salt_bytes)[:24] + tag


def _tokens(ids: Sequence[int]) -> bytes:
    return keyed("tokens", b"".join(map(u32, ids)))


def _kind(position: Position) -> tuple[str, int] | None:
    return None if isinstance(position, Token) else (position.dtype, position.width)


def _segment(run: Sequence[Position]) -> bytes:
    kind = _kind(run[0])
    if kind is None:
        return b"\1" + u32(len(run)) + _tokens([p.id for p in run if isinstance(p, Token)])
    rows = b"".join(p.raw for p in run if isinstance(p, Row))
    return b"\2" + u32(len(run)) + text(kind[0]) + u32(kind[1]) + keyed("embeds", rows)


def content_digest(positions: Sequence[Position], start: int, items: Iterable[Item]) -> bytes:
    """Return the digest of the block whose first position is ``start``."""
    stop = start + len(positions)
    touching = sorted(i for i in items if i.start < stop and i.start + i.num_tokens > start)
    if not touching and all(isinstance(p, Token) for p in positions):
        return _tokens([p.id for p in positions if isinstance(p, Token)])
    runs: list[list[Position]] = []
    for position in positions:
        if runs and _kind(runs[-1][0]) == _kind(position):
            runs[-1].append(position)
        else:
            runs.append([position])
    data = b"".join(map(_segment, runs))
    for item in touching:
        data += (
            b"\3"
            + text(item.identifier)
            + struct.pack("<q", item.start - start)
            + u32(item.num_tokens)
        )
    return keyed("mixed", data)


def chain_keys(
    root: bytes,
    positions: Sequence[Position],
    items: Iterable[Item],
    block_tokens: int,
    lookahead: int = 0,
) -> list[bytes]:
    """Return the keys of all full blocks.

    Each key also covers the ``lookahead`` positions after its block.
    """
    items = list(items)
    keys: list[bytes] = []
    key, start = root, 0
    for stop in range(block_tokens + lookahead, len(positions) + 1, block_tokens):
        key = keyed("chain", key + content_digest(positions[start:stop], start, items))
        keys.append(key)
        start = stop
    return keys


def group_key(key: bytes, group: int) -> bytes:
    """Return the key of KV cache group ``group`` for the prefix with ``key``."""
    return keyed("group", (key + u32(group)).ljust(64, b"\0"))


# The golden vectors. Content is a list of segments: {"tokens": [ids]} or {"dtype", "width", "rows":
# hex}.

ROW_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}


def parse_content(content: Sequence[dict[str, Any]]) -> list[Position]:
    """Return the positions of a vector's content."""
    positions: list[Position] = []
    for segment in content:
        if "tokens" in segment:
            positions.extend(Token(token) for token in segment["tokens"])
            continue
        dtype, width, raw = segment["dtype"], segment["width"], bytes.fromhex(segment["rows"])
        step = ROW_BYTES[dtype] * width
        positions.extend(Row(dtype, width, raw[at : at + step]) for at in range(0, len(raw), step))
    return positions


def ids(num: int, seed: int) -> dict[str, Any]:
    raw = blake3(b"ids" + u32(seed)).digest(length=4 * num)
    return {"tokens": [word % 151_936 for (word,) in struct.iter_unpack("<I", raw)]}


def rows(num: int, dtype: str, width: int, seed: int) -> dict[str, Any]:
    raw = blake3(b"rows" + u32(seed)).digest(length=num * width * ROW_BYTES[dtype])
    return {"dtype": dtype, "width": width, "rows": raw.hex()}


FIELDS = [
    ["schema", "1"],
    ["model", "org/model"],
    ["revision", "0123abcd"],
    ["kv_dtype", "bfloat16"],
    ["tp", "2"],
]


def _case(name: str, content: list[dict[str, Any]], block: int = 16, **more: Any) -> dict[str, Any]:
    base = {"name": name, "fields": FIELDS, "adapter": None, "salt": None, "block_tokens": block}
    return base | {"items": [], "content": content} | more


def _identity_cases() -> list[dict[str, Any]]:
    body = [ids(20, 1)]
    return [
        _case("empty prefix", []),
        _case("no fields", body, fields=[]),
        _case("fields in another order", body, fields=FIELDS[::-1]),
        _case("fields not ascii", body, fields=[["modèle", "模型"], ["", ""]]),
        _case("empty salt is not no salt", body, salt=""),
        _case("salt", body, salt="tenant-7"),
        _case("adapter", body, adapter=["sql", "/loras/sql"]),
        _case("adapter, other split of the same letters", body, adapter=["sql/", "loras/sql"]),
        _case("adapter of empty strings", body, adapter=["", ""]),
        _case("adapter and salt", body, adapter=["sql", "3"], salt="tenant-7"),
    ]


def _token_cases() -> list[dict[str, Any]]:
    sizes = [1, 5, 16, 24, 48, 128, 240, 256, 257, 320]
    cases = [
        _case(f"tokens in blocks of {size}", [ids(2 * size + size // 2, size)], size)
        for size in sizes
    ]
    cases += [
        _case(f"{num} tokens", [ids(num, 7)], 8)
        for num in [0, 1, 7, 8, 9, 15, 16, 17, 16 * 8, 33 * 8]
    ]
    cases += [
        _case("extreme ids", [{"tokens": [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0, 255, 256]}], 4)
    ]
    return [*cases, _case("zeros", [{"tokens": [0] * 40}])]


def _embed_cases() -> list[dict[str, Any]]:
    zeros = {"dtype": "bfloat16", "width": 4, "rows": "00" * (40 * 8)}
    four = [
        rows(5, "bfloat16", 4, 1),
        rows(5, "bfloat16", 2, 2),
        rows(5, "float8_e4m3fn", 4, 3),
        rows(5, "float64", 1, 4),
    ]
    return [
        _case("bf16 rows", [rows(40, "bfloat16", 4, 1)]),
        _case(
            "f32 rows of the same bytes",
            [{**rows(40, "bfloat16", 4, 1), "dtype": "float32", "width": 2}],
        ),
        _case("f32 rows", [rows(21, "float32", 3, 2)], 4),
        _case("f16 rows longer than a chunk of BLAKE3", [rows(9, "float16", 600, 3)], 4),
        _case("zero rows are not token 0", [zeros]),
        _case("tokens then rows", [ids(10, 1), rows(30, "bfloat16", 4, 4)]),
        _case("rows then tokens", [rows(10, "bfloat16", 4, 5), ids(30, 2)]),
        _case("alternating", [s for i in range(7) for s in (ids(3, i), rows(2, "float32", 2, i))]),
        _case("two dtypes and widths", four, 8),
        _case(
            "neighbours of one kind",
            [ids(7, 1), ids(9, 2), rows(3, "float32", 2, 1), rows(13, "float32", 2, 2)],
            8,
        ),
    ]


def _item_cases() -> list[dict[str, Any]]:
    body = [ids(60, 3)]
    over_rows = [ids(8, 1), rows(20, "bfloat16", 4, 9), ids(20, 2)]
    return [
        _case("item inside a block", body, items=[["img-a", 3, 5]]),
        _case("item at a block's edges", body, items=[["img-a", 16, 16]]),
        _case("item from the last position", body, items=[["img-a", 15, 1]]),
        _case("item starting before the block", body, items=[["img-a", 3, 40]]),
        _case("item reaching past the prompt", body, 4, items=[["video", 50, 400]]),
        _case("item in the last block", body, 4, items=[["late", 58, 2]]),
        _case("two items, declared backwards", body, items=[["b", 20, 4], ["a", 2, 4]]),
        _case(
            "items at one start, by identifier", body, items=[["b", 2, 4], ["a", 2, 9], ["é", 2, 1]]
        ),
        _case(
            "overlapping items", body, 8, items=[["audio", 4, 30], ["video", 0, 60], ["x", 33, 2]]
        ),
        _case(
            "long item under short ones",
            body,
            4,
            items=[["long", 1, 50], ["s1", 6, 1], ["s2", 13, 2]],
        ),
        _case("empty identifier", body, items=[["", 0, 1]]),
        _case("items over rows", over_rows, items=[["a", 4, 20]]),
        _case(
            "everything",
            over_rows,
            8,
            items=[["a", 4, 20], ["b", 40, 3]],
            adapter=["sql", "/sql"],
            salt="tenant-7",
        ),
    ]


def make_vectors() -> dict[str, Any]:
    """Return all cases with their expected values, as JSON values."""
    cases = _identity_cases() + _token_cases() + _embed_cases() + _item_cases()
    for case in cases:
        namespace = namespace_digest([(name, value) for name, value in case["fields"]])
        root = root_key(namespace, case["adapter"] and tuple(case["adapter"]), case["salt"])
        items = [Item(start, identifier, num) for identifier, start, num in case["items"]]
        keys = chain_keys(root, parse_content(case["content"]), items, case["block_tokens"])
        case |= {
            "namespace": namespace.hex(),
            "root": root.hex(),
            "keys": [key.hex() for key in keys],
        }
    return {"schema": 2, "cases": cases}


def render(vectors: dict[str, Any]) -> str:
    """Format one case per line so that a diff shows which case differs."""
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in vectors["cases"])
    return f'{{"schema": {vectors["schema"]}, "cases": [\n{lines}\n]}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="write tests/vectors/keys.json")
    what.add_argument(
        "--check", action="store_true", help="exit 1 if tests/vectors/keys.json differs"
    )
    wanted = render(make_vectors())
    if parser.parse_args(argv).write:
        VECTORS.write_text(wanted, encoding="utf-8")
        return 0
    return int(VECTORS.read_text(encoding="utf-8") != wanted)


if __name__ == "__main__":
    sys.exit(main())
