"""Lets engines that share a GPU take turns, so that only one engine is active during a measurement.

Changes during a run, for example in GPU temperature or host load, then affect all engines equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.002


class Turns:
    """Determines when it is this process's turn.

    Processes take turns in the order of ``names`` and communicate through files in ``folder``.
    Processes that have left are skipped.
    """

    def __init__(
        self, folder: Path, name: str, names: Sequence[str], *, timeout_s: float = 600.0
    ) -> None:
        """Signal that this process, ``name``, is ready, and wait until all processes are ready.

        Raises TimeoutError if a process does not become ready.
        """
        self._folder, self._timeout_s = folder, timeout_s
        self._names, self._mine = list(names), list(names).index(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"ready-{name}").touch()
        self._wait(
            lambda: all((folder / f"ready-{other}").exists() for other in self._present()),
            "another engine did not become ready",
        )

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Run the body in this process's next turn, then end the turn, even after an exception."""
        self._wait(self._is_mine, "another engine did not finish its turn")
        try:
            yield
        finally:
            with (self._folder / f"done-{self._names[self._mine]}").open("ab") as file:
                file.write(b".")

    def leave(self) -> None:
        """Stop taking turns."""
        leave(self._folder, self._names[self._mine])

    def _is_mine(self) -> bool:
        """Return True if it is this process's turn.

        The process with the fewest finished turns is next; the order of the names breaks ties.
        """
        order = {name: (self._num_done(name), i) for i, name in enumerate(self._names)}
        mine = self._names[self._mine]
        return all(order[mine] <= order[name] for name in self._present())

    def _present(self) -> list[str]:
        return [name for name in self._names if not (self._folder / f"left-{name}").exists()]

    def _num_done(self, name: str) -> int:
        """Return the number of finished turns, which equals the size of the process's file."""
        path = self._folder / f"done-{name}"
        return path.stat().st_size if path.exists() else 0

    def _wait(self, is_over: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not is_over():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem} within {self._timeout_s:.0f} s")
            time.sleep(POLL_S)


def leave(folder: Path, name: str) -> None:
    """Record that ``name`` takes no further turns; its process may already have exited."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"left-{name}").touch()
