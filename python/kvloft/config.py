"""Settings: where each value comes from, what is allowed, and one clear sentence for each mistake.

Sources in order of strength: vLLM's ``kv_connector_extra_config``, environment variables ``KVLOFT_*``, the YAML file named
by ``KVLOFT_CONFIG``, the default. This is the only file that reads the environment; it must know neither vLLM nor the
store, so anything that depends on the model (does a chunk hold whole blocks?) is checked where the model is known.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Final, Literal, NamedTuple, cast

import yaml

from kvloft.errors import ConfigError

ENV_PREFIX: Final = "KVLOFT_"
ENV_FILE: Final = "KVLOFT_CONFIG"
FROM_EXTRA: Final = "kv_connector_extra_config"
FROM_DEFAULT: Final = "default"

Save = Literal["all", "prompt"]
Eviction = Literal["lrfu", "lru"]
GpuCopies = Literal["kernels", "torch"]
OnPause = Literal["keep", "clear"]

_UNITS: Final = {"": 1, "b": 1} | {
    f"{prefix}{kind}": base ** (power + 1) for power, prefix in enumerate("kmgt") for kind, base in (("ib", 1024), ("b", 1000))
}
_SECONDS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0}
_MIN_SIZE: Final = 4096
_MAX_SIZE: Final = 1 << 60
_MAX_TIMEOUT_S: Final = 3600.0
_MAX_THREADS: Final = 256
_MAX_CHUNK_TOKENS: Final = 1 << 20
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class Config:
    """Effective settings. Sizes are bytes, times are seconds; ``origins`` says where each value came from."""

    host_size: int = 4 << 30
    disk_path: str | None = None
    disk_size: int = 64 << 30
    chunk_tokens: int | Literal["auto"] = "auto"
    namespace: str = ""
    save: Save = "all"
    eviction: Eviction = "lrfu"
    disk_threads: int = 2
    load_timeout: float = 10.0
    on_pause: OnPause = "keep"
    gpu_copies: GpuCopies = "kernels"
    staging_size: int = 80 << 20
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def disk_bytes(self) -> int:
        """Size of the disk tier: 0 without a disk_path."""
        return self.disk_size if self.disk_path is not None else 0

    def origin(self, key: str) -> str:
        """Where the value of ``key`` came from: a source's name, or "default"."""
        return self.origins.get(key, FROM_DEFAULT)


class KeySpec(NamedTuple):
    """One key: how its value is read, what is allowed (completes "it must be ..."), what it is for, how it is shown."""

    parse: Callable[[object], object]
    allowed: str
    meaning: str
    show: Callable[[object], str] = str


def parse_size(value: object) -> int:
    """Bytes of ``"8GiB"``, ``"500MB"`` or a plain number; raises ValueError for anything else or out of range."""
    amount, unit = _quantity(value)
    if unit not in _UNITS:
        raise ValueError(value)
    size = amount * _UNITS[unit]
    if size != int(size) or not _MIN_SIZE <= size <= _MAX_SIZE:
        raise ValueError(value)
    return int(size)


def parse_seconds(value: object) -> float:
    """Seconds of ``"10s"``, ``"250ms"``, ``"2min"`` or a plain number; raises ValueError for anything else or out of range."""
    amount, unit = _quantity(value)
    if unit not in _SECONDS:
        raise ValueError(value)
    seconds = float(amount) * _SECONDS[unit]
    if seconds > _MAX_TIMEOUT_S:
        raise ValueError(value)
    return seconds


def format_size(size_bytes: int) -> str:
    """The shortest exact text that :func:`parse_size` reads back to the same number."""
    for unit, base in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % base == 0:
            return f"{size_bytes // base}{unit}"
    return str(size_bytes)


