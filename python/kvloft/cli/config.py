"""Implements `kvloft config`, which prints the effective settings and their sources.

The command checks the settings without a model, and never opens a store or creates a directory.
"""

import argparse
import json
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table

from kvloft.cli import warn
from kvloft.cli.connection import available_bytes
from kvloft.config.sources import describe, first_twice, load_config
from kvloft.config.table import AUTO, OF_STORE, Config
from kvloft.errors import ConfigError
from kvloft.machine import refuse_here, warnings

MAX_SHOWN: Final = 200
"""Maximum number of characters that an error message quotes from an invalid --extra argument."""
NOT_CHECKED: Final = (
    "Not checked: whether disk_path is in use, and whether kvloft supports the model. An engine "
    "checks both at startup."
)


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "config",
        help="print the effective settings and their sources",
        description=(
            "Print the effective settings and the source of each value: vLLM's extra config "
            "(--extra), the environment (such as KVLOFT_HOST_SIZE), the YAML file in "
            "KVLOFT_CONFIG, or the default. Also run all checks that do not need a model. Exit "
            "status: 0 if the settings are valid (warnings go to stderr), 2 if an engine would not "
            "start."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--extra",
        metavar="JSON",
        default="{}",
        help="kv_connector_extra_config, as passed to vLLM",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the settings and return 0. Raises ConfigError if an engine could not start with these
    settings.
    """
    config = load_config(parse_extra(args.extra))
    refuse_here(config, available_bytes())
    for warning in warnings(config):
        warn(f"warning: {warning}")
    if args.json:
        void = not_ours(config)
        values = {
            key: {"value": None if key in void else getattr(config, key), "from": origin}
            for key, _, origin in rows(config)
        }
        print(json.dumps(values, indent=2))
        return 0
    table = Table("key", Column("value", overflow="fold"), Column("from", overflow="fold"))
    for row in rows(config):
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(NOT_CHECKED, style="dim")
    return 0


def not_ours(config: Config) -> tuple[str, ...]:
    """Return the settings that have no effect because the server sets them."""
    return OF_STORE if config.server not in (None, AUTO) else ()


def rows(config: Config) -> list[tuple[str, str, str]]:
    """Return the rows of `describe`, and mark the settings that the server sets."""
    void = not_ours(config)
    return [
        (key, *(("(set by the server)", "kvloft serve") if key in void else rest))
        for key, *rest in describe(config)
    ]


def parse_extra(text: str) -> dict[str, object]:
    """Parse ``--extra``. Raises ConfigError if the value is not a JSON object or repeats a key."""
    shown = repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
    try:
        extra = json.loads(text, object_pairs_hook=_each_once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"--extra {shown} must be a JSON object of settings ({e}).") from e
    if not isinstance(extra, dict):
        raise ConfigError(
            f"--extra {shown} must be a JSON object of settings, not {type(extra).__name__}."
        )
    return extra


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if twice := first_twice([name for name, _ in pairs]):
        raise ConfigError(f"--extra sets {twice} twice; remove one.")
    return dict(pairs)
