"""What `kvloft serve` prints: its log on stdout, a line an event, and what is wrong on stderr.

Neither may end a server: a full disk is reported once on stderr, and the server keeps running. It must not know what happens.
"""

import contextlib
import os
import sys
import time
from typing import IO, Final

TIME: Final = "%Y-%m-%d %H:%M:%S"
"""Local, as the log's first word is for people of this machine."""


def warn(text: str) -> None:
    """Print a line on stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"kvloft: {text}", file=sys.stderr, flush=True)


class Log:
    """The log of one server."""

    def __init__(self) -> None:
        self._was_lost = False

    def tell(self, *lines: str) -> None:
        """Print each line with the date and the time. What cannot be written now may be, with later lines, once there is room."""
        for line in lines:
            try:
                print(f"{time.strftime(TIME)} {line}", flush=True)
            except OSError as e:
                self._lose(e)

    def end(self) -> None:
        """Leave nothing that Python would try to write as it ends: that would be the exit status."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                _discard(stream)

    def _lose(self, error: OSError) -> None:
        if not self._was_lost:
            self._was_lost = True
            warn(f"warning: the log cannot be written ({error.strerror}); the server goes on without it")


def _discard(stream: IO[str]) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
