"""Tests how engines take turns on a shared GPU. Engines alternate strictly. After a failure or a
timeout, the turn passes to the next engine.
"""

import threading
from pathlib import Path

import pytest

from benches.gpu.turns import Turns, leave

NAMES = ("none", "native", "kvloft")


def test_every_round_is_in_the_order_of_names(tmp_path: Path) -> None:
    log: list[str] = []
    inside: list[str] = []

    def take_turns(name: str) -> None:
        turns = Turns(tmp_path, name, NAMES)
        for number in range(5):
            try:
                with turns.mine():
                    inside.append(name)
                    log.append(name)
                    assert inside == [name], "two benches had the turn at the same time"
                    inside.pop()
                    if name == "native" and number == 2:
                        raise RuntimeError("a prompt that failed")
            except RuntimeError:
                continue

    threads = [threading.Thread(target=take_turns, args=(name,)) for name in reversed(NAMES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == list(NAMES) * 5


def test_one_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    log: list[str] = []

    def take_turns(name: str, count: int) -> None:
        turns = Turns(tmp_path, name, NAMES)
        for _ in range(count):
            with turns.mine():
                log.append(name)
        turns.leave()

    leave(tmp_path, "native")  # the process was never started
    threads = [
        threading.Thread(target=take_turns, args=(name, count))
        for name, count in (("kvloft", 4), ("none", 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log == ["none", "kvloft", "none", "kvloft", "kvloft", "kvloft"]


def test_one_that_never_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="ready"):
        Turns(tmp_path, "none", NAMES, timeout_s=0.05)


def test_one_that_stops_taking_turns_is_an_error(tmp_path: Path) -> None:
    for name in NAMES[1:]:
        (tmp_path / f"ready-{name}").touch()
    turns = Turns(tmp_path, "none", NAMES, timeout_s=0.05)
    with turns.mine():
        pass
    with pytest.raises(TimeoutError, match="turn"), turns.mine():
        pass
