"""`kvloft serve --background`: the command ends once its work has begun, which goes on in a process of its own session."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvloft.errors import MAY_PASS, ConfigError

MAX_LOG_BYTES: Final = 1 << 20
"""A log that is longer is begun anew."""


def in_background(work: Callable[[Callable[[], None]], int], log: Path, what: str) -> int:
    """Do ``work`` in a process of its own, with ``log`` as its output from the moment it calls what it is given.

    Returns twice: here 0 after that call and a line that says ``what`` which process does, or the exit status of work that ended
    without it; there, work's own. Must be called before any thread is started. Raises ConfigError where ``log`` cannot be this
    user's own file, and exits with 1 where the machine refuses it for now.
    """
    to = _open(log)
    ready, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(to)
        os.close(told)
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
        os.write(told, b"1")
        for own in (nothing, to, told):
            os.close(own)

    return work(begun)


def _open(log: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        to = os.open(log, flags, 0o600)
        found = os.fstat(to)
        if found.st_uid != os.geteuid():
            raise ConfigError(f"{log} is another user's file; name another for --background.")
        if found.st_size > MAX_LOG_BYTES:
            os.truncate(to, 0)
    except OSError as e:
        reason = f"{log.parent} is not there" if e.errno == errno.ENOENT else e.strerror
        message = f"{log} cannot be written ({reason}); name another file for --background."
        if e.errno not in MAY_PASS:
            raise ConfigError(message) from e
        print(f"kvloft: {message}", file=sys.stderr)
        raise SystemExit(1) from e
    return to
