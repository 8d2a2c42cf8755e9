"""Tests that scripts/circles.py finds the dependency cycles in synthetic crates, and that the list
of crates without cycles is correct.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CRATE = load("circles").Crate

MODULES = "mod a;\nmod b;\nmod c;\n"
CASES = {
    "use in both directions": (
        {"a": "use crate::b::B;", "b": "use super::a::{A, fmt};"},
        ["a", "b"],
    ),
    "over a third": (
        {"a": "use crate::b::B;", "b": "use crate::c::C;", "c": "use crate::a::A;"},
        ["a", "b", "c"],
    ),
    "a path without use": (
        {"a": "fn f() { super::b::g() }", "b": "use super::a;\nfn g() { a::f() }"},
        ["a", "b"],
    ),
    "a re-export hides nothing": (
        {"lib": MODULES + "pub use a::A;", "a": "use crate::b::B;", "b": "use crate::A;"},
        ["a", "b"],
    ),
    "nor does a re-export with another name": (
        {"lib": MODULES + "pub use a::A as Z;", "a": "use crate::b::B;", "b": "use crate::{c, Z};"},
        ["a", "b"],
    ),
    "a parent that uses what it re-exports": (
        {"lib": MODULES + "pub use a::A;\npub struct Root(A);", "a": "use crate::Root;"},
        ["a", "lib"],
    ),
    "methods of one type that call each other": (
        {
            "a": "pub struct SomeType;",
            "b": (
                "use super::a::SomeType;\nimpl SomeType {\n"
                "    pub(super) fn one(&self) {\n        self.two();\n    }\n}"
            ),
            "c": (
                "use super::a::SomeType;\nimpl SomeType {\n"
                "    fn two(&self) {\n        self.one();\n    }\n}"
            ),
        },
        ["b", "c"],
    ),
    "a type's file that calls a method from above": (
        {
            "a": "pub struct SomeType;\nfn f(some_type: &SomeType) {\n    some_type.one();\n}",
            "b": "use super::a::SomeType;\nimpl SomeType {\n    fn one(&self) {}\n}",
            "c": "use super::a::SomeType;\nimpl Drop for SomeType {\n    fn drop(&mut self) {}\n}",
        },
        ["a", "b"],
    ),
    "one direction": (
        {"a": "use crate::{b::B, c::C};", "b": "use crate::c::{self, C};", "c": "use std::fmt;"},
        None,
    ),
    "a parent that only re-exports": (
        {"lib": MODULES + "pub use a::A;\npub use b::B;", "a": "use crate::B;"},
        None,
    ),
    "a module that is used for its submodule": (
        {
            "a": "mod d;\nuse crate::b::B;",
            "a/d": "pub struct D;",
            "b": "use crate::a;\nfn f(d: a::d::D) {}",
        },
        None,
    ),
    "comments and strings": (
        {
            "a": "// crate::b::B\nuse crate::c::C;",
            "b": "use crate::a::A;",
            "c": 'fn f() -> X { "crate::a::A" }',
        },
        None,
    ),
    "tests": (
        {
            "a": "use crate::b::B;",
            "b": (
                "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}\n#[cfg(test)]\nuse crate::a::A;"
            ),
        },
        None,
    ),
    "a type of the same name elsewhere": (
        {
            "a": "use crate::b::B;\nstruct Table;\nimpl Table {\n    fn one(&self) {}\n}",
            "b": "struct Table;\nimpl Table {\n    fn two(&self) {\n        self.one();\n    }\n}",
        },
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_circle_is_a_set_of_mutually_dependent_modules(case: str, tmp_path: Path) -> None:
    files, circle = CASES[case]
    (tmp_path / "src/a").mkdir(parents=True)
    for name, text in ({"lib": MODULES, "a": "", "b": "", "c": ""} | files).items():
        (tmp_path / "src" / f"{name}.rs").write_text(text + "\n")
    assert CRATE(tmp_path).circles() == ([circle] if circle else [])


def test_modules_in_folders_are_found_and_named_by_their_way(tmp_path: Path) -> None:
    (tmp_path / "src/a").mkdir(parents=True)
    (tmp_path / "src/lib.rs").write_text("pub(crate) mod a;\n")
    (tmp_path / "src/a/mod.rs").write_text("mod one;\nmod two;\npub use one::One;\n")
    (tmp_path / "src/a/one.rs").write_text("use super::two::Two;\n")
    (tmp_path / "src/a/two.rs").write_text("use super::One;\n")
    assert CRATE(tmp_path).circles() == [["a::one", "a::two"]]


def test_a_real_crate_is_read_whole() -> None:
    core = CRATE(ROOT / "rust" / "core")
    assert ("store", "state") in core.edges["store", "save"]
    assert ("store", "host", "frames") in core.edges["store", "save"], "through a method only"
    assert ("error",) in core.edges["store", "config"], "through a re-export"
    alone = ((), ("disk",), ("disk", "breaker"), ("disk", "time_shares"), ("host",), ("tenants",))
    assert all(
        core.edges[name]
        for name in core.modules
        if name[:1] == ("store",) and name[1:] not in alone
    )
