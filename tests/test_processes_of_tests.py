"""Tests that end early leave no process behind."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

START = "import pathlib, signal, sys; from e2e.client import Zygote"
START += "; print(Zygote(pathlib.Path(sys.argv[1]))._process.pid, flush=True); signal.pause()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_zygote_ends_with_the_tests_that_started_it(tmp_path: Path, number: int) -> None:
    """Also if they end before it has begun to run."""
    command = [sys.executable, "-c", START, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as tests:
        assert tests.stdout is not None
        zygote = os.pidfd_open(int(tests.stdout.readline()))
        tests.send_signal(number)
    try:
        assert select.select([zygote], [], [], 60.0)[0], "it waits for tests that have ended"
    finally:
        signal.pidfd_send_signal(zygote, signal.SIGKILL)
        os.close(zygote)
