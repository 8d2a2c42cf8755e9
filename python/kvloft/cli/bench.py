"""`kvloft bench copy`, `engine` and `equality`: measure this machine's GPU. What measures is imported only when it runs.

All that can be wrong with the arguments, or with the machine, is said before anything starts.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloft.errors import UnsupportedError

STATUS = "Exit status: 0 all right, 1 something failed or was not equal, 2 it cannot run here."


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "bench", help="measure copies, or a whole engine, on this machine's GPU",
        description="Measure this machine's GPU. Medians; each figure beside its ceiling or its rivals, of the same run.",
    )  # fmt: skip
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    _add_copy(kinds)
    _add_engine(kinds)
    _add_equality(kinds)
    for kind in kinds.choices.values():
        kind.add_argument("--json", metavar="FILE", type=_writable, help="also write everything measured to FILE, as JSON")


def _names(*allowed: str) -> Callable[[str], list[str]]:
    """An argparse type: some of ``allowed``, separated by commas, none twice."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(allowed)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice")
        return names

    return parse


def _whole(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number within limits."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {low} to {high}")
        return int(text)

    return parse


def _writable(text: str) -> str:
    """An argparse type: a file that can be written, so that what took minutes is not lost for a wrong path."""
    path = Path(text).absolute()
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return text


def _add_copy(kinds: Any) -> None:
    copy = kinds.add_parser(
        "copy", help="GB/s of saves and loads by page size, beside the ceiling; what they cost computation",
        description=f"GB/s of saves and loads by page size, in turns with one large copy; what they cost computation. {STATUS}",
    )  # fmt: skip
    copy.add_argument(
        "--mib", type=_whole(64, 1024), default=1024, help="payload of one measurement, MiB, 64 to 1024 (default 1024)"
    )
    copy.add_argument("--plot", metavar="PNG", type=_writable, help="also draw GB/s against page size (needs matplotlib)")
    copy.set_defaults(run=run_copy)


def _add_engine(kinds: Any) -> None:
    engine = kinds.add_parser(
        "engine", help="TTFT and decode steps of vLLM alone, with OffloadingConnector and with kvloft",
        description=f"First tokens and decode steps of vLLM alone, with OffloadingConnector and with kvloft, on one GPU. {STATUS}",
    )  # fmt: skip
    names, phases = ("none", "native", "kvloft"), ("cold", "ttft", "wave", "decode", "attached")
    engine.add_argument("--connectors", type=_names(*names), default=list(names), help=f"which of {','.join(names)} (default all)")
    engine.add_argument(
        "--phases", type=_names(*phases), default=list(phases[:-1]),
        help="which of cold (first tokens of new prompts), ttft (of known ones), wave (eight prompts at once), decode (steps "
        "alone, beside saves and beside loads), attached (new prompts with the connector and without it, in one process); "
        "default all but the last",
    )  # fmt: skip
    engine.add_argument(
        "--context", type=_whole(2048, 40000), default=32768, help="tokens of a long prompt, 2048 to 40000 (default 32768)"
    )
    engine.add_argument("--kv-heads", type=int, choices=(1, 2, 4, 8, 16, 32), default=8, help="KV heads of the model (default 8)")
    engine.add_argument("--one-by-one", action="store_true", help="one engine after the other, which takes less GPU memory")
    _add_sizes(engine, blocks=9000, host_gib=40)
    engine.set_defaults(run=run_engine)


def _add_equality(kinds: Any) -> None:
    equality = kinds.add_parser(
        "equality", help="whether tokens and pages are the same whatever the cache did; fails if not",
        description=f"Compares greedy tokens, and loaded pages byte for byte, with those of vLLM without any cache. {STATUS}",
    )  # fmt: skip
    equality.add_argument(
        "--setups", default="", help="which engines, in this order (default all but hnd-sleep; a wrong name lists them)"
    )
    equality.add_argument(
        "--phases", type=_names("prompts", "crowd", "load", "sleep"), default=["prompts", "crowd", "load"],
        help="which of prompts, crowd, load, sleep (default the first three)",
    )  # fmt: skip
    equality.add_argument("--at-once", type=_whole(1, 16), default=3, help="engines that share the GPU (default 3)")
    equality.add_argument("--layers", type=_whole(1, 128), default=32, help="layers of the model (default 32)")
    _add_sizes(equality, blocks=2000, host_gib=16)
    equality.set_defaults(run=run_equality)


def _add_sizes(engines: argparse.ArgumentParser, *, blocks: int, host_gib: int) -> None:
    """What every bench of whole engines asks for."""
    engines.add_argument(
        "--blocks", type=_whole(64, 1 << 24), default=blocks, help=f"blocks of 16 tokens in GPU memory (default {blocks})"
    )
    engines.add_argument(
        "--host-gib", type=_whole(1, 4096), default=host_gib, help=f"host memory of each cache, GiB (default {host_gib})"
    )
    engines.add_argument("--timeout", type=_whole(1, 86400), default=900, help="seconds for everything (default 900)")
    engines.add_argument("--logs", default="build/bench", help="folder for the engines' logs (default build/bench)")


def _console() -> Console:
    """Tables that are not cut where nobody looks at a terminal."""
    return Console(width=None if sys.stdout.isatty() else 150)


