"""Checks that importing kvloft and running its command do not load certain modules, and checks the
contents of the wheel.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest


def loaded_after(code: str, *names: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*[m for m in {names!r} if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd="/", capture_output=True, text=True, check=True
    )
    return set(run.stdout.split()[-len(names) :]) & set(names)


def test_import_kvloft_loads_neither_torch_nor_vllm() -> None:
    assert loaded_after("import kvloft", "kvloft", "torch", "vllm", "numpy", "kvloft._core") == {
        "kvloft"
    }


@pytest.mark.parametrize(
    "module", ["kvloft.plan", "kvloft.config.sources", "kvloft.seam", "kvloft.cli.commands"]
)
def test_modules_that_must_run_without_vllm_do(module: str) -> None:
    assert loaded_after(f"import {module}", module, "torch", "vllm") == {module}


def test_the_commands_run_without_torch_and_vllm() -> None:
    code = "from kvloft.cli.commands import build_parser; build_parser().format_help()"
    assert loaded_after(code, "kvloft.cli.config", "torch", "vllm") == {"kvloft.cli.config"}


def test_a_server_starts_without_modules_of_other_commands() -> None:
    """Engines wait for the server to start.

    Importing rich, YAML and an HTTP server would take several times as long as importing the
    modules that the server needs.
    """
    code = (
        "from kvloft.cli.commands import build_parser; from kvloft.cli.connection import settings; "
        "settings(build_parser('serve').parse_args(['serve', '--socket', '/tmp/a.sock', "
        "'--salt-ttl', '1h']))"
    )
    heavy = (
        "rich",
        "yaml",
        "prometheus_client",
        "http.server",
        "difflib",
        "subprocess",
        "kvloft.cli.status",
    )
    assert loaded_after(code, "kvloft.cli.serve", *heavy) == {"kvloft.cli.serve"}


def test_requirements_name_neither_torch_nor_vllm() -> None:
    requirements = importlib.metadata.requires("kvloft") or []
    always = {r.split(">")[0] for r in requirements if "extra ==" not in r}
    assert always == {"prometheus-client", "pyyaml", "rich"}
    assert not any(name in r for r in requirements for name in ("torch", "vllm"))


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    entries = [
        e
        for e in importlib.metadata.entry_points(group="vllm.general_plugins")
        if e.name == "kvloft"
    ]
    assert [e.value for e in entries] == ["kvloft.vllm.plugin:register"]


def test_the_wheel_contains_types_and_device_sources() -> None:
    import kvloft

    folder = Path(kvloft.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "_core.pyi").exists()
    assert (folder / "csrc" / "README.md").exists()
