"""The `kvloft` command. Imports neither vLLM nor torch, so it runs anywhere."""

import contextlib
import sys


def warn(text: str) -> None:
    """Print a line on stderr, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"kvloft: {text}", file=sys.stderr, flush=True)
