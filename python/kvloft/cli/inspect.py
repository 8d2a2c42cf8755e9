"""Implements `kvloft inspect DIR`, which lists a disk directory's namespaces. The command is
read-only.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column, Table

from kvloft.cli import warn
from kvloft.cli.admin import counted
from kvloft.config.units import size_text
from kvloft.errors import ConfigError, StoreError

NUM_MORE_LOOKS, LOOK_AGAIN_S = 2, 0.1
T = TypeVar("T")


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "inspect",
        help="list the namespaces in a disk directory",
        description=(
            "List the namespaces in a disk directory. This command is read-only and also works "
            "while an engine is using the directory."
        ),
    )
    add_arguments(
        parser, json_help="print JSON instead of a table (sizes in bytes, times in Unix seconds)"
    )
    parser.set_defaults(run=run)


def add_arguments(
    parser: argparse.ArgumentParser, json_help: str = "print JSON instead of a table"
) -> None:
    """Add the arguments shared by all commands that read a disk directory."""
    parser.add_argument("dir", metavar="DIR", help="an engine's or server's disk_path")
    parser.add_argument("--json", action="store_true", help=json_help)


def read_folder(folder: str, read: Callable[[str], T]) -> T | None:
    """Return ``read(folder)``. If ``read`` fails, print the error and return None."""
    found = None
    try:
        found = read(folder)
    except (ConfigError, StoreError) as e:
        warn(str(e))
    _warn_of_other_engines(folder)
    return found


def run(args: argparse.Namespace) -> int:
    """Print one row per namespace. Return 0, or 2 if DIR is not a disk directory."""
    namespaces = read_folder(args.dir, _look)
    if namespaces is None:
        return 2
    if args.json:
        print(
            json.dumps([{**n, "fields": _fields(n["description"])} for n in namespaces], indent=2)
        )
        return 0
    console = Console(highlight=False, markup=False)
    if not namespaces:
        console.print(f"{args.dir} has no namespaces yet.")
        return 0
    console.print(namespace_table(namespaces))
    for n in namespaces:
        for text, style in (
            (printable(n["problem"] or ""), "red"),
            (describe(n["description"]), None),
        ):
            if text:
                console.print(f"{n['namespace']}: {text}", style=style)
    total = sum(n["bytes"] for n in namespaces)
    has_free = any(n["slots"] > n["chunks"] for n in namespaces)
    free = "; slots without a chunk are preallocated free space" if has_free else ""
    console.print(f"{size_text(total)} in {counted(len(namespaces), 'namespace')}{free}")
    return 0


def _look(folder: str) -> list[dict[str, Any]]:
    """Return the namespaces in the disk directory.

    If any namespace has a problem, rereads the directory up to NUM_MORE_LOOKS times, because an
    engine may be resizing files.
    """
    from kvloft._core import disk_inspect

    namespaces = disk_inspect(folder)
    for _ in range(NUM_MORE_LOOKS):
        if not any(n["problem"] for n in namespaces):
            break
        time.sleep(LOOK_AGAIN_S)
        namespaces = disk_inspect(folder)
    return namespaces


def _warn_of_other_engines(folder: str) -> None:
    """Print a warning if other data-parallel engines have subdirectories in ``folder``."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # `read_folder` has already reported the error
        names = sorted(
            path.name
            for path in Path(folder).glob("dp[1-9]*")
            if path.is_dir() and path.name[2:].isdecimal()
        )
    if names:
        warn(
            f"{folder} also holds other data-parallel engines' directories, which were not read: "
            f"{', '.join(names)}; run this command on each of them"
        )


def namespace_table(namespaces: list[dict[str, Any]]) -> Table:
    """Return the rows of `disk_inspect` as a table that fits in 80 columns."""
    numbers = (
        Column(name, justify="right", no_wrap=True)
        for name in ("chunks", "slots", "chunk size", "on disk")
    )
    namespace, oldest, newest = (
        Column(name, no_wrap=True) for name in ("namespace", "oldest", "newest")
    )
    table = Table(
        namespace,
        *numbers,
        oldest,
        newest,
        row_styles=["", "dim"],
        padding=(0, 0),
        collapse_padding=True,
    )
    for n in namespaces:
        row = [n["namespace"], f"{n['chunks']:,}", f"{n['slots']:,}", sizes_text(n["frame_sizes"])]
        row += [size_text(n["bytes"]), format_time(n["oldest"]), format_time(n["newest"])]
        table.add_row(*row)
    return table


def sizes_text(sizes: list[int]) -> str:
    """Return the range of frame sizes as text, or a dash if the sizes are unknown."""
    ends = sorted({min(sizes), max(sizes)}) if sizes else []
    return " to ".join(size_text(size) for size in ends) or "-"


def describe(description: str) -> str:
    """Return a namespace's non-empty fields as ``name=value, ...``.

    If ``description`` has no fields, return it with control characters escaped.
    """
    fields = fields_of(description)
    return fields if isinstance(fields, str) else ", ".join(f"{k}={v}" for k, v in fields.items())


def fields_of(description: str) -> dict[str, str] | str:
    """Return a namespace's non-empty fields.

    If ``description`` has no fields, return it with control characters escaped.
    """
    fields = _fields(description)
    if not fields:
        return printable(description)
    return {
        printable(k): printable(str(v)) for k, v in fields.items() if v not in ("", "''", "None")
    }


def printable(text: str) -> str:
    """Escape control characters in text from other processes, to protect the terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _fields(description: str) -> dict[str, str] | None:
    """Return a namespace's fields, or None if ``description`` is not a JSON object."""
    try:
        fields = json.loads(description)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def format_time(unix_s: int | None) -> str:
    """Format a local time as day, month and time, or as a date if it is not in the current year.

    Returns a dash if ``unix_s`` is None or out of range.
    """
    if unix_s is None:
        return "-"
    try:
        then = datetime.fromtimestamp(unix_s).astimezone()
        return then.strftime(
            "%d %b %H:%M" if then.year == datetime.now().astimezone().year else "%Y-%m-%d"
        )
    except (OverflowError, ValueError, OSError):
        return "-"
