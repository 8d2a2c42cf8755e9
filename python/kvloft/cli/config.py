"""`kvloft config`: the effective settings and where each came from. Reads settings only; opens no store."""

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from kvloft.config import Config, describe, load_config
from kvloft.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "config", help="print the effective configuration and where each value came from", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--extra", metavar="JSON", default="{}", help="kv_connector_extra_config as it would be given to vLLM")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the settings; 0, or raises ConfigError where a setting is wrong."""
    config = load_config(_extra(args.extra))
    if args.json:
        print(json.dumps(_as_json(config), indent=2))
        return 0
    table = Table("key", "value", "from")
    for row in describe(config):
        table.add_row(*row)
    Console().print(table)
    return 0


def _extra(text: str) -> dict[str, object]:
    try:
        extra = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"--extra {text!r} is not JSON ({e}); it must be an object of settings.") from e
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra {text!r} is a {type(extra).__name__}; it must be an object of settings.")
    return extra


def _as_json(config: Config) -> dict[str, dict[str, object]]:
    return {key: {"value": getattr(config, key), "from": origin} for key, _, origin in describe(config)}
