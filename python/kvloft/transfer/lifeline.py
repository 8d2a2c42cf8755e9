"""A worker's end of its engine's lifeline: the pipe by which a server notices that no process can write to the frames any more.

The kernel closes it when the process ends, however it ends. It must be opened before the arena is mapped.
"""

from __future__ import annotations

import os


class Lifeline:
    """The pipe, held open until `close`; it is never written to."""

    def __init__(self, path: str, inode: int) -> None:
        """Open the pipe at ``path``. Raises OSError if its engine is gone, or ``path`` is another file by now."""
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.fstat(self._fd).st_ino != inode:
            self.close()
            raise OSError(f"{path} is no longer this engine's lifeline: its scheduler has ended")

    def close(self) -> None:
        """This process writes to no frame from now on. Again does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
