"""Implements `kvloft bench copy`, which measures copy rates on this machine's GPU and prints or
plots them.

Invalid arguments and missing hardware are reported before the measurements. torch is imported only
when the command runs.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloft.errors import UnsupportedError

STATUS = (
    "Exit status: 0 success; 1 a copy failed or copied wrong bytes; 2 the benchmark cannot run on "
    "this machine."
)


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "bench",
        help="measure copy bandwidth on this machine's GPU",
        description=(
            "Measure copy bandwidth between host memory and this machine's GPU. Print medians and, "
            "as an upper bound, the bandwidth of one large copy from the same run."
        ),
    )
    copy = parser.add_subparsers(required=True, metavar="WHAT").add_parser(
        "copy",
        help=(
            "measure save and load bandwidth by page size, and the slowdown of concurrent "
            "computation"
        ),
        description=(
            "Measure save and load bandwidth by page size (relative to one large copy), and how "
            f"much concurrent computation slows down. {STATUS}"
        ),
    )
    copy.add_argument(
        "--mib",
        type=whole(256, 1024),
        default=1024,
        help="payload per measurement in MiB, from 256 to 1024 (default: 1024)",
    )
    copy.add_argument(
        "--plot",
        metavar="PNG",
        type=writable,
        help="also plot bandwidth by page size to a PNG file (requires matplotlib)",
    )
    add_json(copy)
    copy.set_defaults(run=run_copy)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return an argparse type for integers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer between {low} and {high}")
        return int(text)

    return parse


def writable(text: str) -> str:
    """Return ``text`` if it is the path of a writable file. argparse runs this check before the
    measurements, so that no results are lost.
    """
    path = Path(text).absolute()
    try:
        place = path if path.exists() else path.parent
        is_file = not path.is_dir() and path.parent.is_dir()
    except OSError:  # for example, a parent directory is not searchable
        is_file = False
    if not is_file or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument(
        "--json", metavar="FILE", type=writable, help="also write all measurements to FILE as JSON"
    )


def console() -> Console:
    """Return a console that does not truncate tables when the output is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 150)


def gpu_bytes(needed: Sequence[str] = ("torch", "vllm")) -> int:
    """Return the GPU's memory size.

    Raises UnsupportedError if there is no GPU, or if a ``needed`` module is not installed.
    """
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"{' and '.join(missing)} cannot be imported; run the benchmark in an environment with "
            "vLLM for CUDA"
        )
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("torch found no usable NVIDIA GPU")
    return int(torch.cuda.get_device_properties(0).total_memory)


def run_copy(args: argparse.Namespace) -> int:
    """Measure copies and return the exit status, as described in the help text."""
    screen = console()
    try:
        gpu_bytes(("torch", "matplotlib") if args.plot else ("torch",))
        from kvloft.bench import copy
        from kvloft.transfer.cuda.lanes import Tuning

        with screen.status("starting") as status:
            result = copy.run(
                payload_bytes=args.mib << 20,
                tuning=Tuning(),
                progress=status.update,
            )
    except (ImportError, UnsupportedError) as error:
        print(f"kvloft: the copy benchmark cannot run on this machine: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"kvloft: the copy benchmark failed: {error}", file=sys.stderr)
        return 1
    for table in _copy_tables(result):
        screen.print(table)
    write(args.json, result)
    if args.plot:
        plot_copy(result, args.plot)
    return 0


def _copy_tables(result: dict[str, Any]) -> list[Table]:
    ceiling, machine = result["ceiling"], result["machine"]
    columns = [
        text
        for what in ("save GB/s", "load GB/s", "both, per direction", "save, idle GPU")
        for text in (what, "of ceiling", "compressed")
    ]
    pages = Table(
        "page",
        *columns,
        title=(
            f"{machine['gpu']}, driver {machine['driver']}, {machine['date']}; one large copy, "
            f"GB/s: save {ceiling['save']:.1f}, load {ceiling['load']:.1f}, both "
            f"{ceiling['both']:.1f} per direction"
        ),
    )
    for row in result["pages"]:
        pages.add_row(f"{row['page_bytes'] / 1024:g} KiB", *_rates(row))
    for row in result.get("frames", ()):
        pages.add_row(f"64 KiB, frames {row['order']}", *_rates(row))
    names = ("copy by", "direction", "computation", "slowdown", "copy GB/s")
    work = Table(*names, title="Slowdown of computation during a copy")
    for row in result["interference"]:
        work.add_row(
            row["by"], row["copy"], row["work"], f"{row['slowdown']:.3f}", f"{row['gbps']:.1f}"
        )
    waits = Table(
        "copies by",
        "direction",
        "median ms",
        "max ms",
        title="Delay of an engine's own copies (128 KiB)",
    )
    for row in result.get("waits", ()):
        waits.add_row(row["by"], row["copy"], f"{row['median_ms']:.2f}", f"{row['max_ms']:.2f}")
    tag = Table("", "without tag GB/s", "with tag GB/s", title="Cost of the tag")
    for what in ("save", "load"):
        tag.add_row(
            what, f"{result['tag'][what + '_without']:.2f}", f"{result['tag'][what + '_with']:.2f}"
        )
    return [pages, work, waits, tag]


def _rates(row: dict[str, Any]) -> list[str]:
    """Return three table cells for each direction: the rate in GB/s, the rate as a share of the
    ceiling, and the rate in GB/s with compressed frames.
    """
    whats, compressed = ("save", "load", "both", "save_idle"), row.get("compressed", {})
    cells = []
    for what in whats:
        cells += [f"{row[what]:.2f}", f"{row[f'{what}_share']:.1%}"]
        cells.append(f"{compressed[what]:.2f}" if compressed else "-")
    return cells


def write(path: str | None, result: dict[str, Any]) -> None:
    """Write ``result`` as JSON to ``path`` if a path is given."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def plot_copy(result: dict[str, Any], path: str) -> None:
    """Write a PNG to ``path``. Raises ImportError if matplotlib is not installed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pages = [row["page_bytes"] / 1024 for row in result["pages"]]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for what, label, colour in (
        ("save", "save", "C0"),
        ("load", "load", "C1"),
        ("both", "both, per direction", "C2"),
    ):
        axes.plot(pages, [row[what] for row in result["pages"]], "o-", color=colour, label=label)
        compressed = [row["compressed"][what] for row in result["pages"] if "compressed" in row]
        if len(compressed) == len(pages):
            axes.plot(pages, compressed, "s--", color=colour, label=f"{label}, compressed")
        axes.axhline(
            result["ceiling"][what], color=colour, linestyle=":", label=f"one large copy, {what}"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(pages, [f"{page:g}" for page in pages])
    axes.set_ylim(0, 85 if any("compressed" in row for row in result["pages"]) else 60)
    axes.set_xlabel("page size, KiB")
    axes.set_ylabel("GB/s")
    axes.set_title(
        f"{result['machine']['gpu']}, driver {result['machine']['driver']}, "
        f"{result['machine']['date']}"
    )
    axes.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
