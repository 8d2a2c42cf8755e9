"""Finds phrases in Markdown, docstrings, comments and strings that the house style replaces.

    scripts/prose.py            check all files, as `make lint` does
    scripts/prose.py PATH...    check the given files and directories
    scripts/prose.py --strict [PATH...]    apply the rules in STRICT to all files

The exit status is 1 if a phrase is found. Code blocks, code spans and quotations in Markdown are
skipped.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = re.compile(r"\.(?!github).*|target|build|site|dist|__pycache__")
ITSELF = "scripts/prose.py"
IGNORED = "prose: ignore"
"""Lines with this text are not checked."""

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
"""Patterns and their replacements. These rules apply to all files."""

_DETERMINER = "the|a|that|this|each|every|any|no|last|first|new|next|other|second"
_FUNCTION_WORD = "after|and|at|before|for|from|has|in|is|it|on|or|that|to|which|with"
_NOUN = (
    "attempts|blocks|bytes|chunks|connections|entries|files|frames|keys|lines|messages|pieces|"
    "records|requests|retries|seconds|threads|times|tokens|tries|units|words"
)
STRICT = {
    rf"(?:{_DETERMINER}) one(?=[.,;:)]| (?:{_FUNCTION_WORD})\b)": "the noun",
    r"those": "the noun",
    r"(?<!all.)ones": "the noun, or nothing",
    r"(?-i:Must) (?:not |only )?(?:depend|import|know)": "a subject: This module must not import",
    r"at once": "immediately, together, concurrently, in one call",
    r"from (?:\S+ ){1,4}on(?=[.,;:)])": "starting at, or newer, or more",
    r"(?-i:meanwhile)(?=[.,;:)])": "in the meantime, or the interval",
    r"(?-i:Longest|Shortest|Fewest)|(?-i:Least) (?!recently)\w+"
    rf"|(?-i:Most) (?:{_NOUN}) (?:of|in|per|that)": "Timeout for, Maximum number of",
    r"the system(?! (?:prompt|calls?|clock|allocator)\b)": "the kernel, the operating system",
    r"(?<=\"\"\")(?-i:Whether)": "True if, Return True if",
}
"""Patterns and their replacements. These rules apply to the files in STRICT_PATHS."""
STRICT_PATHS = (
    "benches/bench_",
    "benches/gpu/",
    "csrc/",
    "examples/",
    "pyproject.toml",
    "python/",
    "rust/",
    "scripts/",
)
"""Prefixes of the paths to which the rules in STRICT apply."""


def pattern_of(phrases: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern with one group per phrase. A space in a phrase matches any whitespace."""
    regex = "|".join(rf"(\b(?:{phrase})\b)" for phrase in phrases)
    regex = regex.replace(r"\b(?:(?:, |; )", "(?:(?:, |; )")
    return re.compile(regex.replace(" ", r"\s+"), re.IGNORECASE)


RULES = ((pattern_of(PHRASES), tuple(PHRASES.values())),)
STRICT_RULES = (*RULES, (pattern_of(STRICT), tuple(STRICT.values())))

CODE = "\0"
"""The character that replaces each character that is not prose."""
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
    """A phrase, its line number, and the suggested replacement."""

    line: int
    phrase: str
    advice: str


def blank(text: str) -> str:
    """Replace every character except whitespace with `CODE`, which keeps line numbers unchanged."""
    return re.sub(r"\S", CODE, text)


def prose_of_markdown(text: str) -> str:
    """Blank out code and quotations."""
    return MARKDOWN_CODE.sub(lambda match: blank(match[0]), text)


def prose_of_c_like(text: str) -> str:
    """Blank out everything except comments and strings in Rust, CUDA or C++ code."""
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
    """Blank out everything except comments and strings in Python code."""
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
            continue  # a string without whitespace is a name
        if token.type == tokenize.STRING and re.match(r"[a-zA-Z]*[fF]", piece):
            piece = re.sub(r"\{[^{}]*\}", lambda match: blank(match[0]), piece)
        piece = re.sub(r"``?[^`]*``?", lambda match: blank(match[0]), piece)
        out[begin : begin + len(piece)] = re.sub(
            r"^#:?|^[a-zA-Z]*['\"]+|['\"]+$", _blank_quotes, piece
        )
    return "".join(out)


def _blank_quotes(match: re.Match[str]) -> str:
    """Replace quotes with spaces, except the quotes that open a docstring."""
    opens = '"""' if match.start() == 0 and match[0].endswith('"""') else ""
    return opens.rjust(len(match[0]))


def prose_of_hashes(text: str) -> str:
    """Blank out everything except comments in shell scripts, YAML or TOML."""
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


def hits(text: str, suffix: str, *, strict: bool) -> Iterator[Hit]:
    """Yield the phrases to replace in the text of a file with the given suffix."""
    lines = text.splitlines()
    prose = PROSE[suffix](text).replace("\\n", "  ")
    for pattern, advice in STRICT_RULES if strict else RULES:
        for match in pattern.finditer(prose):
            line = text.count("\n", 0, match.start()) + 1
            if IGNORED not in lines[line - 1]:
                phrase = re.sub(f"{CODE}+", "...", " ".join(match[0].split()))
                yield Hit(line, phrase, advice[(match.lastindex or 1) - 1])


def files(path: Path) -> Iterator[Path]:
    """Yield ``path``, or the files with prose under it."""
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
    """Check the given paths, or the whole repository."""
    is_strict = "--strict" in arguments
    roots = [ROOT / name for name in arguments if name != "--strict"] or [ROOT]
    num_hits = 0
    for path in (path for root in roots for path in files(root)):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        for hit in hits(text, path.suffix, strict=is_strict or name.startswith(STRICT_PATHS)):
            print(f'{name}:{hit.line}: "{hit.phrase}"; use: {hit.advice}')
            num_hits += 1
    return 1 if num_hits else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
