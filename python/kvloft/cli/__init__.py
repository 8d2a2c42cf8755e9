"""The `kvloft` command. This package imports neither vLLM nor torch, so it runs on any machine."""

import contextlib
import sys


def warn(text: str) -> None:
    """Print a line to stderr and ignore write errors."""
    with contextlib.suppress(OSError):
        print(f"kvloft: {text}", file=sys.stderr, flush=True)
