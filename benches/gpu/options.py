"""Options and tables shared by the engine benchmarks. Imports neither torch nor vLLM."""

import argparse
from collections.abc import Callable, Sequence

from rich.table import Table

from benches.gpu.shapes import SHAPES
from kvloft.bench.command import add_json, whole

STATUS = (
    "Exit status: 0 success; 1 failure or difference; 2 the benchmark cannot run on this machine."
)


def some_of(*allowed: str) -> Callable[[str], list[str]]:
    """Return an argparse type for a comma-separated list of names in ``allowed``."""

    def parse(text: str) -> list[str]:
        given = text.split(",")
        for name in given:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        if len(set(given)) < len(given):
            raise argparse.ArgumentTypeError(f"{text!r} has a duplicate name")
        return given

    return parse


def add_sizes(engines: argparse.ArgumentParser, *, blocks: int, host_gib: int) -> None:
    engines.add_argument(
        "--blocks",
        type=whole(64, 1 << 24),
        default=blocks,
        help=f"number of 16-token KV cache blocks (default {blocks})",
    )
    engines.add_argument(
        "--host-gib",
        type=whole(1, 4096),
        default=host_gib,
        help=f"host memory per cache, in GiB (default {host_gib})",
    )
    engines.add_argument(
        "--timeout",
        type=whole(1, 86400),
        default=900,
        help="time limit of the whole bench, in seconds (default 900)",
    )
    engines.add_argument(
        "--logs", default="build/bench", help="directory for engine logs (default build/bench)"
    )
    add_json(engines)


def add_model(engines: argparse.ArgumentParser) -> None:
    engines.add_argument(
        "--model", choices=tuple(SHAPES), default="llama", help="architecture (default llama)"
    )
    engines.add_argument(
        "--layers",
        type=whole(1, 128),
        default=None,
        help="number of layers (default: that of the architecture)",
    )


def table_of(rows: Sequence[Sequence[str]]) -> Table:
    """Return ``rows`` as a table with the first row as its header."""
    head, *body = rows
    table = Table()
    for name in head:
        table.add_column(name, overflow="fold")
    for row in body:
        table.add_row(*row)
    return table
