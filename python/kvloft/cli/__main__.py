"""Entry point of the `kvloft` command: Ctrl-C ends it quietly also while modules load, and its standard streams are there.

It must import nothing that takes time before `main`; what each command does is in `kvloft.cli.commands` and beside it.
"""

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status: 4 where stdout is closed, 130 after Ctrl-C."""
    try:
        if not _has_streams():
            from kvloft.errors import NOT_WRITTEN

            print("kvloft: stdout is closed; redirect it to /dev/null to see nothing", file=sys.stderr)
            return NOT_WRITTEN
        import signal

        is_ours = argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_ours:  # an exception may get lost in a callback of the import system
            signal.signal(signal.SIGINT, lambda number, _frame: os._exit(128 + number))
        from kvloft.cli.commands import parse, run

        args = parse(argv)
        if is_ours and sys.argv[1:2] != ["serve"]:  # which has a handler of its own before it has anything to end
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(args)
    except KeyboardInterrupt:
        return 130


def _has_streams() -> bool:
    """Whether stdout is open. Where the others are closed, they become /dev/null: files of ours could get their numbers."""
    if sys.__stdout__ is None:  # print would say nothing, and that without an error
        return False
    for name, original, mode in (("stdin", sys.__stdin__, "r"), ("stderr", sys.__stderr__, "w")):
        if original is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    return True


if __name__ == "__main__":
    raise SystemExit(main())
