"""Prose lint: phrases that the house style replaces, in Markdown, docstrings, comments and string
literals.

    scripts/prose.py            check all files, as `make lint` does
    scripts/prose.py PATH...    check these files and folders

The exit status is 1 if there is a hit. Code blocks, code spans and quotations in Markdown are
skipped. Uses the standard library only.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = re.compile(r"\.(?!github).*|target|build|site|dist|__pycache__")
ITSELF = "scripts/prose.py"
IGNORED = "prose: ignore"
"""A line with this text is not checked."""

PHRASES = {
    r"beside": "with, alongside, compared with",
    r"(?:of|in|for|by|from|on) whose|of which": "a sentence with the noun",
    r"whoever|whatever it is": "the noun",
    r"what (?:is|was|are|were)": "the noun",
    r"(?:is|are|was|were|be|been|being) told|tells": "logs, reports, returns",
    r"(?:left|leaves?|leaving)(?: \w+)? alone": "paused, skipped",
    r"(?:give|gives|gave|given|giving) up": "releases, evicts, drops",
    r"(?:go|goes|went|going) on": "continues",
    r"so (?:many|much|long)(?! as)": "a number, size or time-out",
    r"any ?more|no more(?! than)": "no longer",
    r"a person|people": "user, operator",
    r"stands(?! for)": "is",
    r"be had": "is available",
    r"comes? and goe?s?": "is added and removed",
    r"for ever|forever|as ever|nobody|somebody": "the noun, or nothing",
    r"the same of": "the noun",
    r"(?:, |; )for (?:it|they|there|no|nothing|vLLM(?!'))": "because",
    r"where (?:there|it|that|this) (?:is|are|was|were) (?:none|no|one|not)": "if",
    r"(?:has|have|had) not got": "lacks, does not have",
    r"anew|afresh": "again",
    r"come(?:s)? to rest": "becomes idle",
    r"hang(?:s|ing)? on (?:it|them|those|this|that)": "descendants, depends on",
    r"(?:tr(?:y|ies)|tried) again": "retries",
    r"all else": "everything else",
    r"(?:one|bytes|tokens|blocks|case|tensor) an? "
    r"(?:block|chunk|layer|line|rank|request|second|step|token|unit)": "per",
}
"""Pattern and its replacement in house style."""
_REGEX = "|".join(rf"(\b(?:{phrase})\b)" for phrase in PHRASES).replace(
    r"\b(?:(?:, |; )", "(?:(?:, |; )"
)
PATTERN = re.compile(_REGEX.replace(" ", r"\s+"), re.IGNORECASE)
ADVICE = tuple(PHRASES.values())

CODE = "\0"
"""Stands for a character that is not prose."""
C_LIKE = re.compile(
    r"//[/!]?(?P<line>[^\n]*)"
    r"|/\*(?P<block>.*?)\*/"
    r"|r(?P<hashes>#+)\"(?P<raw>.*?)\"(?P=hashes)"
    r"|\"(?P<text>(?:[^\"\\]|\\.)*)\""
    r"|'(?:[^'\\\n]|\\[^\n]*?)'",
    re.DOTALL,
)
MARKDOWN_CODE = re.compile(
    r"^```.*?^```|^~~~.*?^~~~|`[^`]*`|\"[^\"\n]*\"|^> [^\n]*|\]\([^)]*\)", re.DOTALL | re.MULTILINE
)


class Hit(NamedTuple):
    """A phrase at a line of a file, and its replacement."""

    path: str
    line: int
    phrase: str
    advice: str


def blank(text: str) -> str:
    """Replace everything but whitespace, so that prose on both sides of line breaks stays
    together.
    """
    return re.sub(r"\S", CODE, text)


def prose_of_markdown(text: str) -> str:
    """The text without code and quotations."""
    return MARKDOWN_CODE.sub(lambda match: blank(match[0]), text)


def prose_of_c_like(text: str) -> str:
    """Comments and strings of Rust, CUDA and C++."""
    out, end = [], 0
    for match in C_LIKE.finditer(text):
        out.append(blank(text[end : match.start()]))
        end = match.end()
        kept = next(
            (name for name in ("line", "block", "raw", "text") if match[name] is not None), None
        )
        if kept is None:
            out.append(blank(match[0]))
            continue
        begin, stop = match.span(kept)
        mark = re.sub(
            r"\S", " " if kept in ("line", "block") else CODE, text[match.start() : begin]
        )
        out += [
            mark,
            re.sub(r"\\\n", " \n", match[kept]),
            re.sub(r"\S", " ", text[stop : match.end()]),
        ]
    return "".join([*out, blank(text[end:])])


def prose_of_python(text: str) -> str:
    """Comments and strings of Python."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    out = list(blank(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (
            tokenize.COMMENT,
            tokenize.STRING,
            getattr(tokenize, "FSTRING_MIDDLE", -1),
        ):
            continue
        begin = starts[token.start[0] - 1] + token.start[1]
        piece = text[begin : starts[token.end[0] - 1] + token.end[1]]
        if token.type == tokenize.STRING and not re.search(r"\s", piece):
            continue  # a name, not prose
        if token.type == tokenize.STRING and re.match(r"[a-zA-Z]*[fF]", piece):
            piece = re.sub(r"\{[^{}]*\}", lambda match: blank(match[0]), piece)
        piece = re.sub(r"``?[^`]*``?", lambda match: blank(match[0]), piece)
        out[begin : begin + len(piece)] = re.sub(
            r"^#:?|^[a-zA-Z]*['\"]+|['\"]+$", lambda match: " " * len(match[0]), piece
        )
    return "".join(out)


def prose_of_hashes(text: str) -> str:
    """Comments of shell scripts, YAML, TOML and Makefiles."""
    return re.sub(
        r"^(?P<code>[^#\n]*(?:[^\s#][^\n#]*)?)(?P<comment>(?:(?<=\s)|^)#[^\n]*)?$",
        lambda match: blank(match["code"]) + (match["comment"] or "").replace("#", " "),
        text,
        flags=re.MULTILINE,
    )


PROSE = {
    ".md": prose_of_markdown,
    ".rs": prose_of_c_like,
    ".cu": prose_of_c_like,
    ".cuh": prose_of_c_like,
    ".py": prose_of_python,
    ".pyi": prose_of_python,
    ".sh": prose_of_hashes,
    ".yml": prose_of_hashes,
    ".yaml": prose_of_hashes,
    ".toml": prose_of_hashes,
}


def hits(path: Path) -> Iterator[Hit]:
    """The phrases in one file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for match in PATTERN.finditer(PROSE[path.suffix](text).replace("\\n", "  ")):
        line = text.count("\n", 0, match.start()) + 1
        if IGNORED not in lines[line - 1]:
            phrase = " ".join(match[0].split())
            yield Hit(
                path.relative_to(ROOT).as_posix(), line, phrase, ADVICE[(match.lastindex or 1) - 1]
            )


def files(path: Path) -> Iterator[Path]:
    """``path``, or the files under it that have prose."""
    for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
        *folders, _ = each.relative_to(ROOT).parts
        if (
            each.is_file()
            and each.suffix in PROSE
            and each != ROOT / ITSELF
            and not any(map(SKIPPED.fullmatch, folders))
        ):
            yield each


def main(arguments: list[str]) -> int:
    """Check the given paths, or the repository."""
    roots = [ROOT / name for name in arguments] or [ROOT]
    found = [hit for root in roots for path in files(root) for hit in hits(path)]
    for hit in found:
        print(f'{hit.path}:{hit.line}: "{hit.phrase}"; use: {hit.advice}')
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
