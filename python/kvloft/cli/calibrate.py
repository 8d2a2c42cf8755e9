"""`kvloft calibrate`: how kvloft copies on this machine's GPU, measured now. The measuring is in `kvloft.transfer.cuda`."""

import argparse
import importlib
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloft.errors import UnsupportedError

PAGES_KIB = (1, 2, 4, 8, 16, 18, 32, 64, 128, 256, 512, 1024, 2048)
PAGES = f"{', '.join(map(str, PAGES_KIB[:-1]))} or {PAGES_KIB[-1]} KiB"


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "calibrate", help="measure how to copy on this machine's GPU",
        description="Measure now which way of copying is faster on this machine's GPU, as a worker start would. Exit status: 0 "
        "measured, 2 it cannot run here.",
    )  # fmt: skip
    parser.add_argument("--page-kib", type=int, choices=PAGES_KIB, default=64, metavar="KIB", help=f"size of a page: {PAGES} (64)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 2 where there is no GPU."""
    try:
        found = importlib.import_module("kvloft.bench.calibration").calibration(args.page_kib << 10)
    except (ImportError, RuntimeError, UnsupportedError) as error:
        hint = "; run it in the environment that has vLLM for CUDA" if isinstance(error, ImportError) else ""
        print(f"kvloft: there is nothing to calibrate here: {error}{hint}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"summary": found.summary(), "seconds": found.seconds, "micros": found.micros}, indent=1))
        return 0
    table = Table("direction", "bytes", "staged, us", "direct, us", title=found.summary())
    for direction, routes in found.micros.items():
        for size, staged in routes["staged"].items():
            table.add_row(direction, size, f"{staged:.0f}", f"{routes['direct'][size]:.0f}")
    Console().print(table)
    return 0