def size_text(size_bytes: int) -> str:
    """Bytes as people read them: up to four digits and a binary unit, "256 MiB" or "1.5 GiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _quantity(value: object) -> tuple[Decimal, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(value)
    if isinstance(value, int | float):
        if not math.isfinite(value) or value < 0:
            raise ValueError(value)
        return Decimal(value), ""
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(value)
    return Decimal(match[1]), match[2].lower()


def _parse_count(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(value)
        return value

    return parse


def _parse_chunk_tokens(value: object) -> int | str:
    return "auto" if value == "auto" else _parse_count(1, _MAX_CHUNK_TOKENS)(value)


def _parse_path(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(value)
    value.encode()  # the path crosses into Rust as UTF-8
    value = os.path.expanduser(value)  # noqa: PTH111 (as below)
    if value.startswith("~"):
        raise ValueError(value)
    return os.path.abspath(value)  # noqa: PTH100 (plain strings cross into Rust)


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    value.encode()  # lone surrogates have no UTF-8, and the namespace is hashed as UTF-8 (UnicodeError is a ValueError)
    return value


def _choice(*allowed: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in allowed:
            raise ValueError(value)
        return value

    return parse


def _parse_staging_size(value: object) -> int:
    size = parse_size(value)
    if not 1 << 20 <= size <= 1 << 30:
        raise ValueError(value)
    return size


_SIZE_ALLOWED: Final = 'a size from 4KiB to 1048576TiB, such as "8GiB", "500MB" or a number of bytes'
KEYS: Final[Mapping[str, KeySpec]] = {
    "host_size": KeySpec(parse_size, _SIZE_ALLOWED, "host memory for cached KV", lambda v: format_size(cast("int", v))),
    "disk_path": KeySpec(
        _parse_path,
        "the path of a directory, or null for no disk tier",
        "directory of the disk tier",
        lambda v: str(v or "(none)"),
    ),
    "disk_size": KeySpec(parse_size, _SIZE_ALLOWED, "cap of the disk tier, never exceeded", lambda v: format_size(cast("int", v))),
    "chunk_tokens": KeySpec(
        _parse_chunk_tokens,
        '"auto" or a number of tokens from 1 to 1048576',
        "tokens in a chunk: a multiple of vLLM's block size",
    ),
    "namespace": KeySpec(_parse_text, "text", "keeps caches of one model apart", lambda v: repr(v) if v else "(empty)"),
    "save": KeySpec(
        _choice("all", "prompt"), '"all" or "prompt"', "what of a request is saved: all of it, or not what it generates"
    ),
    "eviction": KeySpec(_choice("lrfu", "lru"), '"lrfu" or "lru"', "which chunks leave first"),
    "disk_threads": KeySpec(_parse_count(1, _MAX_THREADS), "a number from 1 to 256", "threads that read and write the disk tier"),
    "load_timeout": KeySpec(
        parse_seconds,
        'a time from 0 to 1h, such as "10s", "250ms" or a number of seconds',
        "how long a request waits for the disk before it takes what is in host memory",
        lambda v: f"{v:g}s",
    ),
    "on_pause": KeySpec(
        _choice("keep", "clear"), '"keep" or "clear"', "what a pause or sleep that clears vLLM's caches does to this one"
    ),
    "gpu_copies": KeySpec(
        _choice("kernels", "torch"), '"kernels" or "torch"', "how KV leaves and enters a GPU: our kernels, or slow copies by torch"
    ),
    "staging_size": KeySpec(
        _parse_staging_size,
        "a size from 1MiB to 1GiB",
        "GPU memory of the staging ring of each direction",
        lambda v: format_size(cast("int", v)),
    ),
}


def load_config(extra: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Merge all sources into a Config.

    ``extra`` is vLLM's kv_connector_extra_config; ``environ`` defaults to the process environment. Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    layers = [_from_file(environ), _from_environ(environ), _from_extra(extra or {})]
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for layer in layers:  # weakest first; every layer is checked, also where a stronger one wins
        for key, (raw, origin) in layer.items():
            values[key] = _parse(key, raw, origin)
            origins[key] = origin
    if "disk_size" in values and values.get("disk_path") is None:
        size = format_size(cast("int", values["disk_size"]))
        raise ConfigError(
            f'disk_size = "{size}" ({origins["disk_size"]}) does nothing without disk_path: set that, or leave disk_size out.'
        )
    return Config(**values, origins=origins)  # type: ignore[arg-type]  # each value was checked by its KeySpec


def describe(config: Config) -> list[tuple[str, str, str]]:
    """(key, value as text, where it came from) of every setting, in the order of the documentation."""
    names = [f.name for f in fields(config) if f.name != "origins"]
    return [(name, KEYS[name].show(getattr(config, name)), config.origin(name)) for name in names]


_KUBERNETES: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
"""Kubernetes sets such variables in every container for a Service whose name begins with "kvloft"; nobody meant a setting."""

_Layer = dict[str, tuple[object, str]]


def _from_extra(extra: Mapping[str, object]) -> _Layer:
    return {_known(key, FROM_EXTRA): (value, FROM_EXTRA) for key, value in extra.items()}


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and name != ENV_FILE and value and not _KUBERNETES.search(name):
            origin = f"environment variable {name}"
            suffix = name.removeprefix(ENV_PREFIX)
            key = suffix.lower() if suffix.isupper() else suffix
            layer[_known(key, "environment", lambda k: f"{ENV_PREFIX}{k.upper()}", name)] = (value, origin)
    return layer


def engine_environment(names: Iterable[str]) -> list[str]:
    """``NAME=value`` of those variables that are set: not kvloft's settings, but the engine's that nothing else shows."""
    return [f"{name}={os.environ[name]}" for name in names if name in os.environ]


def _from_file(environ: Mapping[str, str]) -> _Layer:
    path = environ.get(ENV_FILE)
    if not path:
        return {}
    blame = f"{ENV_FILE} = {path!r} (environment)"
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (a NUL in the name must be a ValueError here, too)
            text = file.read()
        document = yaml.safe_load(text)
    except RecursionError as e:
        raise ConfigError(f"{blame} is nested too deeply; it must hold lines such as: host_size: 8GiB") from e
    except OSError as e:
        raise ConfigError(f"{blame} cannot be read ({e.strerror}); it must name a YAML file.") from e
    except (yaml.YAMLError, ValueError) as e:
        mark = getattr(e, "problem_mark", None)
        where = f" (see line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"{blame} is not YAML{where}; it must hold lines such as: host_size: 8GiB") from e
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{blame} holds a {type(document).__name__}; it must hold lines such as: host_size: 8GiB")
    if twice := _first_twice(text):  # PyYAML would take the last one without a word
        raise ConfigError(f"{blame} sets {twice} twice; leave one of the two lines out")
    return {_known(key, f"file {path}"): (value, f"file {path}") for key, value in document.items()}


def _first_twice(text: str) -> str | None:
    """The first key that a YAML mapping has twice."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    keys = [key.value for key, _ in node.value]
    return next((key for i, key in enumerate(keys) if key in keys[:i]), None)


def _known(key: object, origin: str, spell: Callable[[str], str] = str, written: str | None = None) -> str:
    if isinstance(key, str) and key in KEYS:
        return key
    near = difflib.get_close_matches(str(key).lower(), KEYS, n=1, cutoff=0.5)
    hint = f"did you mean {spell(near[0])}?" if near else f"known keys are {', '.join(map(spell, KEYS))}."
    raise ConfigError(f"{_shown(key) if written is None else written} ({origin}) is not a setting of kvloft; {hint}")


def _parse(key: str, raw: object, origin: str) -> object:
    try:
        return KEYS[key].parse(raw)
    except (ValueError, TypeError, ArithmeticError):
        raise ConfigError(f"{key} = {_shown(raw)} ({origin}) is not allowed; it must be {KEYS[key].allowed}.") from None


def _shown(value: object) -> str:
    if value is None:
        return "null"
    text = f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
