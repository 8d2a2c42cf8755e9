"""A worker's end of its engine's lifeline: a pipe whose end-of-file shows a server that no process
can write to the frames.

The kernel closes it when the process ends for any reason. Open it before mapping the arena.
"""

from __future__ import annotations

import os
import select


class Lifeline:
    """Holds the pipe open until `close`, and never writes to it."""

    def __init__(self, path: str, inode: int) -> None:
        """Open the pipe. Raises OSError if the engine is gone, or ``path`` is another file."""
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(self._fd).st_ino != inode:
            self.close()
            raise OSError(f"{path} is no longer this engine's lifeline: its scheduler has ended")

    def is_server_gone(self) -> bool:
        """Return True if no process can read the pipe: the server has exited, or has released
        all frames of this engine after a lost connection.
        """
        if self._fd is None:
            return False
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))

    def close(self) -> None:
        """Close the pipe; this process must not write to frames afterwards. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
