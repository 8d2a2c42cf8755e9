"""Tests the start, the inherited resources and the exit of a server with `server: auto`, using
processes that behave like engines.
"""

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvloft import _core, auto
from kvloft.cli import daemon
from kvloft.config.sources import load_config
from kvloft.config.table import Config
from kvloft.errors import ConfigError, StoreError

ENGINE = """
import logging, os, signal, sys, time
from kvloft import _core
from kvloft.auto import look_after
from kvloft.config.sources import load_config

# SIGINT is ignored if a shell started the tests in the background
signal.signal(signal.SIGINT, signal.default_int_handler)
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
for name in sys.argv[2:]:
    os.set_inheritable(os.open(name, os.O_RDWR), True)
extra = eval(sys.argv[1])
config = load_config({"server": "auto", "server_linger": "1s", **extra})
leave = look_after(config, logging.getLogger())
store = _core.Session.connect(config.socket, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0)
print("ready", flush=True)
while True:
    time.sleep(0.05)
    store.renew()
"""


def until(is_so: Callable[[], Any], otherwise: str) -> Any:
    deadline = time.monotonic() + 120
    while not (found := is_so()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
    return found


class Host:
    """A user's socket directory, with its engines and servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "kvloft" / "auto.sock"
        self.log = self.socket.with_suffix(".log")
        self._engines: list[subprocess.Popen[str]] = []
        self._leaves: list[Callable[[], None]] = []

    def start(self, *names: Path, **extra: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", ENGINE, repr({"host_size": "1MiB"} | extra), *map(str, names)]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder), "KVLOFT_DISK_THREADS": "3"}
        engine = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            start_new_session=True,
            close_fds=False,
        )
        self._engines.append(engine)
        return engine

    def look_after(self, config: Config) -> Callable[[], None]:
        """Watch the server as an engine in this process would."""
        leave = auto.look_after(config, logging.getLogger())
        self._leaves.append(leave)
        return leave

    def servers(self) -> list[int]:
        """Return the ids of the processes that serve this socket."""
        processes = [process for process in Path("/proc").iterdir() if process.name.isdecimal()]
        return [int(process.name) for process in processes if self._serves(process)]

    def _serves(self, process: Path) -> bool:
        try:
            argv = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"serve" in argv and f"--socket={self.socket}".encode() in argv

    def num_engines(self) -> int:
        try:
            return sum(
                len(space["engines"])
                for space in _core.server_status(str(self.socket))["namespaces"]
            )
        except StoreError:
            return 0

    def end(self) -> None:
        for leave in self._leaves:
            leave()
        for engine in self._engines:
            engine.kill()
            engine.communicate()
        for thread in watchers():
            thread.join(120)
            assert not thread.is_alive(), "the thread would log a warning during a later test"
        for pid in self.servers():
            os.kill(pid, signal.SIGKILL)


def watchers() -> list[threading.Thread]:
    """Return the threads that watch servers in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "kvloft-server"]


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        host = Host(Path(folder))
        yield host
        host.end()


def lines_until_ready(engine: subprocess.Popen[str]) -> list[str]:
    assert engine.stdout is not None
    lines: list[str] = []
    for line in engine.stdout:
        if line == "ready\n":
            return lines
        lines.append(line.strip())
    raise AssertionError("\n".join(lines))


@pytest.mark.short
def test_engines_that_start_at_once_share_one_server_that_ends_after_them(host: Host) -> None:
    engines = [host.start() for _ in range(3)]
    said = [lines_until_ready(engine) for engine in engines]
    started = [line for lines in said for line in lines if "started a server at" in line]
    assert len(started) == 1
    assert str(host.log) in started[0]
    until(lambda: host.num_engines() == 3, "not all engines are connected")
    (server,) = host.servers()
    assert os.getsid(server) == server, "the server must not be in an engine's session"
    assert Path(f"/proc/{server}/stat").read_text().rpartition(") ")[2].split()[1] not in {
        str(e.pid) for e in engines
    }
    for engine in engines[:2]:
        engine.kill()
        engine.wait()
    until(lambda: host.num_engines() == 1, "the exit of the engines was not detected")
    time.sleep(2)  # longer than the linger time
    assert host.servers() == [server], "one engine is still running"
    os.killpg(engines[2].pid, signal.SIGINT)
    engines[2].wait()
    until(lambda: not host.servers(), "the server does not exit")
    assert "no engine has been connected for 1 s" in host.log.read_text()
    assert host.log.read_text().splitlines()[-1].endswith("stopped")
    assert host.log.stat().st_mode & 0o077 == 0
    assert not host.socket.exists()


