"""Watches the server that owns a worker's arena, and closes the arena in the background."""

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Final

from kvloft.transfer.frames import Lifeline
from kvloft.transfer.mover import Mover

logger = logging.getLogger(__name__)

GRACE_S: Final = 1.0
"""Time in which the engine can reconnect to the same memory, which then stays mapped."""


class ArenaWatch:
    """Reports a server's exit even if the engine is idle. A restarted server needs as much memory
    as the lost server, whose memory stays allocated until every worker has unmapped it.
    """

    def __init__(self, lifeline: Lifeline, on_server_gone: Callable[[Lifeline], bool]) -> None:
        """Start the thread, which calls ``on_server_gone`` repeatedly until a call returns True."""
        self._lifeline = lifeline
        self._on_server_gone = on_server_gone
        self._lock = threading.Lock()
        self._wake: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvloft-arena-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, because the lifeline will be closed. Does not wait for the thread."""
        with self._lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)

    def join(self) -> None:
        """Wait for the thread. Its callback may be running, so the caller must hold no locks."""
        self._thread.join()

    def _run(self) -> None:
        wake = self._wake
        assert wake is not None, "only this thread closes it"
        if self._lifeline.wait_until_server_gone(wake):
            while not _is_readable(wake, GRACE_S) and not self._on_server_gone(self._lifeline):
                pass
        with self._lock:
            self._wake = None
            os.close(wake)


class ArenaRelease:
    """Closes a mover, unmaps its arena, and then closes the lifeline. Unregistering and unmapping
    64 GiB takes several seconds, which must not delay a step.
    """

    def __init__(self, mover: Mover, lifeline: Lifeline | None) -> None:
        self._mover: Mover | None = mover
        self._lifeline = lifeline
        self._thread = threading.Thread(target=self._run, name="kvloft-arena-release", daemon=True)

    def start(self) -> None:
        """Start the thread. The caller must have dropped its references to the mover."""
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the arena is unmapped. Return False if ``timeout_s`` expires."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._mover is not None:
                self._mover.close()
        except Exception:
            # Copies may still write to frames, so the lifeline stays open until the process exits.
            logger.exception(
                "kvloft: could not stop copying; frames stay reserved until this worker exits"
            )
            return
        self._mover = None  # unmaps the arena
        if self._lifeline is not None:
            self._lifeline.close()


def _is_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))
