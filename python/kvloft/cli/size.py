"""Implements `kvloft size MODEL`, which computes the KV size per token and how many tokens fit in
host memory and on disk.

The command also computes the disk speed above which reading KV beats recomputing it. It reads only
the model's config.json, from a directory or the Hugging Face Hub. This module must not import vLLM
or torch.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from kvloft.config.units import parse_size, size_text
from kvloft.errors import ConfigError
from kvloft.seam.shape import COMPACT_SHARE

FULL: Final = frozenset({"full_attention", "attention", "global_attention"})
REACHING: Final = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
STATES: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})
STORED_SHARE: Final = COMPACT_SHARE + 8 / 4096
"""Compressed KV size, including its table, as a fraction of the bfloat16 size."""
DTYPE_BYTES: Final = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4} | dict.fromkeys(
    ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), 1
)
"""Size of a value in bytes, by vLLM's name for the data type."""
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
COMPRESSED: Final = frozenset({"auto", "bfloat16"})


@dataclass(frozen=True, slots=True)
class KvSize:
    """KV size per token, in bytes, for each kind of layer, summed over all ranks."""

    full_bytes: int
    reaching_bytes: int
    """KV size of layers with sliding windows or chunked local attention."""
    num_state_layers: int

    @property
    def token_bytes(self) -> int:
        """Return the KV size per token in bytes, excluding Mamba and gated delta net states."""
        return self.full_bytes + self.reaching_bytes


def add_parser(subparsers: Any) -> None:
    """Add this command to the argparse subparsers."""
    parser = subparsers.add_parser(
        "size",
        help="compute KV bytes per token and how many tokens fit in memory and on disk",
        description=(
            "Compute a model's KV bytes per token from its config.json, and how many tokens fit in "
            "host memory and on disk. With --prefill and --disk-read, also report whether reading "
            "KV from disk is faster than computing it."
        ),
        epilog=(
            "example: kvloft size meta-llama/Llama-3.1-8B --host-size 64GiB --prefill 27000 "
            "--disk-read 6GB/s"
        ),
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="config.json, its directory, or a model name on the Hugging Face Hub",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=DTYPE_BYTES,
        metavar="DTYPE",
        help="vLLM's KV cache dtype, for example fp8_e4m3 (default: auto, 2 bytes per value)",
    )
    parser.add_argument(
        "--host-size",
        type=_size,
        default=32 << 30,
        metavar="SIZE",
        help="host memory size (default: 32GiB)",
    )
    parser.add_argument("--disk-size", type=_size, metavar="SIZE", help="disk tier size")
    parser.add_argument(
        "--prefill",
        type=_num_tokens,
        metavar="TOKENS",
        help="the engine's prefill speed, in tokens per second",
    )
    parser.add_argument(
        "--disk-read",
        type=_rate,
        metavar="SIZE",
        help='disk read bandwidth, for example "6GB/s"',
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table (sizes in bytes)"
    )
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{text} is not a size; use a number with a unit, for example "500GiB"'
        ) from None


def _rate(text: str) -> int:
    return _size(text.removesuffix("/s"))