def run_equality(args: argparse.Namespace) -> int:
    """Compare tokens and pages; 1 where any was not as it must be, 2 where nothing can be compared."""
    console = _console()
    equality, engine = (importlib.import_module(f"kvloft.bench.{name}") for name in ("equality", "engine"))
    try:
        setups = _names(*equality.SETUPS)(args.setups) if args.setups else equality.DEFAULT_SETUPS
        engine.gpu_bytes()
    except argparse.ArgumentTypeError as error:
        print(f"kvloft: --setups: {error}", file=sys.stderr)
        return 2
    except UnsupportedError as error:
        print(f"kvloft: the equality bench cannot run here: {error}", file=sys.stderr)
        return 2
    model = {"num_hidden_layers": args.layers}
    results = equality.run(
        setups=setups, phases=args.phases,
        options=equality.options(num_blocks=args.blocks, host_bytes=args.host_gib << 30, model=model), log_dir=Path(args.logs),
        at_once=args.at_once, timeout_s=args.timeout, progress=lambda text: console.print(text, style="dim"),
    )  # fmt: skip
    console.print(_table(equality.table(results)))
    _write(args.json, equality.summary(results))
    problems = equality.problems(results)
    for problem in problems:
        print(f"kvloft: {problem}", file=sys.stderr)
    return 1 if problems else 0


def run_copy(args: argparse.Namespace) -> int:
    """Measure copies; 1 where a copy was wrong or broke, 2 where there is nothing to measure."""
    console = _console()
    try:
        importlib.import_module("kvloft.bench.engine").gpu_bytes(("torch",))
        copy, lanes, compiler = (
            importlib.import_module(name)
            for name in ("kvloft.bench.copy", "kvloft.transfer.cuda.lanes", "kvloft.transfer.cuda.compile")
        )
        with console.status("starting") as status:
            result = copy.run(
                payload_bytes=args.mib << 20, tuning=lanes.Tuning(), cache_dir=compiler.default_cache_dir(),
                progress=status.update,
            )  # fmt: skip
    except (ImportError, UnsupportedError) as error:
        print(f"kvloft: the copy bench cannot run here: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"kvloft: the copy bench failed: {error}", file=sys.stderr)
        return 1
    for table in _copy_tables(result):
        console.print(table)
    _write(args.json, result)
    if args.plot:
        importlib.import_module("kvloft.bench.plot").plot_copy(result, args.plot)
    return 0


def _copy_tables(result: dict[str, Any]) -> list[Table]:
    ceiling, machine = result["ceiling"], result["machine"]
    pages = Table(
        "page", "save GB/s", "of ceiling", "load GB/s", "of ceiling", "both, each", "of ceiling", "save, idle GPU", "of ceiling",
        title=f"{machine['gpu']}, driver {machine['driver']}, {machine['date']}: one large copy {ceiling['save']:.1f} out, "
        f"{ceiling['load']:.1f} in, {ceiling['both']:.1f} each both ways",
    )  # fmt: skip
    for row in result["pages"]:
        pages.add_row(f"{row['page_bytes'] / 1024:g} KiB", *_rates(row))
    for row in result.get("frames", ()):
        pages.add_row(f"64 KiB, frames {row['order']}", *_rates(row))
    beside = Table("copy by", "direction", "beside", "its time, times alone", "copy GB/s", title="What a running copy costs")
    for row in result["beside"]:
        beside.add_row(row["by"], row["copy"], row["work"], f"{row['slowdown']:.3f}", f"{row['gbps']:.1f}")
    waits = Table("copies by", "direction", "median ms", "longest ms", title="What 128 KiB of others wait")
    for row in result.get("waits", ()):
        waits.add_row(row["by"], row["copy"], f"{row['median_ms']:.2f}", f"{row['max_ms']:.2f}")
    tag = Table("", "without tag GB/s", "with tag GB/s", title="Price of the tag")
    for what in ("save", "load"):
        tag.add_row(what, f"{result['tag'][what + '_without']:.2f}", f"{result['tag'][what + '_with']:.2f}")
    return [pages, beside, waits, tag]


def _rates(row: dict[str, Any]) -> list[str]:
    """GB/s in each direction, and the median share of the ceiling measured right before."""
    whats = ("save", "load", "both", "save_idle")
    return [text for what in whats for text in (f"{row[what]:.2f}", f"{row[f'{what}_share']:.1%}")]


def run_engine(args: argparse.Namespace) -> int:
    """Measure engines; 1 where one of them failed, 2 where none can run."""
    console = _console()
    engine = importlib.import_module("kvloft.bench.engine")
    model = {"num_key_value_heads": args.kv_heads}
    try:
        room = engine.fit_together(len(args.connectors), args.blocks, model, engine.gpu_bytes())
    except UnsupportedError as error:
        print(f"kvloft: the engine bench cannot run here: {error}", file=sys.stderr)
        return 2
    together = room and not args.one_by_one
    if not together:
        console.print("One engine after the other: what changes on the machine meanwhile counts as their difference.", style="dim")
    options = {"num_blocks": args.blocks, "host_bytes": args.host_gib << 30, "context": args.context, "model": model}
    try:
        with console.status("starting") as status:
            results = engine.run(
                connectors=args.connectors, phases=args.phases, options=options, log_dir=Path(args.logs), timeout_s=args.timeout,
                together=together, progress=status.update,
            )  # fmt: skip
    except UnsupportedError as error:
        print(f"kvloft: there is nothing to measure: {error}", file=sys.stderr)
        return 2
    console.print(_table(engine.table(results)))
    _write(args.json, results)
    failed = [name for name, result in results.items() if "error" in result]
    for name in failed:
        print(f"kvloft: {name} {results[name]['error']}", file=sys.stderr)
    return 1 if failed else 0


def _table(rows: Sequence[Sequence[str]]) -> Table:
    head, *body = rows
    table = Table()
    for name in head:
        table.add_column(name, overflow="fold")
    for row in body:
        table.add_row(*row)
    return table


def _write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
