"""A worker's end of its engine's lifeline: a pipe whose end-of-file shows a server that no process
can write to the frames.

The kernel closes it when the process ends for any reason. Open it before mapping the arena.
"""

import os


class Lifeline:
    """Holds the pipe open until `close`, and never writes to it."""

    def __init__(self, path: str, inode: int) -> None:
        """Open the pipe. Raises OSError if the engine is gone, or ``path`` is another file."""
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(self._fd).st_ino != inode:
            self.close()
            raise OSError(f"{path} is no longer this engine's lifeline: its scheduler has ended")

    def close(self) -> None:
        """Close the pipe; this process must not write to frames afterwards. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
