"""Logs the store's events while an engine is idle: vLLM calls no hook then, and the connection to a
server can change.

It must not depend on the events.
"""

import threading
from collections.abc import Callable
from typing import Final

LOOK_EVERY_S: Final = 1.0


class Teller:
    """Calls ``tell`` every second in a thread of its own, until it is closed."""

    def __init__(self, tell: Callable[[], None], *, every_s: float = LOOK_EVERY_S) -> None:
        self._tell, self._every_s, self._is_over = tell, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloft-tell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the calls: none begins after this returns. Idempotent."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._tell()
