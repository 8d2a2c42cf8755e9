"""Checks the table of counters against a store, a server, an engine that uses the server, and
docs/metrics.md.
"""

import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvloft import _core
from kvloft.counters import METRICS, Scope, exported

ROOT = Path(__file__).parents[1]
DOCS = (ROOT / "docs" / "metrics.md").read_text()
NAMES = {metric.name for metric in METRICS}
BY_NAMESPACE = {"slabs"}
BY_STATUS = {"host_bytes", "slab_bytes", "engines"}
"""Fields of a status that are not statistics."""


@pytest.fixture
def status() -> Any:
    """Return the status of a server with a disk and a namespace with a fixed share."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        options: dict[str, Any] = {
            "disk_path": f"{folder}/disk",
            "disk_bytes": 1 << 20,
            "shares": [("00", 50)],
        }
        with closing(
            _core.Server(f"{folder}/run/kv.sock", host_bytes=1 << 20, **options)
        ) as server:
            engine = _core.Session.connect(
                f"{folder}/run/kv.sock", frame_bytes=4096, namespace=bytes(32), timeout_s=60.0
            )
            yield server.status() | {"engine": engine.stats()}
            engine.close()


def names(scope: Scope) -> set[str]:
    return {metric.name for metric in exported(scope)}


def test_names_are_unique() -> None:
    assert len(NAMES) == len(METRICS)


def test_every_number_of_a_store_is_in_the_table(tmp_path: Path) -> None:
    options: dict[str, Any] = {"disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    with closing(
        _core.Session(frame_bytes=4096, host_bytes=1 << 20, namespace=bytes(32), **options)
    ) as store:
        assert store.stats().keys() <= NAMES


def test_the_table_has_the_numbers_of_a_server_and_no_others(status: dict[str, Any]) -> None:
    (space,) = status["namespaces"]
    assert space.keys() >= BY_NAMESPACE
    assert names(Scope.NAMESPACE) - BY_NAMESPACE <= space["stats"].keys() <= NAMES
    measured_later = {"server_disk_free_bytes", "server_disk_closed_bytes"}
    assert names(Scope.SERVER) - BY_STATUS - measured_later <= status["stats"].keys() <= NAMES
    everything = {*space["stats"], *status["stats"], *BY_NAMESPACE, *BY_STATUS, *measured_later}
    assert everything == NAMES - (names(Scope.ENGINE) - names(Scope.NAMESPACE))


def test_an_engine_exports_numbers_that_its_store_has(status: dict[str, Any]) -> None:
    own = names(Scope.ENGINE) - names(Scope.NAMESPACE)
    assert names(Scope.ENGINE) - own <= status["engine"].keys() <= NAMES


@pytest.mark.parametrize(
    ("title", "scopes", "spell"),
    [
        ("Engines", [Scope.ENGINE], lambda metric: metric.name),
        (
            "Server",
            [Scope.NAMESPACE, Scope.SERVER],
            lambda metric: f"kvloft_{metric.name}{'' if metric.is_gauge else '_total'}",
        ),
    ],
)
def test_the_documentation_lists_every_exported_number(
    title: str, scopes: list[Scope], spell: Callable[[Any], str]
) -> None:
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCS, re.DOTALL | re.MULTILINE)
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [
        name
        for cell in cells
        for name in re.findall(r"`(\w+)`", cell)
        if not name.endswith("_info")
    ]
    wanted = [spell(metric) for scope in scopes for metric in exported(scope)]
    assert sorted(documented) == sorted(wanted)
