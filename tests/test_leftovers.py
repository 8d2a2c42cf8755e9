"""Tests the check for leftovers in `conftest.py`, which waits for threads and processes that finish
late.
"""

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest


class Owner:
    """An object in a reference cycle, like the objects of a test.

    Its thread finishes when the object is collected.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.itself, self.end = self, end

    def __del__(self) -> None:
        self.end()


def test_objects_of_a_thread_that_ends_late_are_collected(
    request: pytest.FixtureRequest,
) -> None:
    """On an overloaded machine, a thread might not finish until after the check's first
    collection.
    """
    guard = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert guard is not None
    has_collected, may_end = threading.Event(), threading.Event()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            has_collected.set()

    def keep(_owner: Owner) -> None:
        has_collected.wait()

    before = guard.running()
    threading.Thread(target=may_end.wait).start()
    threading.Thread(target=keep, args=(Owner(may_end.set),)).start()
    gc.callbacks.append(note)
    try:
        assert guard.left_behind(before, 0.0) == []
    finally:
        gc.callbacks.remove(note)
        has_collected.set()
        may_end.set()
