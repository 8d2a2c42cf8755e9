"""Tests the prose lint in scripts/prose.py."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "scripts" / "prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROSE = load()


def phrases(text: str, suffix: str = ".py", *, strict: bool = True) -> list[str]:
    return [hit.phrase for hit in PROSE.hits(text, suffix, strict=strict)]


STRICT = {
    "# Waits for the next one.": "next one",  # prose: ignore
    "# Evicts the one that was used\n# least.": "the one",  # prose: ignore
    "# Keeps those of the last step.": "those",  # prose: ignore
    "# Saves new chunks and skips old ones.": "ones",  # prose: ignore
    '"""Sizes. Must not depend on vLLM."""': "Must not depend",  # prose: ignore
    "# Reads all of them at once.": "at once",  # prose: ignore
    "# Requires vLLM from 0.30 on.": "from 0.30 on",  # prose: ignore
    "# Evicts keys from `first` on.": "from ... on",  # prose: ignore
    "# Fails if a chunk was removed meanwhile.": "meanwhile",  # prose: ignore
    '"""Longest wait of a call."""': "Longest",  # prose: ignore
    '"""Least time between two probes."""': "Least time",  # prose: ignore
    '"""Most bytes of a message."""': "Most bytes of",  # prose: ignore
    "# The arena is closed by the system.": "the system",  # prose: ignore
    '"""Whether the disk is open."""': "Whether",  # prose: ignore
}
CLEAN = (
    "# One of the chunks; the one broad except; all ones; no one-off.",
    '"""Must be positive. The prompt must not depend on the time."""',
    "# Copies from host memory on the GPU. Moves on.",
    "# Meanwhile, the engine runs.",
    '"""Least recently used. Most requests are short. The longest wait."""',
    "# A file system, the operating system and the system prompt.",
    "# Checks whether it is open.",
    "ones = [at_once(those) for those in range(3)]",  # prose: ignore
)


@pytest.mark.parametrize("text", STRICT)
def test_strict_rules_find_phrases(text: str) -> None:
    assert phrases(text) == [STRICT[text]]
    assert phrases(text, strict=False) == []


def test_every_strict_rule_has_an_example() -> None:
    patterns = [PROSE.pattern_of([rule]) for rule in PROSE.STRICT]
    prose = [PROSE.prose_of_python(text) for text in STRICT]
    assert [rule.pattern for rule in patterns if not any(map(rule.search, prose))] == []


@pytest.mark.parametrize("text", CLEAN)
def test_strict_rules_ignore_plain_english_and_code(text: str) -> None:
    assert phrases(text) == []


def test_phrases_of_all_files_are_found_across_lines() -> None:
    text = "# Retries before it gives\n# up.\n"  # prose: ignore
    (hit,) = PROSE.hits(text, ".py", strict=False)
    assert (hit.line, hit.phrase) == (1, "gives up")  # prose: ignore


def test_a_line_can_be_ignored() -> None:
    assert phrases(f"# It is done at once.  # {PROSE.IGNORED}") == []  # prose: ignore


def test_strict_paths_exist() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in PROSE.files(ROOT)]
    for start in PROSE.STRICT_PATHS:
        assert any(name.startswith(start) for name in names), start


def test_the_command_applies_strict_rules_to_strict_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PROSE, "ROOT", tmp_path)
    for name in ("csrc/a.cu", "tests/a.rs"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("// Waits for those.\n")  # prose: ignore
    assert PROSE.main([]) == 1
    found = capsys.readouterr().out.splitlines()
    assert [re.match(r"[^ ]+", line)[0] for line in found] == ["csrc/a.cu:1:"]  # type: ignore[index]
    assert PROSE.main(["tests"]) == 0
    assert PROSE.main(["--strict", "tests"]) == 1
