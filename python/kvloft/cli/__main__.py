"""Entry point of the `kvloft` command. Handles closed standard streams and Ctrl-C during imports.

This module must not import slow modules at the top level. `kvloft.cli.commands` runs the commands.
"""

import os
import sys

from kvloft.cli import warn


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 4 if stdout is closed, 130 after Ctrl-C."""
    try:
        if not _prepare_streams():
            from kvloft.errors import NOT_WRITTEN

            warn("stdout is closed; redirect it to /dev/null to discard the output")
            return NOT_WRITTEN
        import signal

        is_ours = argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_ours:  # exit here: the import system can swallow an exception
            signal.signal(signal.SIGINT, lambda number, _frame: os._exit(128 + number))
        from kvloft.cli.commands import parse, run

        args = parse(argv)
        if is_ours and sys.argv[1:2] != ["serve"]:  # `serve` has its own handler
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(args)
    except KeyboardInterrupt:
        return 130


def _prepare_streams() -> bool:
    """Replace a closed stdin or stderr with /dev/null, and escape characters that stdout cannot
    encode. Return False if stdout is closed.
    """
    if sys.__stdout__ is None:  # otherwise, print would silently discard all output
        return False
    sys.__stdout__.reconfigure(errors="backslashreplace")
    for name, original, mode in (("stdin", sys.__stdin__, "r"), ("stderr", sys.__stderr__, "w")):
        if original is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    return True


if __name__ == "__main__":
    raise SystemExit(main())
