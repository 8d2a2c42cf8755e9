"""Implements `kvloft verify DIR`, which checks the key and checksum of every chunk on disk."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvloft.cli.admin import counted
from kvloft.cli.inspect import add_arguments, read_folder
from kvloft.config.units import size_text

_CHUNKS_PER_STEP = 16
MAX_ROWS = 40


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "verify",
        help="check every chunk in a disk directory for damage",
        description=(
            "Read every chunk in a disk directory and check its key and checksum. This command is "
            "read-only. Exit status: 0 no damage; 1 damage; 2 not checked, because DIR is invalid "
            "or in use by an engine or a server; 3 no damage, but some namespaces were written by "
            "a different kvloft version and cannot be checked (an engine running this version "
            "replaces them); 4 the output cannot be written."
        ),
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the directory and return the exit status, as described in the help text.

    Sets ``args.status`` before printing, in case the output cannot be written.
    """
    checked = read_folder(args.dir, lambda folder: _walk(folder, quiet=args.json))
    if checked is None:
        return 2
    num_chunks, found = checked
    others = [row for row in found if row.pop("is_other_format")]
    damage = [row for row in found if row not in others]
    args.status = 1 if damage else 3 if others else 0
    if args.json:
        print(
            json.dumps({"chunks": num_chunks, "damage": damage, "other_format": others}, indent=2)
        )
    else:
        _print(num_chunks, damage)
        for other in others:
            print(f"{other['namespace']} was not checked: {other['problem']}.")
    return int(args.status)


def _walk(folder: str, *, quiet: bool) -> tuple[int, list[dict[str, Any]]]:
    """Check all chunks. Return the number of chunks and a row for each problem."""
    from kvloft._core import DiskVerify

    verify = DiskVerify(folder)
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    text, is_off = TextColumn("{task.description}"), quiet or not console.is_terminal
    with Progress(text, *columns, console=console, disable=is_off, transient=True) as progress:
        task = progress.add_task("chunks", total=verify.num_chunks)
        # The first step also reports damage found when the directory was opened, so run it even if
        # there are no chunks.
        damage = verify.step(_CHUNKS_PER_STEP)
        while verify.num_checked < verify.num_chunks:
            progress.update(task, completed=verify.num_checked)
            damage += verify.step(_CHUNKS_PER_STEP)
    return verify.num_chunks, damage


def _print(num_chunks: int, damage: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, markup=False)
    checked = f"{counted(num_chunks, 'chunk')} checked"
    if not damage:
        console.print(f"{checked}: no damage")
        return
    table = Table("namespace", "slot", "key", "problem")
    have_several_sizes = len({found["frame_bytes"] for found in damage} - {None}) > 1
    for found in damage[:MAX_ROWS]:
        slot = "-" if found["slot"] is None else str(found["slot"])
        if have_several_sizes and found["slot"] is not None:
            slot += f" of {size_text(found['frame_bytes'])}"
        table.add_row(found["namespace"], slot, (found["key"] or "-")[:16], found["problem"])
    console.print(table)
    if len(damage) > MAX_ROWS:
        console.print(f"... and {len(damage) - MAX_ROWS:,} more (use --json to list all)")
    if all(found["slot"] is not None for found in damage):
        verdict = f"{len(damage):,} damaged"
    else:  # an entire file is damaged, so the number of damaged chunks is unknown
        verdict = f"{counted(len(damage), 'problem')} found"
    console.print(
        f"{checked}: {verdict}. Damaged chunks are treated as misses; no action is needed."
    )
