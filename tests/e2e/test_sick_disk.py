"""Tests a real engine with a real file system that becomes read-only, freezes or fills up.

The host tier continues to work, every token is correct, the engine can be stopped, and earlier
chunks on disk remain valid.
"""

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .cache_server import until
from .client import PACE, Engine, Req, full_blocks, kvloft, random_ids
from .conftest import Truth
from .ext4 import Ext4, can_mount, mounted

OLD = [Req(random_ids(7000 + i, 130 + 9 * i), max_tokens=8) for i in range(4)]
NEW = [Req(random_ids(7100 + i, 130 + 9 * i), max_tokens=8) for i in range(4)]
FULL_HIT = sum(full_blocks(r.num_prompt_tokens) for r in OLD)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Ext4]:
    if not can_mount():
        pytest.skip("mounting a file system requires root and loop devices")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    with ExitStack() as stack:
        try:
            ext4 = stack.enter_context(mounted(tmp_path / "ext4"))
        except subprocess.CalledProcessError as error:
            if error.cmd[0] != "mount":
                raise
            pytest.skip(f"root cannot mount file systems here, as in most containers: {error}")
        yield ext4


def ask(truth: Truth, engine: Engine, requests: list[Req]) -> int:
    """Run each request, check its tokens, and return the number of external tokens."""
    results = engine.ask_each(*[r.again() for r in requests])
    assert [r.tokens for r in results] == [truth.tokens(r) for r in requests]
    return sum(r.num_external for r in results)


def filled(truth: Truth, start: Callable[..., Engine], folder: Path) -> Engine:
    """Start an engine that has the old prompts in host memory and on disk."""
    engine = start(
        kv_transfer_config=kvloft(folder, disk_size="32MiB", load_timeout="1s"), num_blocks=120
    )
    assert ask(truth, engine, OLD) == 0
    engine.flush()
    return engine


def still_works(truth: Truth, engine: Engine) -> None:
    """Check that prompts in host memory are hits and that saves to host memory still work."""
    assert ask(truth, engine, OLD) == FULL_HIT
    assert ask(truth, engine, NEW) == 0
    assert ask(truth, engine, NEW) == sum(full_blocks(r.num_prompt_tokens) for r in NEW)
    assert ask(truth, engine, OLD) == FULL_HIT


def is_there_after(truth: Truth, start: Callable[..., Engine], folder: Path) -> None:
    """Check that a new engine finds earlier chunks on the repaired disk."""
    engine = start(kv_transfer_config=kvloft(folder, disk_size="32MiB"), num_blocks=120)
    assert ask(truth, engine, OLD) == FULL_HIT
    assert engine.metrics()["vllm:kvloft_load_tokens_disk_total"] == FULL_HIT
    engine.assert_at_rest()
    engine.stop()


def test_a_disk_that_turns_read_only_keeps_good_chunks(
    truth: Truth, start: Callable[..., Engine], disk: Ext4
) -> None:
    engine = filled(truth, start, disk.path / "cache")
    disk.read_only()
    still_works(truth, engine)
    for i in range(10):  # saves more than the tier can hold
        ask(truth, engine, [Req(random_ids(7200 + i, 300), max_tokens=2)])
    engine.stop()
    disk.mount_again()
    is_there_after(truth, start, disk.path / "cache")


def test_a_disk_that_freezes_holds_up_neither_requests_nor_the_stop(
    truth: Truth, start: Callable[..., Engine], disk: Ext4
) -> None:
    engine = filled(truth, start, disk.path / "cache")
    disk.freeze()
    # If the engine hangs, the timer sets `rescued` and thaws the file system, so that the test
    # ends.
    rescued = threading.Event()
    rescue = threading.Timer(100.0 * PACE, lambda: (rescued.set(), disk.thaw()))
    rescue.start()
    try:
        still_works(truth, engine)
        engine.stop()
        assert not rescued.is_set(), "the engine waited for a frozen disk"
    finally:
        rescue.cancel()
        disk.thaw()
    is_there_after(truth, start, disk.path / "cache")


def test_a_full_disk_keeps_what_it_has(
    truth: Truth, start: Callable[..., Engine], disk: Ext4
) -> None:
    engine = filled(truth, start, disk.path / "cache")
    disk.fill()
    still_works(truth, engine)
    engine.stop()
    disk.make_room()
    is_there_after(truth, start, disk.path / "cache")


def test_an_engine_starts_on_a_disk_that_takes_nothing(
    truth: Truth, start: Callable[..., Engine], disk: Ext4
) -> None:
    disk.fill()
    engine = start(
        kv_transfer_config=kvloft(disk.path / "cache", disk_size="32MiB"), num_blocks=120
    )
    assert ask(truth, engine, OLD) == 0
    assert ask(truth, engine, OLD) == FULL_HIT
    until(lambda: "host memory only" in engine.store_log(), "the missing disk was not logged")
    engine.stop()


def test_a_server_starts_with_a_hung_disk_and_uses_it_later(disk: Ext4, tmp_path: Path) -> None:
    # a socket path must be short
    folder, socket = disk.path / "disk", tempfile.mkdtemp(prefix="kv-")
    argv = [
        "--socket",
        f"{socket}/kv.sock",
        "--host-size",
        "1MiB",
        "--disk-path",
        str(folder),
        "--disk-size",
        "1MiB",
    ]
    log = tmp_path / "log"
    disk.freeze()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvloft.cli", "serve", *argv], stdout=out, stderr=out
        )
    try:
        told = f"disk {folder} not in use, retrying"
        until(lambda: told in log.read_text(), "the engine waits for the disk")
        assert f"warning: disk_path {folder} is not responding" in log.read_text()
        disk.thaw()
        until(lambda: f"now using {folder}" in log.read_text(), "the disk is never used")
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        disk.thaw()
        process.kill()
        process.wait()
        shutil.rmtree(socket)
