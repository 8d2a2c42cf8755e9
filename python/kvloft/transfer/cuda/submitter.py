"""Submitter: a thread that submits the next copies of one direction when earlier ones are done, to
keep queues short.

A copy engine stays with a stream until its queue is empty, despite priorities: behind 48 copies of
40 MiB, four bytes of another stream in the same direction waited 36 ms (H200; benches/results). The
engine's copies in a step must wait for a piece or two, not for a whole prompt. Must not depend on
pages or plans.
"""

import contextlib
import threading

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.shared import Direction


class Submitter:
    """Feeds ``direction`` when its awaited event has passed; sleeps without one."""

    def __init__(self, name: str, lock: threading.RLock, direction: Direction) -> None:
        """Start the thread, with the current CUDA context."""
        self._changed = threading.Condition(lock)
        self._direction = direction
        self._context = driver.current_context()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread because copies were queued. The caller must hold the lock."""
        self._changed.notify()

    def close(self) -> None:
        """End the thread once its awaited copy is done. The caller must not hold the lock."""
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
            with contextlib.suppress(driver.CudaError):  # `feed` meets the same error
                event.synchronize()
            with self._changed:
                self._direction.feed()
