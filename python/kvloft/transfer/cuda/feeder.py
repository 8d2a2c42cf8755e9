"""Feeder: a thread that sends one direction's next copies when earlier ones are done, so that few of them are queued at a time.

A copy engine stays with a stream until its queue is empty, whatever the priorities: behind 48 copies of 40 MiB, four bytes of
another stream in the same direction waited 36 ms (seen on an H200; benches/results). What an engine copies in its steps must
wait for a piece or two, not for a whole prompt. It must not know pages, plans or what is sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from kvloft.transfer.cuda import driver


class Feeder:
    """Calls ``send`` under ``lock`` each time the event that ``awaited`` names has passed.

    ``awaited`` is called under ``lock`` too; None means that nothing is queued, and the thread sleeps until `wake`. ``send``
    must not raise.
    """

    def __init__(
        self,
        name: str,
        lock: threading.RLock,
        context: Any,
        *,
        awaited: Callable[[], driver.Event | None],
        send: Callable[[], None],
    ) -> None:
        """Starts the thread, in the CUDA context ``context`` (None: in none)."""
        self._changed = threading.Condition(lock)
        self._awaited = awaited
        self._send = send
        self._context = context
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
        if self._context is not None:
            driver.use_context(self._context)
        while (event := self._wait_for_work()) is not None:
            with contextlib.suppress(driver.CudaError):  # whoever sends meets the same error, and says so
                event.synchronize()
            with self._changed:
                self._send()

    def _wait_for_work(self) -> driver.Event | None:
        with self._changed:
            while not self._closing:
                if (event := self._awaited()) is not None:
                    return event
                self._changed.wait()
        return None
