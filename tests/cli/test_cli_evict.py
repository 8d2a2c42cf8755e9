"""Tests `kvloft evict` on a real server: the chunks of a tenant are removed permanently, and its
salt is never shown.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvloft import _core
from kvloft.cli.__main__ import main

FRAME = 4096
SALT = "acme's secret"
ADAPTER = ("lora", "/there")
ROOTS = [(None, None), (None, SALT), (ADAPTER, SALT), (None, "another")]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        yield Path(folder)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Start a server with a disk tier in a separate process."""
    socket = str(folder / "run" / "kv.sock")
    sizes = ["--host-size", "1MiB", "--disk-path", str(folder / "disk"), "--disk-size", "4MiB"]
    argv = [sys.executable, "-m", "kvloft.cli", "serve", "--socket", socket, *sizes]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "is listening on" in process.stdout.readline()
            yield socket, process
        finally:
            process.kill()


def connect(socket: str, nth: int = 1) -> _core.Session:
    return _core.Session.connect(
        socket, frame_bytes=FRAME, namespace=bytes([nth] * 32), timeout_s=60.0
    )


def chain_of(nth: int, adapter: tuple[str, str] | None, salt: str | None) -> _core.KeyChain:
    chain = _core.KeyChain(_core.root_key(bytes([nth] * 32), adapter, salt), block_tokens=1)
    chain.append_tokens([1, 2, 3])
    return chain


def save_all(engine: _core.Session, nth: int = 1) -> None:
    for adapter, salt in ROOTS:
        (chunks,), _ = engine.reserve([(chain_of(nth, adapter, salt), (), 0, 0, 3, [[4, 5, 6]])])
        assert chunks is not None
        assert engine.settle(chunks.tickets()) == (3, 0)
    assert engine.flush(60.0)


def found(engine: _core.Session, nth: int = 1) -> list[int]:
    return [engine.lookup(chain_of(nth, adapter, salt))[1] for adapter, salt in ROOTS]


def test_a_tenant_is_gone_after_a_kill_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = folder / "salt"
    secret.write_text(SALT + "\n")
    with serving(folder) as (socket, process):
        engine = connect(socket)
        save_all(engine)
        assert main(["evict", "--socket", socket, "--salt-file", str(secret)]) == 0
        assert (
            capsys.readouterr().out
            == "6 chunks evicted from 1 namespace: 24 KiB of host memory and 24 KiB on disk\n"
        )
        assert found(engine) == [3, 0, 0, 3]
        process.kill()
        process.wait()
    with serving(folder) as (socket, _):
        assert found(connect(socket)) == [3, 0, 0, 3], (
            "evicted chunks must not be found after a restart"
        )
        assert main(["evict", "--socket", socket, "--salt", SALT]) == 0
        assert capsys.readouterr().out == "no chunks have this salt\n"
        assert main(["evict", "--socket", socket, "--salt", "another", "--host-only"]) == 0
        assert capsys.readouterr().out == "no chunks in host memory have this salt\n"


@pytest.mark.parametrize(
    ("found", "status"), [({"in_use": 3}, 0), ({"complete": False}, 1), ({"chunks": 1}, 0)]
)
def test_empty_is_reported_only_if_it_is_known(
    found: dict[str, object],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing = {
        "namespaces": 1,
        "chunks": 0,
        "host_bytes": 0,
        "disk_bytes": 0,
        "in_use": 0,
        "complete": True,
    }
    monkeypatch.setattr(_core, "server_evict", lambda *_, **__: nothing | found)
    assert main(["evict", "--socket", "/nowhere", "--salt", SALT, "--host-only"]) == status
    assert "evicted from 1 namespace" in capsys.readouterr().out


def test_models_without_engines_are_evicted_on_disk_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(folder) as (socket, process):
        for nth in (1, 2):
            save_all(connect(socket, nth), nth)
        process.terminate()
        process.wait()
    with serving(folder) as (socket, _):
        done = _evict(socket, ["--salt-file", "-", "--json", "--namespace", "02"], SALT)
        assert json.loads(done.stdout) == {
            "namespaces": 1,
            "chunks": 6,
            "host_bytes": 0,
            "disk_bytes": 6 * FRAME,
            "in_use": 0,
            "complete": True,
        }
        one, other = connect(socket, 1), connect(socket, 2)  # keeps both namespaces open
        assert (found(one, 1), found(other, 2)) == ([3, 3, 3, 3], [3, 0, 0, 3])
        assert main(["evict", "--socket", socket, "--salt", SALT, "--namespace", "3"]) == 2
        assert (
            "no namespace id starts with 3; use --namespace with one of: 0101010101010101, 02"
            in capsys.readouterr().err
        )


def _evict(socket: str, more: list[str], stdin: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "kvloft.cli", "evict", "--socket", socket, *more]
    return subprocess.run(
        argv, input=stdin, capture_output=True, text=True, timeout=120, check=True
    )


def test_evict_host_only_keeps_the_disk(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(folder) as (socket, _):
        engine = connect(socket)
        save_all(engine)
        lease = engine.acquire(chain_of(1, None, None))
        assert main(["evict", "--socket", socket, "--host-only"]) == 0
        said = capsys.readouterr().out
        assert (
            said
            == "9 chunks evicted from 1 namespace: 36 KiB of host memory; 3 in use, not evicted\n"
        )
        assert lease.poll() == (3, 0)
        assert main(["status", "--socket", socket]) == 0
        assert "9 chunks removed by `kvloft evict`" in capsys.readouterr().out
        assert found(engine) == [3, 3, 3, 3]


def test_the_log_has_the_tag_instead_of_the_salt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(folder) as (socket, process):
        save_all(connect(socket))
        assert main(["evict", "--socket", socket, "--salt", SALT, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["in_use"] == 0
        process.terminate()
        log = process.communicate(timeout=120)[0]
    tag = _core.root_key(bytes(32), None, SALT)[-8:].hex()
    assert f"kvloft evict: evicted 6 chunks of tenant {tag} in namespace 0101010101010101\n" in log
    assert SALT not in log


@pytest.mark.parametrize("option", ["--salt", "--namespace"])
def test_bytes_that_are_no_text_are_a_wrong_argument(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evict", "--socket", "/nowhere", option, "\udcff"])
    assert f"argument {option}: expected UTF-8" in capsys.readouterr().err


def test_a_missing_server_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evict", "--socket", str(folder / "kv.sock"), "--salt", SALT]) == 1
    assert capsys.readouterr().err.startswith("kvloft: cannot connect to a kvloft server at")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "select a tenant with --salt-file or --salt, or use --host-only"),
        (["--salt", ""], "the salt is empty"),
        (["--salt-file", "{folder}/none"], "cannot be read (No such file or directory)"),
        (["--salt-file", "{folder}/newline"], "the salt is empty"),
        (["--salt-file", "{folder}/latin"], "the salt is not valid UTF-8"),
    ],
)
def test_a_mistake_evicts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    (folder / "newline").write_text("\n")
    (folder / "latin").write_bytes(b"\xe9")
    assert (
        main(["evict", "--socket", "/nowhere", *(part.format(folder=folder) for part in argv)]) == 2
    )
    assert said in capsys.readouterr().err
