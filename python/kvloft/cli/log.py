"""Output of `kvloft serve`: the log on stdout, one line per event, and warnings on stderr.

A failed write never ends the server: a full disk is reported once on stderr. It must not depend on
the events.
"""

import contextlib
import os
import sys
import time
from typing import IO, Final

TIME: Final = "%Y-%m-%d %H:%M:%S"
"""Local time."""


def warn(text: str) -> None:
    """Print a line on stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"kvloft: {text}", file=sys.stderr, flush=True)


class Log:
    """The log of one server."""

    def __init__(self) -> None:
        self._was_lost = False

    def tell(self, *lines: str) -> None:
        """Print each line with date and time. A failed write does not affect later lines."""
        for line in lines:
            try:
                print(f"{time.strftime(TIME)} {line}", flush=True)
            except OSError as e:
                self._lose(e)

    def end(self) -> None:
        """Flush both streams; discard what cannot be written, or the exit status would change."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                _discard(stream)

    def _lose(self, error: OSError) -> None:
        if not self._was_lost:
            self._was_lost = True
            warn(
                f"warning: the log cannot be written ({error.strerror}); the server continues "
                "without it"
            )


def _discard(stream: IO[str]) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
