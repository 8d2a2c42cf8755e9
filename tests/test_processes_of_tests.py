"""Checks that interrupted tests leave no process behind."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
WAIT_S = 60.0 * float(os.environ.get("TEST_PACE", "1"))
START = "import pathlib, signal, sys; from e2e.client import Zygote"
START += "; print(Zygote(pathlib.Path(sys.argv[1]))._process.pid, flush=True); signal.pause()"
COMMAND = """#!/usr/bin/env bash
[[ $1 == -c || $FIRST != env.sh && $0 == */env.sh ]] && exit 0
echo "$(basename "$0")" >&"$STARTED"
(trap 'trap - TERM' TERM && sleep 1000; sleep 1000) &
sleep 1000
"""
"""A script that replaces each command of `make test`. It starts a child that survives the first
SIGTERM, and then sleeps itself.
"""
STUBBORN_COMMAND = """#!/usr/bin/env bash
[[ $1 == -c || $0 == */env.sh ]] && exit 0
read -r _ _ _ _ _ suite _ <"/proc/$$/stat"
end() {
  [[ -e bin/cargo.signaled && -e .venv-0.32.0/bin/python.signaled ]] && exit
  touch "$0.signaled"
  kill "$suite"
}
trap end TERM
echo "$(basename "$0")" >&"$STARTED"
while true; do sleep 0.1; done
"""
"""A script that replaces each command of suite.sh. It exits when it is signaled after both parallel
phases have been signaled. Until then, each signal makes it send another signal to suite.sh, whose
PID is the session ID.
"""
ENGINE_TEST = """
import contextlib, os, signal, subprocess, time
import pytest

@contextlib.contextmanager
def engine():
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True, close_fds=False)
    try:
        yield
    finally:
        child = os.fork()
        while child == 0:
            time.sleep(0.01)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, signal.SIGTERM)
            time.sleep(0.01)
        try:
            process.wait(0)
        except subprocess.TimeoutExpired:
            signal.raise_signal(signal.SIGTERM)
            process.kill()
            process.wait()

@pytest.fixture(scope="module")
def shared_engine():
    with engine():
        yield

class Deleted:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def test_engines(shared_engine):
    Deleted()
    with engine():
        os.write(int(os.environ["STARTED"]), b"engine\\n")
        time.sleep(1000)
"""
"""A test that starts children in new sessions, as engines do. Only its cleanup can terminate them.

The first SIGTERM raises an exception that Python ignores, because it is raised in `__del__`. During
each cleanup, the signal is repeated. The cleanup also terminates a process that it has forked.
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_zygote_ends_with_the_tests_that_started_it(tmp_path: Path, number: int) -> None:
    """The zygote must also exit if the tests exit before the zygote has started to run."""
    command = [sys.executable, "-c", START, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as tests:
        assert tests.stdout is not None
        zygote = os.pidfd_open(int(tests.stdout.readline()))
        tests.send_signal(number)
    try:
        assert select.select([zygote], [], [], 60.0)[0], (
            "the zygote waits for tests that have exited"
        )
    finally:
        signal.pidfd_send_signal(zygote, signal.SIGKILL)
        os.close(zygote)


@pytest.mark.parametrize("first", ["env.sh", "cargo", "python"])
def test_make_test_that_is_ended_ends_all_its_processes(tmp_path: Path, first: str) -> None:
    """``first`` is the command that is running when `make test` is terminated. This command belongs
    to the first phase or to one of two parallel phases.
    """
    replace_commands(tmp_path, COMMAND)
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    search_path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert_all_end(["make", "test"], tmp_path, {first}, FIRST=first, PATH=search_path)


def test_a_suite_that_is_signaled_again_ends_all_its_processes(tmp_path: Path) -> None:
    replace_commands(tmp_path, STUBBORN_COMMAND)
    search_path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    argv = ["scripts/suite.sh", "all"]
    assert_all_end(argv, tmp_path, {"cargo", "python"}, LANES="2", PATH=search_path)


def replace_commands(folder: Path, command: str) -> None:
    """Copy suite.sh to ``folder`` and replace all commands that it runs."""
    for name in ("scripts/env.sh", "bin/cargo", ".venv-0.32.0/bin/python"):
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_text(command)
        path.chmod(0o755)
    shutil.copy(REPOSITORY / "scripts" / "suite.sh", folder / "scripts")


def test_tests_that_are_ended_clean_up(tmp_path: Path) -> None:
    (tmp_path / "test_engine.py").write_text(ENGINE_TEST)
    (tmp_path / "conftest.py").symlink_to(REPOSITORY / "tests" / "conftest.py")
    options = ["-p", "no:cacheprovider", "-o", "timeout=600", "--rootdir=."]
    argv = [sys.executable, "-m", "pytest", *options, "test_engine.py"]
    assert_all_end(argv, tmp_path, {"engine"})


def assert_all_end(argv: list[str], folder: Path, started: set[str], **env: str) -> None:
    """Run ``argv`` until its descendants have written all lines in ``started``, then terminate
    ``argv`` with SIGTERM.

    Check that no descendant remains, based on a pipe that all descendants keep open.
    """
    reader, writer = os.pipe()
    pipe = os.readlink(f"/proc/self/fd/{writer}")
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=os.environ | env | {"STARTED": str(writer)},
            pass_fds=[writer],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    os.close(writer)
    lines = b""
    try:
        while not started <= set(lines.decode().split("\n")[:-1]):
            piece = read_in_time(reader)
            assert piece, log.read_text()
            lines += piece
        process.terminate()
        process.wait(WAIT_S)
        while read_in_time(reader):
            pass
    finally:
        os.close(reader)
        for pid in holders(pipe):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()


def read_in_time(pipe: int) -> bytes:
    """Return the next bytes in the pipe, or b"" once no process has the other end open."""
    assert select.select([pipe], [], [], WAIT_S)[0], "a process is still running"
    return os.read(pipe, 4096)


def holders(pipe: str) -> list[int]:
    """Return the processes that have the pipe open."""
    found = []
    for fds in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) == pipe for fd in fds.iterdir()):
                found.append(int(fds.parent.name))
    return found
