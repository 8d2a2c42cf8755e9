"""Exceptions that kvloft and its Rust extension raise, and the exit status for lost output.

Invalid settings raise an exception at startup. An error during a step is counted and treated as a
miss. Every kvloft module may import this module, so it must not import any of them.
"""

import errno
from typing import Final

MAY_PASS: Final = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "EMFILE", "ENFILE", "ENOMEM")
}
"""errno values of errors that may be temporary, so they do not prevent an engine from starting.
"""

NOT_WRITTEN: Final = 4
"""Exit status of a command that could not write its output."""


class ConfigError(ValueError):
    """A setting or argument is invalid. The message gives its name and value, and explains how to
    fix it.
    """


class UnsupportedError(ConfigError):
    """kvloft does not support the model or configuration, so the engine does not start."""


class ShortageError(ConfigError):
    """A setting requires more memory than is currently free. A later attempt may succeed."""


class StoreError(RuntimeError):
    """The store or server failed (I/O error, damaged file, no response) or is closed."""


class DeniedError(StoreError):
    """The current user lacks permission to open the server's socket."""


class LateError(StoreError):
    """The server did not respond in time, but may still execute the request."""


class BusyError(StoreError):
    """Another process owns the disk directory or the socket."""
