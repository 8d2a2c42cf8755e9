"""Turns of engines that share a GPU: each measures one prompt while the others are idle, so that what slows a GPU in the course
of a run (heat, above all: a percent in a minute of prefills was seen) slows them all alike. It must not know what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.002


class Turns:
    """Processes that take turns in the order of ``names``, through files in ``folder``."""

    def __init__(self, folder: Path, name: str, names: Sequence[str], *, timeout_s: float = 300.0) -> None:
        """Says that ``name`` is ready, and waits until all are. Raises TimeoutError where one never comes."""
        self._folder, self._timeout_s = folder, timeout_s
        self._mine, self._count = list(names).index(name), len(names)
        (folder / f"ready-{name}").touch()
        self._wait(lambda: all((folder / f"ready-{other}").exists() for other in names), "another engine never got ready")

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Waits for this process's next turn, and passes it on at the end, also where the turn failed."""
        done = self._folder / f"done-{self._mine}"
        self._wait(lambda: self._num_done() % self._count == self._mine, "another engine kept its turn")
        try:
            yield
        finally:
            with done.open("ab") as file:
                file.write(b".")

    def _num_done(self) -> int:
        """Turns taken so far by all: a byte each."""
        paths = (self._folder / f"done-{i}" for i in range(self._count))
        return sum(path.stat().st_size for path in paths if path.exists())

    def _wait(self, is_over: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem} within {self._timeout_s:.0f} s")
            time.sleep(POLL_S)
