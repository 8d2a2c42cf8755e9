"""`kvloft inspect DIR`: what is in a disk directory. Reads it without its lock and changes nothing."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Column, Table

from kvloft.config import size_text

NUM_MORE_LOOKS, LOOK_AGAIN_S = 2, 0.1
T = TypeVar("T")


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what a disk directory holds",
        description="Show what a disk directory holds: one line for each namespace. Reads only, also while an engine uses it.",
    )
    add_arguments(parser, json_help="print JSON instead of a table (sizes in bytes, times in Unix seconds)")
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser, json_help: str = "print JSON instead of a table") -> None:
    """What commands on a disk directory take."""
    parser.add_argument("dir", metavar="DIR", help="the directory an engine has as its disk_path")
    parser.add_argument("--json", action="store_true", help=json_help)


def read_folder(folder: str, read: Callable[[str], T]) -> T | None:
    """``read(folder)``; None after a line on stderr where ``folder`` is not a disk directory, or an engine is using it."""
    # Here and not above: `kvloft config` must work where the extension does not load.
    from kvloft._core import ConfigError, StoreError

    found = None
    try:
        found = read(folder)
    except (ConfigError, StoreError) as e:
        print(f"kvloft: {e}", file=sys.stderr)
    _tell_of_other_engines(folder)
    return found


def run(args: argparse.Namespace) -> int:
    """Print one row per namespace; 0, or 2 where DIR is not a disk directory."""
    namespaces = read_folder(args.dir, _look)
    if namespaces is None:
        return 2
    if args.json:
        print(json.dumps([{**n, "fields": _fields(n["description"])} for n in namespaces], indent=2))
        return 0
    console = Console()
    if not namespaces:
        console.print(f"{args.dir} holds no namespace yet.")
        return 0
    console.print(namespace_table(namespaces))
    for n in namespaces:
        for text, style in ((printable(n["problem"] or ""), "red"), (describe(n["description"]), None)):
            if text:
                console.print(f"{n['namespace']}: {text}", highlight=False, markup=False, style=style)
    total = sum(n["bytes"] for n in namespaces)
    free = "; slots without a chunk are free, and were allocated ahead" if any(n["slots"] > n["chunks"] for n in namespaces) else ""
    console.print(f"{size_text(total)} in {len(namespaces)} namespace{'s' if len(namespaces) != 1 else ''}{free}", highlight=False)
    return 0


def _look(folder: str) -> list[dict[str, Any]]:
    """What is there. A problem counts if it is still there a moment later: an engine may be growing or shrinking its files."""
    from kvloft._core import disk_inspect

    namespaces = disk_inspect(folder)
    for _ in range(NUM_MORE_LOOKS):
        if not any(n["problem"] for n in namespaces):
            break
        time.sleep(LOOK_AGAIN_S)
        namespaces = disk_inspect(folder)
    return namespaces


def _tell_of_other_engines(folder: str) -> None:
    """Say which data-parallel engines have folders of their own in ``folder``: nothing was looked at there."""
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # what is wrong with the folder was said already
        names = sorted(path.name for path in Path(folder).glob("dp[1-9]*") if path.is_dir() and path.name[2:].isdecimal())
    if names:
        print(
            f"kvloft: {', '.join(names)} in {folder} are of other data-parallel engines: give the path of one to look there",
            file=sys.stderr,
        )


def namespace_table(namespaces: list[dict[str, Any]]) -> Table:
    """A table of `disk_inspect`'s rows, narrow enough for a terminal of 80 columns."""
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("chunks", "slots", "chunk size", "on disk"))
    namespace, oldest, newest = (Column(name, no_wrap=True) for name in ("namespace", "oldest", "newest"))
    table = Table(namespace, *numbers, oldest, newest, row_styles=["", "dim"], padding=(0, 0), collapse_padding=True)
    for n in namespaces:
        row = [n["namespace"], f"{n['chunks']:,}", f"{n['slots']:,}", size_text(n["frame_bytes"])]
        row += [size_text(n["bytes"]), format_time(n["oldest"]), format_time(n["newest"])]
        table.add_row(*row)
    return table


def describe(description: str) -> str:
    """A namespace's fields as ``name=value, ...``, those that say nothing left out; any other text as it is."""
    fields = fields_of(description)
    return fields if isinstance(fields, str) else ", ".join(f"{k}={v}" for k, v in fields.items())


def fields_of(description: str) -> dict[str, str] | str:
    """A namespace's fields that say something; any other text as it is."""
    fields = _fields(description)
    if not fields:
        return printable(description)
    return {printable(k): printable(str(v)) for k, v in fields.items() if v not in ("", "''", "None")}


def printable(text: str) -> str:
    """``text`` with control characters escaped: what a file or another process says must not steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _fields(description: str) -> dict[str, str] | None:
    """A namespace's fields; None for any other text."""
    try:
        fields = json.loads(description)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def format_time(unix_s: int | None) -> str:
    """Local date, with the time of day where it is of this year; a dash for None or what no calendar holds."""
    if unix_s is None:
        return "-"
    try:
        then = datetime.fromtimestamp(unix_s).astimezone()
        return then.strftime("%d %b %H:%M" if then.year == datetime.now().astimezone().year else "%Y-%m-%d")
    except (OverflowError, ValueError, OSError):
        return "-"
