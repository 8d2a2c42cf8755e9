"""Exceptions of kvloft and exit statuses of its commands. The extension raises these exceptions,
too.

Wrong settings are raised at start only: inside a step, an error is a miss and is counted. Every
module may import this one, so it must not import anything of kvloft.
"""

import errno
from typing import Final

MAY_PASS: Final = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "EMFILE", "ENFILE", "ENOMEM")
}
"""Errors of the machine that can pass: an engine starts despite them."""

NOT_WRITTEN: Final = 4
"""Exit status of a command that could not write its output."""


class ConfigError(ValueError):
    """A setting or an argument is wrong; the message names it, its value and the fix."""


class UnsupportedError(ConfigError):
    """kvloft does not support what vLLM runs, so the engine does not start."""


class StoreError(RuntimeError):
    """The store or the server failed: an I/O error, a damaged file, no answer, or it is closed."""


class DeniedError(StoreError):
    """This user cannot open the server's socket."""


class LateError(StoreError):
    """The server did not answer in time. It may still execute the request."""


class BusyError(StoreError):
    """Another process owns the disk directory or the socket."""
