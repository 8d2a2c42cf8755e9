"""Checks the rules of this repository that no linter covers.

The rules cover `unsafe`, environment variables, imports, file and document lengths, and dependency
cycles. The script prints one line per violation, and exits with status 1 if it finds any. It checks
`import kvloft` in the environment that runs it.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from circles import Crate

ROOT = Path(__file__).resolve().parents[1]
UNSAFE_FILES = {
    "rust/core/src/io/arena.rs",
    "rust/core/src/io/arena/tests.rs",
    "rust/core/src/io/numa.rs",
    "rust/py/src/tokens.rs",
}
ENVIRONMENT_FILE = "python/kvloft/config/environment.py"
PURE_FOLDERS = ("python/kvloft/plan/", "python/kvloft/seam/", "python/kvloft/config/")
PURE_FILES = ("python/kvloft/errors.py", "python/kvloft/counters.py")
PATCHES_FILE = "python/kvloft/vllm/patches.py"
MAX_LINES = 400
MAX_TEST_LINES = 700
"""Maximum number of lines in a test, benchmark or script."""
MAX_WORDS = 16_000
"""Maximum total number of words in Markdown files outside RESULTS."""
RESULTS = "benches/results/"
MAX_README_LINES, MAX_README_WORDS = 70, 500
README_LINKS = "\n## More\n"
"""The README's word limit applies to the text before this heading."""
MAX_ARCHITECTURE_LINES = 150
MAX_CHANGELOG_ENTRIES = 30
"""Maximum number of changelog entries per release."""
FREE_OF_CIRCLES = ("core", "wire")
"""Crates under rust/ that must not have dependency cycles."""
HEAVY = ("torch", "vllm", "numpy", "yaml", "rich")


def sources(folder: str, suffix: str) -> Iterator[tuple[str, str]]:
    """Yield (path relative to the root, text) of each file under ``folder``."""
    for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def unsafe_elsewhere() -> Iterator[str]:
    """Only UNSAFE_FILES may contain `unsafe`, and every use must have a SAFETY comment."""
    for name, text in sources("rust", ".rs"):
        lines = [line.split("//")[0] for line in text.splitlines()]
        count = sum(bool(re.search(r"\bunsafe\b", line)) for line in lines)
        if count and name not in UNSAFE_FILES:
            yield f"{name}: unsafe outside {sorted(UNSAFE_FILES)}"
        elif count > text.count("SAFETY:"):
            yield f"{name}: {count} lines with unsafe, {text.count('SAFETY:')} SAFETY comments"


def environment_elsewhere() -> Iterator[str]:
    """Only ENVIRONMENT_FILE may read environment variables."""
    for name, text in sources("python/kvloft", ".py"):
        if name != ENVIRONMENT_FILE and re.search(
            r"\bos\.(environ|getenv)|\bimport environ|\bgetenv\(", text
        ):
            yield f"{name}: reads environment variables; only {ENVIRONMENT_FILE} may read them"


def extension_elsewhere() -> Iterator[str]:
    """Modules for values, settings and planning must not import the extension module.

    import-linter does not check compiled modules.
    """
    for name, text in sources("python/kvloft", ".py"):
        loaded = re.sub(r"^if TYPE_CHECKING:\n(    .*\n)+", "", text, flags=re.MULTILINE)
        pure = name.startswith(PURE_FOLDERS) or name in PURE_FILES
        if pure and re.search(
            r"^\s*(from|import) kvloft(\._core|.* _core\b)", loaded, re.MULTILINE
        ):
            yield f"{name}: imports kvloft._core"


def hidden_imports() -> Iterator[str]:
    """No import may bypass the contracts in pyproject.toml, which check only import statements.

    PATCHES_FILE is exempt: it imports vLLM modules by name, and its package may import vLLM.
    """
    for name, text in sources("python/kvloft", ".py"):
        if name != PATCHES_FILE and re.search(
            r"\b(import_module|__import__|run_module|exec)\(", text
        ):
            yield f"{name}: imports a module by name, which import contracts do not check"


def long_files() -> Iterator[str]:
    """No source file may exceed its maximum length."""
    for folder, suffix in (
        ("rust", ".rs"),
        ("python", ".py"),
        ("tests", ".py"),
        ("benches", ".py"),
        ("scripts", ".py"),
    ):
        for name, text in sources(folder, suffix):
            is_product = folder in ("rust", "python") and not re.search(
                r"/tests|/benches|rust/testing", name
            )
            limit = MAX_LINES if is_product else MAX_TEST_LINES
            if (count := text.count("\n")) > limit:
                yield f"{name}: {count} lines, more than {limit}"


def documents() -> dict[str, str]:
    """Return the text of each Markdown file outside RESULTS."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in listed.stdout.split()
        if not name.startswith(RESULTS)
    }


def cut_tables() -> Iterator[str]:
    """No blank line may separate a table's rows, because it would end the table."""
    for name, text in documents().items():
        for match in re.finditer(r"\|\n\n+(?=\|)(?!.*\n\|[ :|-]+\n)", text):
            yield f"{name}:{text.count(chr(10), 0, match.start()) + 2}: blank line in a table"


def long_documents() -> Iterator[str]:
    """No document may exceed its maximum length."""
    texts = documents()
    readme, architecture = texts["README.md"], texts["ARCHITECTURE.md"]
    sizes = [
        ("all Markdown: words", sum(len(text.split()) for text in texts.values()), MAX_WORDS),
        ("README.md: lines", readme.count("\n"), MAX_README_LINES),
        ("README.md: words", len(readme.split(README_LINKS)[0].split()), MAX_README_WORDS),
        ("ARCHITECTURE.md: lines", architecture.count("\n"), MAX_ARCHITECTURE_LINES),
    ]
    for release in texts["CHANGELOG.md"].split("\n## ")[1:]:
        title = f"CHANGELOG.md, {release.splitlines()[0]}: entries"
        sizes.append((title, release.count("\n- "), MAX_CHANGELOG_ENTRIES))
    yield from (
        f"{what}: {count:,}, more than {limit:,}" for what, count, limit in sizes if count > limit
    )


def circles() -> Iterator[str]:
    """The crates in FREE_OF_CIRCLES must not have dependency cycles between modules."""
    for crate in FREE_OF_CIRCLES:
        for circle in Crate(ROOT / "rust" / crate).circles():
            yield f"rust/{crate}/src: dependency cycle between modules: {', '.join(circle)}"


def heavy_import() -> Iterator[str]:
    """`import kvloft` must not import the packages in HEAVY."""
    code = f"import sys, kvloft; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    if run.returncode or run.stdout.strip():
        what = run.stdout.strip() or f"fails: {run.stderr.strip()}"
        yield f"`import kvloft` must not import packages that are slow to load: {what}"


RULES = (
    unsafe_elsewhere,
    environment_elsewhere,
    extension_elsewhere,
    hidden_imports,
    long_files,
    cut_tables,
    long_documents,
    circles,
    heavy_import,
)


def main() -> int:
    offences = [o for rule in RULES for o in rule()]
    print("\n".join(offences))
    return 1 if offences else 0


if __name__ == "__main__":
    raise SystemExit(main())
