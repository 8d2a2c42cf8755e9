"""Turns of engines that share a GPU: each measures once while the others are idle, so that changes
during a run (a warming GPU, other load on the host) affect all equally. Must not depend on the
measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.002


class Turns:
    """Processes that take turns in the order of ``names``, through files in ``folder``; turns do
    not wait for a process that left.
    """

    def __init__(
        self, folder: Path, name: str, names: Sequence[str], *, timeout_s: float = 600.0
    ) -> None:
        """Signal that ``name`` is ready, and wait until all are. Raises TimeoutError if one never
        is.
        """
        self._folder, self._timeout_s = folder, timeout_s
        self._names, self._mine = list(names), list(names).index(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"ready-{name}").touch()
        self._wait(
            lambda: all((folder / f"ready-{other}").exists() for other in self._present()),
            "another engine never became ready",
        )

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Waits for this process's next turn and passes it on at the end, even if the turn
        failed.
        """
        self._wait(self._is_mine, "another engine kept its turn")
        try:
            yield
        finally:
            with (self._folder / f"done-{self._names[self._mine]}").open("ab") as file:
                file.write(b".")

    def leave(self) -> None:
        """Stop taking turns."""
        leave(self._folder, self._names[self._mine])

    def _is_mine(self) -> bool:
        """Return True if no other process had fewer turns, or as many and an earlier name: true for
        one process at a time.
        """
        order = {name: (self._num_done(name), i) for i, name in enumerate(self._names)}
        mine = self._names[self._mine]
        return all(order[mine] <= order[name] for name in self._present())

    def _present(self) -> list[str]:
        return [name for name in self._names if not (self._folder / f"left-{name}").exists()]

    def _num_done(self, name: str) -> int:
        """Number of turns so far: one byte each."""
        path = self._folder / f"done-{name}"
        return path.stat().st_size if path.exists() else 0

    def _wait(self, is_over: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem} within {self._timeout_s:.0f} s")
            time.sleep(POLL_S)


def leave(folder: Path, name: str) -> None:
    """Record that ``name``, whose process may be dead, takes no further turns."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"left-{name}").touch()