@pytest.mark.short
def test_a_server_inherits_neither_descriptors_nor_settings_nor_the_engines_end(host: Host) -> None:
    marker = host.folder / "as a GPU"
    marker.touch()
    engine = host.start(marker, server_linger="5min")  # the server outlives its engine
    lines_until_ready(engine)
    (server,) = host.servers()
    descriptors = Path(f"/proc/{server}/fd")
    targets, own = (
        {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        for pid in (server, engine.pid)
    )
    assert str(marker) not in targets
    assert engine.stdout is not None
    assert os.readlink(f"/proc/self/fd/{engine.stdout.fileno()}") not in targets, (
        "the server keeps a pipe of its engine open"
    )
    shared = {target for target in targets & own if target.startswith("pipe:")}
    assert len(shared) <= 1, "only the engine's lifeline may be shared"
    assert {os.readlink(descriptors / number) for number in "12"} == {str(host.log)}
    assert os.readlink(f"/proc/{server}/cwd") == "/"
    environ = Path(f"/proc/{server}/environ").read_bytes()
    assert b"KVLOFT_" not in environ
    assert b"--disk-threads=3" in Path(f"/proc/{server}/cmdline").read_bytes()
    os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()
    assert host.servers() == [server]


@pytest.mark.short
def test_a_running_engine_replaces_a_server_that_is_killed(host: Host) -> None:
    engines = [host.start(), host.start()]
    for engine in engines:
        lines_until_ready(engine)
    (server,) = host.servers()
    os.kill(server, signal.SIGKILL)
    until(
        lambda: host.servers() not in ([], [server]) and host.num_engines() == 2,
        "no server replaces it",
    )
    until(lambda: len(host.servers()) == 1, "the second server does not exit")
    until(lambda: not any(map(has_zombies, engines)), "exited processes are not reaped")


def has_zombies(engine: subprocess.Popen[str]) -> bool:
    tasks = Path(
        f"/proc/{engine.pid}/task"
    ).iterdir()  # each thread lists the children that it started
    children = [child for task in tasks for child in (task / "children").read_text().split()]
    return any(
        Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2][0] == "Z" for child in children
    )


def test_an_engine_logs_settings_that_the_running_server_lacks(host: Host) -> None:
    lines_until_ready(host.start())
    disk = str(host.folder / "disk")
    (said,) = lines_until_ready(
        host.start(
            host_size="2MiB", disk_path=disk, disk_size="8MiB", eviction="lru", server_linger="2min"
        )
    )
    assert said == (
        f"kvloft: the server at unix:{host.socket} overrides these engine settings: "
        "host_size = 2MiB (server: 1MiB), "
        f"disk_path = {disk} (server: (none)), eviction = lru (server: adaptive), "
        "server_linger = 120s (server: 1s)"
    )
    assert lines_until_ready(host.start()) == [], "equal settings must not be logged"


def test_a_size_without_a_unit_does_not_warn_in_the_server(host: Host) -> None:
    (said,) = lines_until_ready(host.start(host_size="32000"))
    assert "started a server" in said


def test_disk_sizes_are_compared_if_both_exist(host: Host) -> None:
    disk = str(host.folder / "disk")
    lines_until_ready(host.start(disk_path=disk, disk_size="8MiB"))
    (said,) = lines_until_ready(host.start(disk_path=disk))
    assert said.endswith("overrides these engine settings: disk_size = 64GiB (server: 8MiB)")
    assert lines_until_ready(host.start()) == [], "the engine uses no disk"


def of_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def link(folder: Path) -> None:
    folder.symlink_to("/tmp")


def not_ours(folder: Path) -> None:
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can change the owner of a directory")
    os.chown(folder, 12345, 12345)


