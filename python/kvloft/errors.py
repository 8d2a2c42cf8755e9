"""Exceptions of kvloft and its Rust extension, and exit statuses of its commands.

Invalid settings only raise at startup: inside a step, an error is a miss and is counted. Every
module may import this module, so it must not import any module of kvloft.
"""

import errno
from typing import Final

MAY_PASS: Final = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "EMFILE", "ENFILE", "ENOMEM")
}
"""System errors that can be temporary: an engine starts despite them."""

NOT_WRITTEN: Final = 4
"""Exit status of a command that could not write its output."""


class ConfigError(ValueError):
    """A setting or an argument is invalid; the message contains its name, its value and the fix."""


class UnsupportedError(ConfigError):
    """kvloft does not support the model or configuration, so the engine does not start."""


class StoreError(RuntimeError):
    """The store or server failed: an I/O error, a damaged file, no response, or it is closed."""


class DeniedError(StoreError):
    """This user cannot open the server's socket."""


class LateError(StoreError):
    """The server did not respond in time. It may still execute the request."""


class BusyError(StoreError):
    """Another process owns the disk directory or the socket."""
