"""A submitter is a thread that submits copies in one direction as earlier copies complete.

Submitting copies late keeps the queues on the GPU short. A copy engine serves one stream until the
stream's queue is empty, regardless of priorities: on an H200, a four-byte copy on another stream
waited 36 ms behind 48 copies of 40 MiB in the same direction. The engine's copies should wait for
at most one or two pieces, not for an entire prompt.
"""

import contextlib
import threading
from typing import Any

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.shared import Direction


class Submitter:
    """Calls ``direction.feed`` when an awaited event occurs. Sleeps while no event is awaited."""

    def __init__(self, name: str, lock: threading.RLock, direction: Direction[Any]) -> None:
        """Start the thread, which uses the caller's current CUDA context."""
        self._changed = threading.Condition(lock)
        self._direction = direction
        self._context = driver.current_context()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread after copies have been queued. The caller must hold the lock."""
        self._changed.notify()

    def close(self) -> None:
        """Stop the thread and wait until it exits. The caller must not hold the lock."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        driver.use_context(self._context)
        while True:
            with self._changed:
                while (event := self._direction.awaited()) is None and not self._closing:
                    self._changed.wait()
                if event is None or self._closing:
                    return
            with contextlib.suppress(driver.CudaError):  # `feed` handles this error
                event.synchronize()
            with self._changed:
                self._direction.feed()