@pytest.mark.parametrize("make", [of_others, link, not_ours, Path.touch])
def test_a_directory_that_is_not_private_is_refused(
    make: Callable[[Path], None], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    make(host.folder / "kvloft")
    with pytest.raises(
        ConfigError,
        match=r"must be a directory that this user owns .* no other user can write .*set server to",
    ):
        host.look_after(Config(server="auto"))
    assert host.servers() == []


def test_a_wrong_setting_ends_the_start_as_without_a_server(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    (host.folder / "file").touch()
    config = load_config({"server": "auto", "disk_path": str(host.folder / "file" / "disk")})
    with pytest.raises(ConfigError, match=r"disk_path = .* cannot be a directory"):
        host.look_after(config)


def test_an_engine_computes_and_retries_if_its_server_fails_to_start(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logged: Any
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    config = load_config({"server": "auto", "host_size": "1MiB", "server_linger": "1s"})
    for name, value in {"START_TIMEOUT_S": 30.0, "LOOK_EVERY_S": 0.1, "START_EVERY_S": 0.1}.items():
        monkeypatch.setattr(auto, name, value)
    python = sys.executable
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    tried = list[Path]()
    monkeypatch.setattr(auto, "_wait_for_server", tried.append)
    caplog.set_level(logging.INFO)
    leave = host.look_after(config)
    until(lambda: len(tried) > 2, "the start is not retried")
    (said,) = [record.getMessage() for record in logged()]
    assert said == (
        "kvloft: could not start a server (server = auto); running without the cache until a "
        f"server responds. Run `kvloft serve --socket {host.socket}`, or fix this error: "
        "[Errno 2] No such file or directory: '/nowhere/python'"
    )
    monkeypatch.setattr(sys, "executable", python)
    until(host.servers, "no server is started")
    leave()
    host.end()
    assert [record.getMessage() for record in logged() if record.levelno >= logging.WARNING] == [
        said
    ], "the engine has left"


def test_an_engine_starts_if_the_server_rejects_requests(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may run a different version or have no connections left."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    host.socket.parent.mkdir(mode=0o700)
    server = _core.Server(str(host.socket), host_bytes=1 << 20, max_connections=0)
    with pytest.raises(ConfigError, match="limit of 0 connections"):
        _core.server_status(str(host.socket))
    host.look_after(load_config({"server": "auto", "host_size": "1MiB"}))()
    server.close(0.0)


def test_a_short_linger_is_passed_without_an_exponent(tmp_path: Path) -> None:
    config = load_config({"server": "auto", "server_linger": 0.00005})
    assert "--linger=0.000050s" in auto._command(config, tmp_path / "log")


def test_an_engine_starts_if_its_server_lacks_memory(
    host: Host, monkeypatch: pytest.MonkeyPatch, logged: Any
) -> None:
    """Idle engines release the memory of a killed server in their next step."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    python = host.folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f"exec {sys.executable} -c 'import sys; from kvloft.cli import serve; "
        "serve.available_bytes = lambda: 0; from kvloft.cli.__main__ import main; "
        'sys.exit(main(sys.argv[4:]))\' "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(auto, "_wait_for_server", lambda _: False)
    host.look_after(load_config({"server": "auto", "host_size": "1MiB"}))()
    (said,) = [record.getMessage() for record in logged()]
    assert "is more than the 0 B that this machine or container has left" in said


def test_a_full_disk_ends_no_engines_start(
    host: Host, monkeypatch: pytest.MonkeyPatch, logged: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(SystemExit, match=r"^1$"):
            daemon.in_background(lambda _: 0, host.log, "")
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    monkeypatch.setattr(Path, "mkdir", refuse)
    host.look_after(Config(server="auto"))()
    (said,) = [record.getMessage() for record in logged()]
    assert "cannot create " in said
    assert said.endswith(
        "(No space left on device); running without the cache until a server responds"
    )


def test_a_server_survives_the_death_of_its_parent(host: Host) -> None:
    """The engine kills a parent that takes too long, but the server can still become ready."""
    code = (
        "import os, pathlib, sys, time\n"
        "from kvloft.cli.daemon import in_background\n"
        "log, forked, ready = map(pathlib.Path, sys.argv[1:])\n"
        "parent = os.getpid()\n"
        "def work(begun):\n"
        "    forked.touch()\n"
        "    while os.getppid() == parent: time.sleep(0.01)\n"
        "    begun()\n"
        "    ready.touch()\n"
        "    return 0\n"
        "in_background(work, log, '')"
    )
    log, forked, ready = (host.folder / name for name in ("log", "forked", "ready"))
    parent = subprocess.Popen([sys.executable, "-c", code, *map(str, (log, forked, ready))])
    until(forked.exists, "the server does not start")
    parent.kill()
    parent.wait()
    until(ready.exists, "the server exited with its parent")


def test_the_default_socket_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Config(server="auto").socket == f"{tmp_path}/kvloft/auto.sock"
    assert Config(server="/a.sock").socket == "/a.sock"
    assert Config().socket is None
    own = f"/tmp/kvloft-{os.geteuid()}/auto.sock"
    for elsewhere in ("", "not/absolute", str(tmp_path / "none"), str(tmp_path / ("x" * 90))):
        monkeypatch.setenv("XDG_RUNTIME_DIR", elsewhere)
        assert Config(server="auto").socket == own
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    other = Config(server="auto").socket
    assert other == f"/tmp/kvloft-{os.getuid() + 1}/auto.sock", "`su` keeps another user's variable"


def test_an_engine_keeps_its_socket_path_if_the_runtime_directory_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (run := tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    config = load_config({"server": "auto"}, {})
    run.rename(tmp_path / "gone")
    assert config.socket == f"{run}/kvloft/auto.sock", "the client and the watcher need one path"
    assert replace(config, server=None).socket is None
