"""Tests behavior that all commands share, including closed standard streams and Ctrl-C."""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvloft

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "kvloft.cli"]
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == at:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if not is_lost:
                    raise

at, is_lost = sys.argv.pop(1), sys.argv.pop(1) == "True"
sys.meta_path.insert(0, Interrupts())
# background jobs of a shell ignore SIGINT, and this process may be one
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("kvloft.cli", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        yield Path(folder)


def closed(argv: list[str], *numbers: int) -> "subprocess.CompletedProcess[str]":
    """Run a command that starts with the given file descriptors closed, and return its result."""

    def close() -> None:
        for number in numbers:
            os.close(number)

    return subprocess.run(
        [*COMMAND, *argv],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=close,
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["config"],
        ["config", "--json"],
        ["status", "--socket", "{}/kv.sock"],
        ["serve", "--socket", "{}/kv.sock"],
        ["--help"],
    ],
)
def test_a_closed_stdout_ends_a_command_without_effects(argv: list[str], folder: Path) -> None:
    done = closed([part.format(folder) for part in argv], 1)
    assert (done.returncode, done.stderr) == (
        4,
        "kvloft: stdout is closed; redirect it to /dev/null to discard the output\n",
    )
    assert not list(folder.iterdir())
    assert closed(["config"], 0, 1, 2).returncode == 4


def test_characters_that_stdout_cannot_encode_are_escaped(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvloft.cli", "config"],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "KVLOFT_DISK_PATH": f"{folder}/\xe9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\\xe9" in done.stdout


def test_errors_are_not_printed_to_stdout_if_stderr_is_closed(folder: Path) -> None:
    done = closed(["status", "--socket", str(folder / "kv.sock")], 2)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("argv", [["clear"], ["evict", "--salt-file", "-"]])
def test_a_stdin_that_is_closed_is_empty(argv: list[str], folder: Path) -> None:
    done = closed([*argv, "--socket", str(folder / "kv.sock")], 0)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("kvloft: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["config", "--json"], ["--help"], ["config", "--help"], ["--version"]]
)
@pytest.mark.parametrize(
    ("place", "reason"),
    [("/dev/full", "No space left on device"), ("/dev/null", "Bad file descriptor")],
)
def test_a_write_error_at_exit_is_one_sentence(argv: list[str], place: str, reason: str) -> None:
    """Python flushes its buffers at exit.

    An unhandled error during the flush would print a traceback and exit with status 120.
    """
    with open(place, "r" if place == "/dev/null" else "w") as out:
        done = subprocess.run(
            [*COMMAND, *argv],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=buffered(),
        )
    assert (done.returncode, done.stderr) == (
        4,
        f"kvloft: cannot write the output ({reason})\n",
    )


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["--version"], ["config"]])
def test_an_immediate_write_error_is_one_sentence(argv: list[str]) -> None:
    """With unbuffered output, the error occurs inside argparse, which would ignore it."""
    with open("/dev/full", "w") as out:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            [*COMMAND, *argv], stdout=out, stderr=subprocess.PIPE, text=True, timeout=120, env=env
        )
    assert (done.returncode, done.stderr) == (
        4,
        "kvloft: cannot write the output (No space left on device)\n",
    )


def test_a_wrong_argument_is_status_2_with_a_full_stderr() -> None:
    with open("/dev/full", "w") as full:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        assert (
            subprocess.run([*COMMAND, "nothing"], stderr=full, timeout=120, env=env).returncode == 2
        )


@pytest.mark.parametrize("argv", [["config"], ["config", "--json"], ["--help"]])
def test_a_reader_that_is_gone_is_no_error(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *argv],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=buffered(),
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def buffered() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(
    "module",
    [
        "kvloft.cli.commands",
        "argparse",
        "kvloft.cli.serve",
        "kvloft.config.sources",
        "kvloft.cli.metrics",
        "kvloft._core",
    ],
)
def test_ctrl_c_is_quiet_while_a_server_loads_its_modules(
    module: str, is_lost: bool, folder: Path
) -> None:
    """Ctrl-C also works inside code that swallows exceptions, such as an import callback."""
    interrupted(
        [module, str(is_lost), "serve", "--host-size", "1MiB", "--socket", str(folder / "kv.sock")]
    )


@pytest.mark.parametrize(
    "module", ["kvloft.cli.commands", "rich.console", "kvloft.cli.tables", "kvloft._core"]
)
def test_ctrl_c_is_quiet_while_another_command_loads_its_modules(module: str, folder: Path) -> None:
    interrupted([module, "False", "status", "--socket", str(folder / "kv.sock")])


def interrupted(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *argv], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")


def test_version_is_cargos_and_names_the_revision() -> None:
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"kvloft {re.escape(cargo)} \(([0-9a-f]{{7,40}}|unknown)\)\n", done.stdout)
    assert kvloft.__version__ == importlib.metadata.version("kvloft") == cargo


def test_without_a_command_it_prints_its_help() -> None:
    bare, asked = (
        subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=120)
        for argv in ([], ["--help"])
    )
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == asked.stdout and bare.stdout.startswith("usage: kvloft")
