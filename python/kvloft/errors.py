"""What kvloft raises on purpose: at start only, never inside a step (there, a failure is a miss and a count).

Must know nothing else of kvloft, so that every module may import it. The errors of the Rust half (`StoreError`,
`BusyError`) come from `kvloft._core`, which this file must not load.
"""

import errno
from typing import Final

MAY_PASS: Final = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "EMFILE", "ENFILE", "ENOMEM")}
"""What is wrong with the machine for now, and with no setting: it must not end an engine's start."""


NOT_WRITTEN: Final = 4
"""Exit status of a command whose output could not be written: 1 says what was found."""


class ConfigError(ValueError):
    """A setting is wrong; the message is one sentence naming the key, the value, its source and what is allowed."""


class UnsupportedError(ConfigError):
    """vLLM runs something kvloft does not serve yet, so it refuses at start rather than half-serve it."""
