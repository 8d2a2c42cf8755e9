"""Arguments and tables that the benches of whole engines share. Must not import torch or vLLM."""

import argparse
from collections.abc import Callable, Sequence

from rich.table import Table

from benches.gpu.shapes import SHAPES
from kvloft.bench.command import add_json, whole

STATUS = "Exit status: 0 success, 1 a failure or difference, 2 it cannot run here."


def some_of(*allowed: str) -> Callable[[str], list[str]]:
    """An argparse type: names in ``allowed``, separated by commas, without repetition."""

    def parse(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        if len(set(given)) < len(given):
            raise argparse.ArgumentTypeError(f"{text!r} contains a name twice")
        return given

    return parse


def add_sizes(engines: argparse.ArgumentParser, *, blocks: int, host_gib: int) -> None:
    """Options of every bench of whole engines."""
    engines.add_argument(
        "--blocks",
        type=whole(64, 1 << 24),
        default=blocks,
        help=f"blocks of 16 tokens in GPU memory (default {blocks})",
    )
    engines.add_argument(
        "--host-gib",
        type=whole(1, 4096),
        default=host_gib,
        help=f"host memory of each cache, GiB (default {host_gib})",
    )
    engines.add_argument(
        "--timeout", type=whole(1, 86400), default=900, help="seconds for everything (default 900)"
    )
    engines.add_argument(
        "--logs", default="build/bench", help="folder for the engines' logs (default build/bench)"
    )
    add_json(engines)


def add_model(engines: argparse.ArgumentParser) -> None:
    """The model options of every bench of whole engines."""
    engines.add_argument(
        "--model", choices=tuple(SHAPES), default="llama", help="which architecture (default llama)"
    )
    engines.add_argument(
        "--layers",
        type=whole(1, 128),
        default=None,
        help="layers of the model (default as published)",
    )


def table_of(rows: Sequence[Sequence[str]]) -> Table:
    """The first row is the head."""
    head, *body = rows
    table = Table()
    for name in head:
        table.add_column(name, overflow="fold")
    for row in body:
        table.add_row(*row)
    return table
