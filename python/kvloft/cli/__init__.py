"""The `kvloft` command. It imports neither vLLM nor torch, so it runs on any machine."""

import contextlib
import sys


def warn(text: str) -> None:
    """Print a line on stderr. Ignores write errors."""
    with contextlib.suppress(OSError):
        print(f"kvloft: {text}", file=sys.stderr, flush=True)
