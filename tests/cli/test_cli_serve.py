"""Tests `kvloft serve` and `kvloft status`: their output for users and for scripts, and their
errors.
"""

import contextlib
import fcntl
import json
import os
import pty
import pwd
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvloft import _core
from kvloft.cli import connection, serve
from kvloft.cli.__main__ import main
from kvloft.cli.daemon import Log
from kvloft.errors import StoreError


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        yield Path(folder)


def test_serves_until_a_signal_and_then_has_everything_on_disk(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket, disk = folder / "run" / "kv.sock", folder / "disk"
    argv = [
        "serve",
        "--socket",
        str(socket),
        "--host-size",
        "1MiB",
        "--disk-path",
        str(disk),
        "--disk-size",
        "1MiB",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvloft.cli", *argv], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert f"is listening on unix:{socket}: host 1 MiB, disk {disk} up to 1 MiB" in first
        assert main(["status", "--socket", str(socket)]) == 0
        shown = re.sub(r"[0-9.]+ [A-Z]iB free", "FREE", capsys.readouterr().out)
        assert shown == (
            f"The kvloft server at unix:{socket} is healthy.\n"
            "host memory: 0 B of 1 MiB (0.0%) used\n"
            "disk: 0 B of 1 MiB (0.0%) in files; its file system has FREE\n"
            f"disk path: {disk}\n"
            "engines: 0 connected\n"
            "hit rate: no lookups yet\n"
            "No engine has connected yet, so no memory is in use.\n"
        )
        engine = _core.Session.connect(
            str(socket), frame_bytes=4096, namespace=bytes(32), timeout_s=60.0
        )
        chain = _core.KeyChain(bytes(32), block_tokens=1)
        chain.append_tokens([1, 2, 3])
        (chunks,), _ = engine.reserve([(chain, (), 0, 0, 3, [[4, 5, 6]])])
        assert chunks is not None
        engine.settle(chunks.tickets())
        assert main(["status", "--socket", str(socket), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        (space,) = shown["namespaces"]
        assert (space["namespace"], space["stats"]["frames_visible"], len(space["engines"])) == (
            "00" * 32,
            3,
            1,
        )
        assert main(["status", "--socket", f"unix:{socket}"]) == 0
        out = capsys.readouterr().out
        assert "12 KiB" in out
        assert f"process {engine_pid()}" in out
        process.send_signal(signal.SIGTERM)
        process.send_signal(
            signal.SIGINT
        )  # timeout(1) also sends two signals: one to the process and one to its process group
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert rest.splitlines()[-1].endswith("stopped")
    finally:
        process.kill()
        process.wait()
    assert list(socket.parent.iterdir()) == [], "the socket or its lock file was left behind"
    assert _core.disk_inspect(str(disk))[0]["chunks"] == 3
    assert main(["status", "--socket", str(socket)]) == 1
    assert capsys.readouterr().err.startswith("kvloft: cannot connect to a kvloft server at")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_each_signal_that_ends_it_leaves_the_last_writes_on_disk(
    number: signal.Signals, folder: Path
) -> None:
    with served(folder) as (process, socket):
        engine = _core.Session.connect(
            socket, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0
        )
        assert save(engine, range(200)) == 200
        process.send_signal(number)
        rest, _ = process.communicate(timeout=120)
        assert process.returncode == 0 and rest.splitlines()[-1].endswith("stopped"), rest
        engine.close()
    assert _core.disk_inspect(str(folder / "disk"))[0]["chunks"] == 200


def test_a_closing_terminal_ends_the_server_after_its_last_writes(folder: Path) -> None:
    """When the terminal closes, the kernel sends SIGHUP, and writing output fails."""
    ours, its = pty.openpty()
    try:
        with served(
            folder,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=take_terminal,
        ) as (
            process,
            socket,
        ):
            until_it_listens(socket)
            engine = _core.Session.connect(
                socket, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0
            )
            assert save(engine, range(3)) == 3
            os.close(its)
            os.close(ours)
            its = ours = -1
            assert process.wait(timeout=120) == 0
            engine.close()
    finally:
        for file in (ours, its):
            if file >= 0:
                os.close(file)
    assert _core.disk_inspect(str(folder / "disk"))[0]["chunks"] == 3


def test_nohup_is_heeded(folder: Path) -> None:
    with served(folder, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (
        process,
        _,
    ):
        (ignored,) = re.findall(
            r"^SigIgn:\s*([0-9a-f]+)$",
            Path(f"/proc/{process.pid}/status").read_text(),
            re.MULTILINE,
        )
        assert int(ignored, 16) & 1 << signal.SIGHUP - 1


@pytest.mark.parametrize("is_background", [False, True])
def test_a_second_server_on_a_disk_warns_at_its_start(folder: Path, is_background: bool) -> None:
    disk, log = folder / "disk", folder / "run" / "second.log"
    with served(folder) as (first, _):
        trouble = (
            f"disk_path {disk} is in use by process {first.pid}: stop it or set a different "
            "disk_path"
        )
        warning = f"kvloft: warning: {trouble}; using host memory only and retrying\n"
        first_line = f"host 4 MiB, disk {disk} not in use, retrying ({trouble})\n"
        more = ["--linger", "1s", "--background", str(log)] if is_background else []
        with served(
            folder,
            "second",
            more,
            stderr=subprocess.PIPE,
            wanted="" if is_background else "is listening on",
        ) as (
            second,
            socket,
        ):
            if is_background:
                out, err = second.communicate(timeout=120)
                with ended(int(out.split()[1])):
                    assert (second.returncode, err) == (0, warning)
                    assert log.read_text().splitlines(keepends=True)[0].endswith(first_line)
                return
            said = _core.server_status(socket)["stats"]["server_disk_unused"]
            second.terminate()
            _, err = second.communicate(timeout=120)
            assert (said, err) == (1, warning)


def test_the_first_line_does_not_name_a_disk_that_is_not_used(folder: Path) -> None:
    (folder / "disk").mkdir()
    (folder / "disk").chmod(0o777)
    with served(folder, stderr=subprocess.STDOUT, wanted="kvloft: warning: ") as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline().endswith(
            f"host 4 MiB, disk {folder}/disk not in use, retrying\n"
        )
        process.terminate()
        rest, _ = process.communicate(timeout=120)
        assert "chmod" not in rest, "must be logged once if both streams go to the same file"


@pytest.mark.parametrize("is_stderr_full", [False, True])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_unwritable_log_is_reported_once_and_ends_no_server(
    is_stderr_full: bool, unbuffered: str, folder: Path
) -> None:
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        err = full if is_stderr_full else subprocess.PIPE
        with served(folder, stdout=full, stderr=err, env=env) as (process, socket):
            until_it_listens(socket)
            engine = _core.Session.connect(
                socket, frame_bytes=4096, namespace=bytes(32), timeout_s=60.0
            )
            assert save(engine, range(3)) == 3
            process.terminate()
            said = process.communicate(timeout=120)[1]
            assert process.returncode == 0
            engine.close()
    assert _core.disk_inspect(str(folder / "disk"))[0]["chunks"] == 3
    lost = (
        "kvloft: warning: cannot write the log (No space left on device); the server "
        "continues without it\n"
    )
    assert said == (None if is_stderr_full else lost)


def test_a_log_continues_after_the_disk_has_space(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def __init__(self) -> None:
            self.is_full, self.lines = True, list[str]()

        def write(self, text: str) -> None:
            if self.is_full:
                raise OSError(28, "No space left on device")
            self.lines.append(text)

        def flush(self) -> None:
            pass

    out, log = Full(), Log()
    monkeypatch.setattr("sys.stdout", out)
    log.tell("one", "two")
    out.is_full = False
    log.tell("three")
    assert re.fullmatch(
        r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2} three\n", "".join(out.lines)
    )
    assert capsys.readouterr().err.count("cannot write the log") == 1


@pytest.mark.parametrize("is_one_place", [False, True])
def test_a_reason_is_logged_once_for_both_logs(is_one_place: bool, folder: Path) -> None:
    (folder / "disk").mkdir()
    (folder / "disk").chmod(0o777)
    with open(folder / "err", "w+") as err:
        stderr = subprocess.STDOUT if is_one_place else err
        with served(folder, stderr=stderr, wanted="") as (process, socket):
            until_it_listens(socket)
            process.terminate()
            out = process.communicate(timeout=120)[0]
        err.seek(0)
        texts = [out] if is_one_place else [out, err.read()]
    assert [text.count("is writable by other users") for text in texts] == [1] * len(texts), texts


@pytest.mark.parametrize(("make", "status"), [("file", 2), ("open", 0), ("denied", 0)])
def test_only_a_disk_path_that_can_never_be_one_stops_the_start(
    make: str, status: int, folder: Path
) -> None:
    disk = folder / "disk"
    if make == "file":
        disk.touch()
    else:
        disk.mkdir()
        disk.chmod(0o777 if make == "open" else 0o700)
    argv = [
        "serve",
        "--socket",
        str(folder / "run" / "kv.sock"),
        "--host-size",
        "1MiB",
        "--disk-path",
        str(disk),
        "--linger",
        "0s",
    ]
    denied = "import os; os.access = lambda *_: False" if make == "denied" else ""
    code = [
        "import sys",
        "from kvloft.cli import serve",
        "from kvloft.cli.__main__ import main",
        "serve.FIRST_ENGINE_S = 0.0",
    ]
    code += [denied, f"sys.exit(main({argv!r}))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, "is listening on" in done.stdout) == (status, status == 0), done.stderr


def take_terminal() -> None:
    without_nohup()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def until_it_listens(socket: str) -> None:
    for _ in range(1200):
        with contextlib.suppress(StoreError):
            _core.server_status(socket)
            return
        time.sleep(0.05)
    pytest.fail("the server never listened")


def without_nohup() -> None:
    """Undo `nohup`, because these tests can run under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def served(
    folder: Path, name: str = "kv", argv: Sequence[str] = (), wanted: str = "listening", **more: Any
) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """Start a server with a disk tier in ``folder``.

    If the server's output is a pipe, wait for its first line, which must contain ``wanted``.
    """
    socket = str(folder / "run" / f"{name}.sock")
    sizes = ["--host-size", "4MiB", "--disk-path", str(folder / "disk"), "--disk-size", "4MiB"]
    keywords = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": without_nohup} | more
    (folder / "run").mkdir(mode=0o700, exist_ok=True)
    whole = [sys.executable, "-m", "kvloft.cli", "serve", "--socket", socket, *sizes, *argv]
    with subprocess.Popen(whole, **keywords) as process:
        try:
            if process.stdout is not None and wanted:
                assert wanted in process.stdout.readline()
            yield process, socket
        finally:
            process.kill()


def save(engine: _core.Session, tokens: Iterable[int]) -> int:
    chain, tokens = _core.KeyChain(bytes(32), block_tokens=1), list(tokens)
    chain.append_tokens(tokens)
    (chunks,), _ = engine.reserve(
        [(chain, (), 0, 0, len(tokens), [[token + 1 for token in tokens]])]
    )
    assert chunks is not None
    return engine.settle(chunks.tickets())[0]


def test_a_background_server_is_reported_with_process_socket_and_log(folder: Path) -> None:
    socket, log = folder / "run" / "kv.sock", folder / "run" / "kv.log"
    argv = [
        "serve",
        "--socket",
        str(socket),
        "--host-size",
        "1MiB",
        "--linger",
        "1s",
        "--background",
        str(log),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "kvloft.cli", *argv], capture_output=True, text=True, timeout=120
    )
    assert (
        done.stderr
        == f"kvloft: created {folder}/run for the socket, accessible only to this user\n"
    )
    assert (folder / "run").stat().st_mode & 0o777 == 0o700
    said = re.fullmatch(
        rf"process ([0-9]+) is listening in the background on unix:{socket}; its log is {log}\n",
        done.stdout,
    )
    assert said is not None and done.returncode == 0, done.stdout
    with ended(int(said[1])):
        assert "host 1 MiB, no disk" in log.read_text() and _core.server_status(str(socket))
    assert "discarding all chunks in memory because there is no disk tier" in log.read_text()


@contextlib.contextmanager
def ended(pid: int) -> Iterator[None]:
    """Stop a background server at the end of the block and wait until it exits.

    Uses a pidfd, because the server is not a child of this process.
    """
    process = os.pidfd_open(pid)
    try:
        yield
        signal.pidfd_send_signal(process, signal.SIGTERM)
        assert select.select([process], [], [], 120)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def engine_pid() -> int:
    return int(Path("/proc/self").resolve().name)


def test_a_second_server_on_a_socket_ends_with_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = str(folder / "run" / "kv.sock")
    _first = _core.Server(socket, host_bytes=1 << 20)
    done = subprocess.run(
        [sys.executable, "-m", "kvloft.cli", "serve", "--socket", socket],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvloft: another kvloft server is listening on")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "status"])
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "use --socket PATH, or set KVLOFT_SERVER=unix:PATH."),
        (
            ["--socket", "unix:" + "x" * 200],
            f"--socket 'unix:{75 * 'x'}...': expected a path of 1 to 107 bytes.",
        ),
        (["--socket", "\udcff"], r"--socket '\udcff': expected a path of 1 to 107 bytes."),
        (["--socket", ""], "--socket '': expected a path of 1 to 107 bytes."),
        (
            ["--socket", "auto"],
            "--socket auto: expected a path; to use the automatic server, set KVLOFT_SERVER=auto.",
        ),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    argv: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(connection, "SERVICE_SOCKET", "/nowhere/kvloft.sock")
    monkeypatch.setattr(connection, "auto_socket", lambda: "/nowhere/auto.sock")
    assert main([command, *argv]) == (1 if command == "status" and not argv else 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvloft: ") and said.removesuffix(".") in captured.err
    assert captured.err.count("\n") == 1


def test_a_wrong_size_is_reported_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--socket", "/tmp/x.sock", "--host-size", "many"]) == 2
    assert capsys.readouterr().err.startswith(
        'kvloft: host_size = "many" (command line) is not allowed'
    )


def test_more_host_memory_than_is_left_stops_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1, because a later attempt may find enough memory."""
    monkeypatch.setattr(serve, "available_bytes", lambda: 1 << 20)
    assert main(["serve", "--socket", f"{folder}/run/kv.sock", "--host-size", "2MiB"]) == 1
    assert capsys.readouterr().err == (
        "kvloft: host_size = 2MiB (command line) is more than the 1 MiB that this machine or "
        "container has left; lower it, or free memory and retry.\n"
    )
    assert not list(folder.iterdir())


@pytest.mark.parametrize("is_from_environment", [False, True])
def test_folders_above_the_sockets_are_not_made(
    is_from_environment: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    socket = f"{folder}/typed/wrong/kv.sock"
    if is_from_environment:
        monkeypatch.setenv("KVLOFT_SERVER", socket)
    assert (
        main(
            ["serve", "--host-size", "1MiB", *([] if is_from_environment else ["--socket", socket])]
        )
        == 2
    )
    given = (
        f"server = unix:{socket} (environment variable KVLOFT_SERVER)"
        if is_from_environment
        else f"--socket {socket}"
    )
    assert (
        capsys.readouterr().err
        == f"kvloft: {given}: {folder}/typed does not exist; create it, or use another path.\n"
    )
    assert not list(folder.iterdir())


def test_a_folder_of_the_log_is_not_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = folder / "typed" / "kv.log"
    assert (
        main(
            [
                "serve",
                "--host-size",
                "1MiB",
                "--socket",
                f"{folder}/kv.sock",
                "--background",
                str(log),
            ]
        )
        == 2
    )
    said = (
        f"kvloft: --background {log}: cannot write the file ({folder}/typed does not exist); "
        "use a different file.\n"
    )
    assert capsys.readouterr().err == said
    assert not list(folder.iterdir())


@pytest.mark.parametrize("argv", [["serve", "--linger"], ["status", "--watch", "--interval"]])
def test_minutes_are_written_min(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main([*argv, "5m", "--socket", "/tmp/x/kv.sock"]) == 2
    assert "uses the ambiguous unit m; did you mean 5min?" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x=10", "3f", "3f=", "=10", "3f=x"])
def test_an_invalid_share_is_reported(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--socket", "/tmp/x.sock", "--share", text]) == 2
    assert "expected NAMESPACE=PERCENT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (
            ["--socket", "/tmp/kv.sock"],
            (
                r"the socket directory /tmp is writable by other users \(mode 1777\); use "
                "--socket /tmp/kvloft/kv.sock, and kvloft will create a private directory for it"
            ),
        ),
        (
            ["--socket", "{folder}/run/kv.sock", "--share", "3f=60", "--share", "4=41%"],
            "--share: shares must be .* add up to at most 100, not 101",
        ),
        (
            [
                "--socket",
                "{folder}/run/kv.sock",
                "--share",
                "3fa=6",
                "--share",
                "4=4",
                "--share",
                "3f=4",
            ],
            "--share: two shares overlap: 3f covers 3fa",
        ),
        (["--socket", "{folder}/file"], "is not a socket; set --socket to a different path"),
        (
            ["--socket", "{folder}/run/kv.sock", "--metrics", "nohost.invalid:9180"],
            "use another host or port",
        ),
    ],
)
def test_a_place_that_will_not_do_is_one_sentence(
    more: list[str], wanted: str, folder: Path
) -> None:
    (folder / "file").touch()
    (folder / "run").mkdir()
    argv = ["serve", "--host-size", "1MiB", *(part.format(folder=folder) for part in more)]
    done = subprocess.run(
        [sys.executable, "-m", "kvloft.cli", *argv], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(rf"kvloft: [^\n]*{wanted}[^\n]*\n", done.stderr), done.stderr
    assert "is listening on" not in done.stdout


def test_a_server_without_linger_ends_with_the_last_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looks_left([([1], 1), ([1], 1), ([], 1)], monkeypatch) == 0


def test_an_engine_that_came_and_went_between_two_looks_was_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looks_left([([], 1), ([], 1)], monkeypatch) == 0, (
        "it must not wait a minute for the first engine"
    )
    assert looks_left([([], 1), ([], 2), ([], 2), ([], 2)], monkeypatch) == 1, (
        "the second engine is counted as well"
    )


def looks_left(looks: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a server without a linger time until it exits. ``looks`` contains the server's successive
    statuses (engines, number of joins). Return the number of statuses that were not read.
    """

    class Watched:
        def take_events(self) -> list[str]:
            return []

        def status(self) -> dict[str, object]:
            engines, num_joined = looks.pop(0)
            return {"namespaces": [{"engines": engines}], "stats": {"server_joined": num_joined}}

    monkeypatch.setattr(serve, "LOOK_EVERY_S", 0.001)
    serve._wait(threading.Event(), Watched(), 0.0, Log())
    return len(looks)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("", "expected one node for each rank"),
        ("0,", "expected one node for each rank"),
        ("0;1", "expected one node for each rank"),
        (
            "0,63",
            (
                "--numa: NUMA node 63 does not exist or is not allowed for this process; allowed "
                "nodes: 0"
            ),
        ),
    ],
)
def test_a_numa_node_that_cannot_be_is_one_sentence(
    nodes: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["serve", "--socket", str(folder / "kv.sock"), "--host-size", "1MiB", "--numa", nodes])
        == 2
    )
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert not list(folder.iterdir())


def test_nodes_of_ranks_are_the_servers(folder: Path) -> None:
    assert serve.nodes("0,0") == [0, 0] and serve.nodes(None) == []
    socket = str(folder / "run" / "kv.sock")
    server = _core.Server(socket, host_bytes=1 << 20, numa=[0, 0])
    engine = _core.Session.connect(socket, frame_bytes=8192, namespace=bytes(32), timeout_s=60.0)
    (said,) = [event for event in server.take_events() if "memory" in event]
    assert said == "host memory is on NUMA nodes 0, 0" or said.endswith(
        "; leaving NUMA placement to the kernel"
    )
    engine.close()
    server.close(0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_how_to_run_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.chmod(0o755)
    other_uid, socket = 65534, f"{folder}/run/kv.sock"
    server = _core.Server(socket, host_bytes=1 << 20)
    assert exit_status_as(other_uid, ["status", "--socket", socket]) == 1
    user = pwd.getpwuid(other_uid).pw_name
    assert capsys.readouterr().err == (
        f"kvloft: user {user} cannot open {socket}; run this as the socket's owner: sudo -u root "
        "kvloft status\n"
    )
    server.close(0.0)


def exit_status_as(uid: int, argv: list[str]) -> int:
    """Run a command in this process with a different effective user."""
    os.seteuid(uid)
    try:
        return main(argv)
    finally:
        os.seteuid(0)
