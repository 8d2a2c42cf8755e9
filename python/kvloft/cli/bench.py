"""`kvloft bench copy`, `engine` and `equality`: measure this machine's GPU. What measures is imported only when it runs."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloft.errors import UnsupportedError


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser("bench", help="measure copies, or a whole engine, on this machine's GPU", description=__doc__)
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    _add_copy(kinds)
    _add_engine(kinds)
    _add_equality(kinds)
    for kind in kinds.choices.values():
        kind.add_argument("--json", metavar="FILE", help="also write everything measured as JSON")


def _add_copy(kinds: Any) -> None:
    copy = kinds.add_parser("copy", help="GB/s of saves and loads by page size, beside the ceiling; what they cost computation")
    copy.add_argument("--mib", type=int, default=1024, help="payload of one measurement (default 1024)")
    copy.add_argument("--plot", metavar="PNG", help="also draw GB/s against page size (needs matplotlib)")
    copy.set_defaults(run=run_copy)


def _add_engine(kinds: Any) -> None:
    engine = kinds.add_parser("engine", help="TTFT and decode steps of vLLM alone, with OffloadingConnector and with kvloft")
    engine.add_argument("--connectors", default="none,native,kvloft", help="which, in this order (default none,native,kvloft)")
    engine.add_argument(
        "--phases", default="cold,ttft,wave,decode", help="of cold, ttft, wave, decode, tokens, load (default the first four)"
    )
    engine.add_argument("--context", type=int, default=32768, help="tokens of a long prompt (default 32768)")
    engine.add_argument("--kv-heads", type=int, default=8, help="KV heads of the model (default 8)")
    _add_sizes(engine, blocks=9000, host_gib=40)
    engine.set_defaults(run=run_engine)


def _add_equality(kinds: Any) -> None:
    equality = kinds.add_parser("equality", help="whether tokens and pages are the same whatever the cache did; fails if not")
    equality.add_argument("--setups", default="", help="which engines, in this order (default all; see kvloft/bench/equality.py)")
    equality.add_argument("--phases", default="prompts,crowd,load", help="of prompts, crowd, load, sleep (default the first three)")
    equality.add_argument("--at-once", type=int, default=3, help="engines that share the GPU (default 3)")
    equality.add_argument("--layers", type=int, default=32, help="layers of the model (default 32)")
    _add_sizes(equality, blocks=2000, host_gib=16)
    equality.set_defaults(run=run_equality)


def _add_sizes(engines: argparse.ArgumentParser, *, blocks: int, host_gib: int) -> None:
    """What every bench of whole engines asks for."""
    engines.add_argument("--blocks", type=int, default=blocks, help=f"blocks of 16 tokens in GPU memory (default {blocks})")
    engines.add_argument("--host-gib", type=int, default=host_gib, help=f"host memory of each cache (default {host_gib})")
    engines.add_argument("--timeout", type=float, default=900.0, help="seconds for everything (default 900)")
    engines.add_argument("--logs", default="build/bench", help="folder for the engines' logs (default build/bench)")


def run_equality(args: argparse.Namespace) -> int:
    """Compare tokens and pages; 1 where any was not as it must be."""
    console = Console()
    equality = importlib.import_module("kvloft.bench.equality")
    model = {"num_hidden_layers": args.layers}
    results = equality.run(
        setups=args.setups.split(",") if args.setups else equality.DEFAULT_SETUPS, phases=args.phases.split(","),
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
    """Measure copies; 1 where there is no GPU to measure or a copy was wrong."""
    console = Console()
    try:
        copy, lanes, compiler = (
            importlib.import_module(name)
            for name in ("kvloft.bench.copy", "kvloft.transfer.cuda.lanes", "kvloft.transfer.cuda.compile")
        )
        with console.status("starting") as status:
            result = copy.run(
                payload_bytes=args.mib << 20, tuning=lanes.Tuning(), cache_dir=compiler.default_cache_dir(),
                progress=status.update,
            )  # fmt: skip
    except (ImportError, RuntimeError, UnsupportedError) as error:
        print(f"kvloft: the copy bench cannot run here: {error}", file=sys.stderr)
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
        "page", "save GB/s", "of ceiling", "load GB/s", "of ceiling", "both, each", "of ceiling",
        title=f"{machine['gpu']}, driver {machine['driver']}, {machine['date']}: one large copy {ceiling['save']:.1f} out, "
        f"{ceiling['load']:.1f} in, {ceiling['both']:.1f} each both ways",
    )  # fmt: skip
    for row in result["pages"]:
        cells = [text for what in ("save", "load", "both") for text in (f"{row[what]:.2f}", f"{row[what] / ceiling[what]:.1%}")]
        pages.add_row(f"{row['page_bytes'] / 1024:g} KiB", *cells)
    for row in result.get("frames", ()):
        cells = [text for what in ("save", "load", "both") for text in (f"{row[what]:.2f}", f"{row[what] / ceiling[what]:.1%}")]
        pages.add_row(f"64 KiB, frames {row['order']}", *cells)
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


def run_engine(args: argparse.Namespace) -> int:
    """Measure engines; 1 where one of them failed."""
    console = Console()
    engine = importlib.import_module("kvloft.bench.engine")
    options = {
        "num_blocks": args.blocks, "host_bytes": args.host_gib << 30, "context": args.context,
        "model": {"num_key_value_heads": args.kv_heads},
    }  # fmt: skip
    with console.status("starting") as status:
        results = engine.run(
            connectors=args.connectors.split(","), phases=args.phases.split(","), options=options, log_dir=Path(args.logs),
            timeout_s=args.timeout, progress=status.update,
        )  # fmt: skip
    console.print(_table(engine.table(results)))
    for what, same in engine.same_tokens(results).items():
        console.print(f"{what}: {same}")
    _write(args.json, results)
    failed = [name for name, result in results.items() if "error" in result]
    for name in failed:
        print(f"kvloft: {name} {results[name]['error']}", file=sys.stderr)
    return 1 if failed else 0


def _table(rows: Sequence[Sequence[str]]) -> Table:
    head, *body = rows
    table = Table(*head)
    for row in body:
        table.add_row(*row)
    return table


def _write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
