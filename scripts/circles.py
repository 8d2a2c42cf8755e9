"""Finds dependency cycles between the modules of a Rust crate.

A module depends on the modules that define the names it uses. Re-exports are resolved, so they
neither create nor hide a cycle. If a type has `impl` blocks in multiple files, a caller also
depends on the file that contains the called method. Tests are ignored.

The script reads rustfmt-formatted text, without a Rust parser. It assumes that a value has the type
`SomeType` if its name is `some_type`, or if it is `self` in one of the type's `impl` blocks.
`scripts/house_rules.py` lists the crates that must not have cycles.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Name = tuple[str, ...]  # the path of a module from the crate's root, or a path in the source

TEST = re.compile(
    r"^( *)#\[cfg\((?:test|any\(test\b.*)\)\]\n(?:\1#.*\n)*(?:\1\S.*;\n|\1\S[\s\S]*?^\1\}.*\n)",
    re.MULTILINE,
)
NOISE = re.compile(r"//.*|\"(?:\\[\s\S]|[^\"\\])*\"")
CHILD = re.compile(r"^(?:pub(?:\(.*?\))? )?mod (\w+);", re.MULTILINE)
USE = re.compile(r"^ *(pub(?:\(.*?\))? )?use ([^;]+);", re.MULTILINE)
IMPL = re.compile(
    r"^impl\b(?:[^{]* for)?[^{]*?(\w+)(?:<[^{]*>)?(?:\s+where[^{]*)?\s\{(\n.*?^)?\}",
    re.MULTILINE | re.DOTALL,
)
METHOD = re.compile(r"^    (?:pub(?:\(.*?\))? )?(?:const )?fn (\w+)", re.MULTILINE)


@dataclass
class Module:
    """A source file.

    ``code`` is its text without comments, strings, tests and `use` declarations. ``uses`` and
    ``exports`` map imported and re-exported names to their paths.
    """

    code: str
    uses: dict[str, Name] = field(default_factory=dict)
    exports: dict[str, Name] = field(default_factory=dict)


class Crate:
    """A crate's modules, without tests. ``edges`` holds their dependencies."""

    def __init__(self, folder: Path) -> None:
        self.modules: dict[Name, Module] = {}
        self._read(folder / "src" / "lib.rs", folder / "src", ())
        self.edges: dict[Name, set[Name]] = {
            name: set(self._used(name)) - {name} for name in self.modules
        }
        for name, other in self._calls():
            self.edges[name] |= {other} - {name}

    def _read(self, path: Path, folder: Path, name: Name) -> None:
        text = NOISE.sub("", TEST.sub("", path.read_text(encoding="utf-8")))
        module = self.modules[name] = Module(USE.sub("", text))
        for public, tree in USE.findall(text):
            (module.exports if public else module.uses).update(_leaves(tree))
        for child in CHILD.findall(text):
            below = folder / child
            path = below / "mod.rs"
            self._read(path if path.exists() else folder / f"{child}.rs", below, (*name, child))

    def _find(self, at: Name, path: Name) -> tuple[Name, Name] | None:
        """Resolve ``path`` as written in module ``at``.

        Returns the defining module and the rest of the path, or None if the path leads to another
        crate.
        """
        if path[0] not in ("crate", "super", "self") and (*at, path[0]) not in self.modules:
            module = self.modules[at]
            known = {**module.uses, **module.exports}.get(path[0], path)
            return (
                self._find(at, (*known, *path[1:]))
                if known != path and known[0] != path[0]
                else None
            )
        for nth, part in enumerate(path):
            if part in ("crate", "super", "self"):
                at = {"crate": (), "super": at[:-1], "self": at}[part]
            elif (*at, part) in self.modules:
                at = (*at, part)
            elif part in self.modules[at].exports:
                return self._find(at, (*self.modules[at].exports[part], *path[nth + 1 :]))
            else:
                return at, path[nth:]
        return at, ()

    def _used(self, name: Name) -> Iterator[Name]:
        """Yield the modules that define the names used in ``name``.

        A reference to a module itself, rather than to a name in it, is not a dependency.
        """
        module = self.modules[name]
        words = set(re.findall(r"\w+", module.code))
        paths = {(word,) for word in module.uses.keys() | module.exports.keys() & words}
        paths |= {
            tuple(path.split("::")) for path in re.findall(r"(?<![\w:])\w+(?:::\w+)+", module.code)
        }
        for path in paths:
            found = self._find(name, path)
            if found is not None and found[1]:
                yield found[0]

    def _calls(self) -> Iterator[tuple[Name, Name]]:
        """Yield (caller, module with the called method) for types with `impl` blocks in
        multiple files.
        """
        bodies: dict[tuple[Name, str], list[tuple[Name, str]]] = defaultdict(list)
        for name, module in self.modules.items():
            for of, body in IMPL.findall(module.code):
                where = self._find(name, (of,))
                bodies[where[0] if where else name, of].append((name, body))
        for (_, of), impls in bodies.items():
            methods = {method: name for name, body in impls for method in METHOD.findall(body)}
            value = re.sub(r"(?<=\w)(?=[A-Z])", "_", of).lower()
            texts = [(name, "self", "Self", body) for name, body in impls]
            texts += [(name, value, of, module.code) for name, module in self.modules.items()]
            for name, self_, type_, text in texts if len({name for name, _ in impls}) > 1 else ():
                called = re.findall(rf"\b{self_}\s*\.(\w+)\(|\b{type_}::(\w+)", text)
                yield from (
                    (name, methods[call]) for call in map("".join, called) if call in methods
                )

    def circles(self) -> list[list[str]]:
        """Return the names of the modules in each dependency cycle."""
        reach = {name: self._reach(name) for name in self.edges}
        found = {
            frozenset(other for other in reach[name] if name in reach[other]) for name in reach
        }
        return sorted(
            sorted("::".join(name) or "lib" for name in circle) for circle in found if circle
        )

    def _reach(self, name: Name) -> set[Name]:
        seen: set[Name] = set()
        todo = list(self.edges[name])
        while todo:
            if (at := todo.pop()) not in seen:
                seen.add(at)
                todo += self.edges[at]
        return seen


def _leaves(tree: str) -> Iterator[tuple[str, Name]]:
    """Yield (local name, path) for each leaf of a `use` tree."""
    before, brace, rest = tree.partition("{")
    path, _, alias = before.partition(" as ")
    start = tuple(part for part in path.strip().split("::") if part)
    if not brace:
        start = start[:-1] if start[-1:] == ("self",) and len(start) > 1 else start
        yield alias.strip() or start[-1], start
    for part in re.findall(r"(?:[^,{}]|\{(?:[^{}]|\{[^{}]*\})*\})+", rest.rpartition("}")[0]):
        for name, leaf in _leaves(part) if part.strip() else ():
            yield (name, (*start, *leaf)) if leaf != ("self",) else (start[-1], start)