def _num_tokens(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the sizes and return 0. Raises ConfigError if config.json is unusable."""
    config = read_model_config(args.model)
    try:
        size = kv_size(config, DTYPE_BYTES[args.kv_cache_dtype])
    except ConfigError as e:
        raise ConfigError(f"{args.model}: {e}") from None
    figures = _figures(size, args)
    if args.json:
        print(json.dumps(figures, indent=2))
        return 0
    table = Table(show_header=False)
    for name, value in _rows(figures):
        table.add_row(name, value)
    Console().print(table)
    return 0


def read_model_config(model: str) -> dict[str, Any]:
    """Return the contents of a model's config.json.

    ``model`` is a directory, a config.json path, or a name on the Hugging Face Hub. Raises
    ConfigError if there is no usable config.json.
    """
    try:
        found = _find_config(model)
    except OSError as e:  # for example, the name is too long
        raise ConfigError(f"{model} cannot be read ({e}).") from e
    path = found or _from_hub(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read as JSON ({e}).") from e
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _find_config(model: str) -> Path | None:
    """Return the path of config.json, or None if ``model`` is not a path. Raises ConfigError if
    ``model`` is a path that contains no config.json, or OSError if the path is inaccessible.
    """
    path = Path(model)
    path = path if path.is_file() else path / "config.json"
    if path.is_file():
        return path
    if path.parent.is_dir() or not HUB_NAME.fullmatch(model):
        raise ConfigError(f"{path} does not exist; use a directory that contains config.json.")
    return None


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json"))
    except Exception as e:  # the hub client raises a dozen exception types
        raise ConfigError(
            f"no {model}/config.json found here, and downloading it from the hub failed: {e}"
        ) from e


def kv_size(config: dict[str, Any], value_bytes: int) -> KvSize:
    """Return a model's KV size per token. Raises ConfigError if a required field is missing."""
    layer_bytes = _layer_bytes(config, value_bytes)
    kinds = _layer_kinds(config)
    return KvSize(
        full_bytes=layer_bytes * sum(kind in FULL for kind in kinds),
        reaching_bytes=layer_bytes * sum(kind in REACHING for kind in kinds),
        num_state_layers=sum(kind in STATES for kind in kinds),
    )


def _layer_bytes(config: dict[str, Any], value_bytes: int) -> int:
    if "kv_lora_rank" in config:  # MLA: a latent shared by K and V, plus K's positional part
        return value_bytes * (_count(config, "kv_lora_rank") + _count(config, "qk_rope_head_dim"))
    num_heads = _count(config, "num_attention_heads")
    head_dim = config.get("head_dim") or _count(config, "hidden_size") // num_heads
    return 2 * value_bytes * int(config.get("num_key_value_heads") or num_heads) * int(head_dim)


def _layer_kinds(config: dict[str, Any]) -> list[str]:
    """Return the kind of each layer, using Hugging Face's names."""
    num_layers = _count(config, "num_hidden_layers")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds is None:
        return _interleaved(config, num_layers)
    if unknown := sorted(set(kinds) - FULL - REACHING - STATES - {"mlp", "moe"}):
        raise ConfigError(
            f"config.json has {unknown[0]} layers, which this command does not support."
        )
    return list(kinds)


def _interleaved(config: dict[str, Any], num_layers: int) -> list[str]:
    """Return each layer's kind for a config that does not list the kinds.

    Either every n-th layer has full attention, or all layers are of the same kind.
    """
    others = {
        "full_attention_interval": "linear_attention",
        "sliding_window_pattern": "sliding_attention",
    }
    for key, other in others.items():
        if nth := config.get(key):
            numbers = range(1, num_layers + 1)
            return ["full_attention" if number % nth == 0 else other for number in numbers]
    has_window = config.get("sliding_window") and config.get("use_sliding_window", True)
    return ["sliding_attention" if has_window else "full_attention"] * num_layers


def _count(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(
            f"config.json has no usable {key} ({value!r}), so the KV size cannot be computed."
        )
    return value


def _figures(size: KvSize, args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "token_bytes": size.token_bytes,
        "window_bytes": size.reaching_bytes,
        "num_state_layers": size.num_state_layers,
        "host_bytes": args.host_size,
        "host_tokens": args.host_size // size.token_bytes if size.token_bytes else 0,
    }
    if args.disk_size and size.token_bytes:
        figures |= {"disk_bytes": args.disk_size, "disk_tokens": args.disk_size // size.token_bytes}
    if args.kv_cache_dtype in COMPRESSED and size.token_bytes:
        stored = figures["compressed_token_bytes"] = int(size.token_bytes * STORED_SHARE)
        figures["host_tokens_compressed"] = args.host_size // stored
        if args.disk_size:
            figures["disk_tokens_compressed"] = args.disk_size // stored
        if args.disk_read:
            figures["disk_tokens_per_second_compressed"] = args.disk_read // stored
    if args.prefill:
        figures["prefill"] = args.prefill
        figures["break_even_bytes_per_second"] = args.prefill * size.token_bytes
    if args.disk_read and size.token_bytes:
        figures["disk_tokens_per_second"] = args.disk_read // size.token_bytes
    if args.prefill and args.disk_read:
        figures["disk_is_faster"] = args.disk_read > figures["break_even_bytes_per_second"]
    return figures


def _with_compressed(figures: dict[str, Any], name: str) -> str:
    compressed = figures.get(f"{name}_compressed")
    raw = f"{figures[name]:,}"
    return f"{raw} ({compressed:,} if compressed on a GPU)" if compressed is not None else raw


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    host = f"tokens in {size_text(figures['host_bytes'])} of host memory"
    yield "KV size per token", size_text(figures["token_bytes"])
    yield host, _with_compressed(figures, "host_tokens")
    if figures["window_bytes"]:
        yield "KV size per token, sliding-window layers", size_text(figures["window_bytes"])
    if num_states := figures["num_state_layers"]:
        where = "(one state per saved boundary, not included in these figures)"
        yield "layers with states", f"{num_states} {where}"
    if "disk_tokens" in figures:
        disk = f"tokens in {size_text(figures['disk_bytes'])} on disk"
        yield disk, _with_compressed(figures, "disk_tokens")
    if (least := figures.get("break_even_bytes_per_second")) is not None:
        yield "disk speed above which reading is faster", f"{size_text(least)}/s"
    if "disk_tokens_per_second" in figures:
        yield (
            "tokens read from disk per second",
            _with_compressed(figures, "disk_tokens_per_second"),
        )
    prefill, compressed = figures.get("prefill"), figures.get("disk_tokens_per_second_compressed")
    if figures.get("disk_is_faster") is True:
        yield "verdict", "reading is faster"
    elif prefill is not None and compressed is not None and compressed > prefill:
        yield "verdict", "reading is faster with compression on a GPU, slower without"
    elif "disk_is_faster" in figures:
        yield "verdict", "computing is faster: disk hits help only while the GPU is busy"
