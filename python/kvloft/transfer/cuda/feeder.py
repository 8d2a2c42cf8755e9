"""Feeder: a thread that sends one direction's next copies when earlier ones are done, so that few of them are queued at a time.

A copy engine stays with a stream until its queue is empty, whatever the priorities: behind 48 copies of 40 MiB, four bytes of
another stream in the same direction waited 36 ms (seen on an H200; benches/results). What an engine copies in its steps must
wait for a piece or two, not for a whole prompt. It must not know pages, plans or what is sent.
"""

from __future__ import annotations

import contextlib
import threading

from kvloft.transfer.cuda import driver
from kvloft.transfer.cuda.shared import Half


class Feeder:
    """Feeds ``half`` under ``lock`` each time the event that it awaits has passed; sleeps while it awaits none, until `wake`."""

    def __init__(self, name: str, lock: threading.RLock, half: Half) -> None:
        """Starts the thread, in the CUDA context that is current."""
        self._changed = threading.Condition(lock)
        self._half = half
        self._context = driver.current_context()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something was queued; the caller holds the lock."""
        self._changed.notify()

    def close(self) -> None:
        """Ends the thread, at the latest when the copy that it waits for is done; the caller must not hold the lock."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        driver.use_context(self._context)
        while True:
            with self._changed:
                while (event := self._half.awaited()) is None and not self._closing:
                    self._changed.wait()
                if event is None or self._closing:
                    return
            with contextlib.suppress(driver.CudaError):  # the sender meets the same error, and reports it
                event.synchronize()
            with self._changed:
                self._half.feed()
