"""Handles the output of `kvloft serve` (log on stdout, warnings on stderr) and --background.

The server keeps running if a write fails. Only the first failure is reported, on stderr.
"""

import errno
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvloft.cli import warn
from kvloft.errors import MAY_PASS, ConfigError

TIME: Final = "%Y-%m-%d %H:%M:%S"
"""Format of the local time in log lines."""
MAX_LOG_BYTES: Final = 1 << 20
"""Maximum size of an existing log file. At startup, a larger log file is truncated."""


class Log:
    """Writes a server's log to stdout."""

    def __init__(self) -> None:
        self._was_lost = False

    def tell(self, *lines: str) -> None:
        """Print each line with the date and time. If a write fails, continue with the next line."""
        for line in lines:
            try:
                print(f"{time.strftime(TIME)} {line}", flush=True)
            except OSError as e:
                self._lose(e)

    def end(self) -> None:
        """Flush stdout and stderr. On failure, discard the text to preserve the exit status."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def _lose(self, error: OSError) -> None:
        if not self._was_lost:
            self._was_lost = True
            warn(
                f"warning: cannot write the log ({error.strerror}); the server continues without it"
            )


def in_background(work: Callable[[Callable[[], None]], int], log: Path, what: str) -> int:
    """Run ``work`` in a child process. This function returns in both processes.

    ``work`` must call its argument when startup is complete. Calling this argument redirects the
    child's output to ``log``. The parent then prints a line with the process id and ``what``, and
    returns 0. If the child exits before startup is complete, the parent returns the child's exit
    status. The child returns the result of ``work``.

    Call this function before starting any thread. Raises ConfigError if ``log`` cannot be opened or
    belongs to a different user. If the error may be temporary, exits with status 1 instead.
    """
    to = _open(log)
    ready, ready_writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(to)
        os.close(ready_writer)
        with os.fdopen(ready, "rb") as pipe:
            if pipe.read(1):
                print(f"process {pid} {what}; its log is {log}")
                return 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(ready)
    os.setsid()
    os.chdir("/")

    def begun() -> None:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for own, standard in ((nothing, 0), (to, 1), (to, 2)):
            os.dup2(own, standard)
        with suppress(BrokenPipeError):  # the parent was killed, but engines may already wait
            os.write(ready_writer, b"1")
        for own in (nothing, to, ready_writer):
            os.close(own)

    return work(begun)


def _open(log: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        to = os.open(log, flags, 0o600)
        found = os.fstat(to)
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"--background {log}: the file belongs to another user; use a different file."
            )
        if found.st_size > MAX_LOG_BYTES:
            os.truncate(to, 0)
    except OSError as e:
        reason = f"{log.parent} does not exist" if e.errno == errno.ENOENT else e.strerror
        message = f"--background {log}: cannot write the file ({reason}); use a different file."
        if e.errno not in MAY_PASS:
            raise ConfigError(message) from e
        warn(message)
        raise SystemExit(1) from e
    return to
