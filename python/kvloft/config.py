"""Settings: where each value comes from, what is allowed, and one clear sentence for each mistake.

Sources in order of strength: vLLM's ``kv_connector_extra_config``, environment variables ``KVLOFT_*``, the YAML file named
by ``KVLOFT_CONFIG``, the default. This is the only file that reads the environment; it must know neither vLLM nor the
store, so anything that depends on the model (does a chunk hold whole blocks?) is checked where the model is known.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from kvloft.errors import ConfigError

ENV_PREFIX: Final = "KVLOFT_"
ENV_FILE: Final = "KVLOFT_CONFIG"
FROM_EXTRA: Final = "kv_connector_extra_config"
FROM_DEFAULT: Final = "default"

AUTO: Final = "auto"
"""As a server: one that engines start themselves."""
MAX_SOCKET_BYTES: Final = 107
"""Of a Unix socket's path."""

_UNITS: Final = {"": 1, "b": 1} | {
    f"{prefix}{kind}": base ** (power + 1) for power, prefix in enumerate("kmgt") for kind, base in (("ib", 1024), ("b", 1000))
}
_TTL_SECONDS: Final = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
MAX_TTL_S: Final = 3650 * 86400
_SECONDS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0}
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")


def parse_size(value: object, low: int = 4096, high: int = 1 << 60) -> int:
    """Bytes of ``"8GiB"``, ``"500MB"`` or a plain number; raises ValueError for anything else or out of range."""
    amount, unit = _quantity(value)
    if unit not in _UNITS:
        raise ValueError(value)
    size = amount * _UNITS[unit]
    if size != int(size) or not low <= size <= high:
        raise ValueError(value)
    return int(size)


def parse_seconds(value: object) -> float:
    """Seconds of ``"10s"``, ``"250ms"``, ``"2min"`` or a plain number; raises ValueError for anything else or more than an hour."""
    amount, unit = _quantity(value)
    if unit not in _SECONDS:
        raise ValueError(value)
    seconds = float(amount) * _SECONDS[unit]
    if seconds > 3600.0:
        raise ValueError(value)
    return seconds


Quota = int | float
"""Most of a tier: bytes, or as a float a part from 0.0 to 1.0."""


def parse_quota(value: object) -> Quota:
    """Bytes as an int of ``"8GiB"`` or another size, or a part of the whole as a float of ``"10%"`` or 0.1; raises ValueError.

    Up to 1.0, a number with a point is a part, as text too: YAML has 1.0 as a number, and a command line as text. Parts are
    millionths: what is less and not 0 is refused.
    """
    if isinstance(value, str) and re.fullmatch(r"\s*0*[01]\.[0-9]{1,9}\s*", value):
        value = float(value)
    if isinstance(value, float) and (value == 0.0 or 1e-6 <= value <= 1.0):
        return round(value, 6)
    match = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]{1,4})?)\s*%\s*", value) if isinstance(value, str) else None
    if match is None:
        return parse_size(value, low=0)
    part = float(Decimal(match[1]) / 100)
    if part > 1.0:
        raise ValueError(value)
    return part


def format_quota(quota: Quota) -> str:
    """Text that :func:`parse_quota` reads back."""
    return f"{Decimal(str(quota)) * 100:f}".rstrip("0").rstrip(".") + "%" if isinstance(quota, float) else format_size(quota)


def parse_ttl(value: object) -> int:
    """Whole seconds of ``"24h"``, ``"7d"``, ``"90min"``, ``"30s"`` or a plain number, from 1 to ten years; raises ValueError."""
    amount, unit = _quantity(value)
    seconds = amount * _TTL_SECONDS[unit] if unit in _TTL_SECONDS else Decimal(0)
    if seconds != int(seconds) or not 1 <= seconds <= MAX_TTL_S:
        raise ValueError(value)
    return int(seconds)


def format_ttl(seconds: int) -> str:
    """Text that :func:`parse_ttl` reads back."""
    return next((f"{seconds // each}{unit}" for unit, each in (("d", 86400), ("h", 3600)) if seconds % each == 0), f"{seconds}s")


def format_size(size_bytes: int) -> str:
    """The shortest exact text that :func:`parse_size` reads back to the same number."""
    for unit, base in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % base == 0:
            return f"{size_bytes // base}{unit}"
    return f"{size_bytes}B"


def size_text(size_bytes: int) -> str:
    """Bytes as people read them: up to four digits and a binary unit, "256 MiB" or "1.5 GiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def has_unit(value: object) -> bool:
    """Whether a size or an age that was read has one."""
    return _quantity(value)[1] != ""


def _quantity(value: object) -> tuple[Decimal, str]:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return Decimal(value), ""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(value)
    return Decimal(match[1]), match[2].lower()


def _parse_count(value: object, low: int, high: int) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(value)
    return value


def _parse_path(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError(value)
    value = os.path.expanduser(_parse_text(value))  # noqa: PTH111 (as below)
    if value.startswith("~"):
        raise ValueError(value)
    return os.path.abspath(value)  # noqa: PTH100 (plain strings cross into Rust)


def parse_socket(value: object) -> str | None:
    """The path in ``"unix:/run/user/1000/kvloft.sock"``, or a whole path; ValueError for anything else but None and "auto"."""
    if value is None or value == AUTO:
        return value
    if not isinstance(value, str) or not value.startswith(("unix:", "/")):
        raise ValueError(value)
    path = _parse_path(value.removeprefix("unix:"))
    if path is None or len(path.encode()) > MAX_SOCKET_BYTES:
        raise ValueError(value)
    return path


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    value.encode()  # lone surrogates have no UTF-8, and text is hashed and opened as UTF-8 (UnicodeError is a ValueError)
    return value


def _parse_choice(value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(value)
    return str(value)


class Kind(NamedTuple):
    """How a value is read (ValueError if it cannot be), what is allowed (completes "it must be ..."), how it is shown.

    ``null``: what null means, where a source has it; empty where it is not allowed.
    """

    parse: Callable[[object], object]
    allowed: str
    show: Callable[[Any], str] = str
    null: str = ""


def _size(low: int = 4096, high: int = 1 << 60, example: str = "") -> Kind:
    allowed = f"a size from {format_size(low)} to {format_size(high)}{example}"
    return Kind(partial(parse_size, low=low, high=high), allowed, format_size)


def _or_none(kind: Kind) -> Kind:
    def parse(value: object) -> object:
        return None if value is None else kind.parse(value)

    return Kind(parse, kind.allowed, lambda v: "(none)" if v is None else kind.show(v), "no limit")


def _choice(*allowed: str) -> Kind:
    return Kind(partial(_parse_choice, allowed=allowed), " or ".join(f'"{each}"' for each in allowed))


def _set(default: Any, kind: Kind) -> Any:
    """A field of `Config` that users may set."""
    return field(default=default, metadata={"kind": kind})


_SIZE: Final = _size(example=', such as "8GiB", "500MB" or a number of bytes')
_PATH: Final = Kind(_parse_path, "the path of a directory", lambda v: v or "(none)", "no disk tier")
_SERVER: Final = Kind(
    parse_socket,
    '"auto" or a path of at most 107 bytes such as "unix:/run/user/1000/kvloft/kvloft.sock"',
    lambda v: (v if v == AUTO else f"unix:{v}") if v else "(none)",
    "one of its own",
)
_TEXT: Final = Kind(_parse_text, "text", lambda v: repr(v) if v else "(empty)")
_THREADS: Final = Kind(partial(_parse_count, low=1, high=64), "a number from 1 to 64")
_FILE: Final = Kind(_parse_path, "the path of a YAML file", lambda v: v or "(none)", "none")
_QUOTA: Final = _or_none(Kind(parse_quota, 'a part such as "10%", or a size such as "8GiB"', format_quota))
_TTL: Final = _or_none(Kind(parse_ttl, 'a time from 1s to 3650d, such as "24h" or "7d"', format_ttl))
_TIME: Final = Kind(parse_seconds, 'a time from 0 to 1h, such as "10s", "250ms" or a number of seconds', lambda v: f"{v:g}s")


@dataclass(frozen=True, slots=True)
class Config:
    """Effective settings, and the one table of them. Sizes are bytes, times seconds; ``origins``: where each value came from."""

    host_size: int = _set(4 << 30, _SIZE)
    disk_path: str | None = _set(None, _PATH)
    disk_size: int = _set(64 << 30, _SIZE)
    namespace: str = _set("", _TEXT)
    save: Literal["all", "prompt"] = _set("all", _choice("all", "prompt"))
    eviction: Literal["adaptive", "lru"] = _set("adaptive", _choice("adaptive", "lru"))
    disk_threads: int = _set(2, _THREADS)
    load_timeout: float = _set(10.0, _TIME)
    on_pause: Literal["keep", "clear"] = _set("keep", _choice("keep", "clear"))
    kv_groups: Literal["auto", "one", "all"] = _set("auto", _choice("auto", "one", "all"))
    gpu_copies: Literal["kernels", "torch"] = _set("kernels", _choice("kernels", "torch"))
    staging_size: int = _set(80 << 20, _size(1 << 20, 1 << 30))
    compression: Literal["auto", "off"] = _set("auto", _choice("auto", "off"))
    salt_quota: int | float | None = _set(None, _QUOTA)
    salt_disk_quota: int | float | None = _set(None, _QUOTA)
    salt_ttl: int | None = _set(None, _TTL)
    salt_limits: str | None = _set(None, _FILE)
    server: str | None = _set(None, _SERVER)
    server_timeout: float = _set(0.005, _TIME)
    server_linger: float = _set(300.0, _TIME)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    bare_numbers: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Sizes and ages that were given without a unit."""

    @property
    def socket(self) -> str | None:
        """Path of the server's socket; None without a server."""
        return _auto_socket() if self.server == AUTO else self.server

    @property
    def disk_bytes(self) -> int:
        """Size of the disk tier: 0 without a disk_path."""
        return self.disk_size if self.disk_path is not None else 0

    def origin(self, key: str) -> str:
        """Where the value of ``key`` came from: a source's name, or "default"."""
        return self.origins.get(key, FROM_DEFAULT)


OF_LIMITS: Final = ("salt_quota", "salt_disk_quota", "salt_ttl", "salt_limits")
"""What each tenant may have: see `kvloft.limits`."""
OF_STORE: Final = ("host_size", "disk_path", "disk_size", "eviction", "disk_threads", *OF_LIMITS)
"""What a server is told, and an engine that uses one is not."""
KEYS: Final[Mapping[str, Kind]] = {f.name: f.metadata["kind"] for f in fields(Config) if f.metadata}


def load_config(
    extra: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None, *, extra_origin: str = FROM_EXTRA
) -> Config:
    """Merge all sources into a Config.

    ``extra`` is vLLM's kv_connector_extra_config, or what ``extra_origin`` names; ``environ`` defaults to the process environment.
    Raises ConfigError.
    """
    environ = os.environ if environ is None else environ
    layers = [_from_file(environ), _from_environ(environ), _from_mapping(extra or {}, extra_origin)]
    has_null = [True, False, extra_origin == FROM_EXTRA]  # a variable or a flag is text
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    bare_numbers: dict[str, int] = {}
    for layer, may_be_null in zip(layers, has_null, strict=True):  # weakest first; each is checked, also where a stronger one wins
        for key, (raw, origin) in layer.items():
            values[key] = value = _parse(key, raw, origin, may_be_null)
            origins[key] = origin
            bare_numbers.pop(key, None)
            if KEYS[key] in (_SIZE, _QUOTA, _TTL) and isinstance(value, int) and not has_unit(raw):
                bare_numbers[key] = value
    for key in ("disk_size", "salt_disk_quota"):
        if values.get(key) is not None and values.get("disk_path") is None:
            size = KEYS[key].show(values[key])
            raise ConfigError(f'{key} = "{size}" ({origins[key]}) does nothing without disk_path: set that, or leave {key} out.')
    misplaced = [key for key in OF_STORE if origins.get(key) == FROM_EXTRA]  # a file or an environment may be the server's, too
    if misplaced and values.get("server") not in (None, AUTO):
        raise ConfigError(
            f"{misplaced[0]} ({FROM_EXTRA}) does nothing with server: give it to `kvloft serve`, or leave server out."
        )
    return Config(**values, origins=origins, bare_numbers=bare_numbers)  # type: ignore[arg-type]  # each value was checked by its Kind


def describe(config: Config) -> list[tuple[str, str, str]]:
    """(key, value as text, where it came from) of every setting, in the order of the documentation."""
    return [(key, kind.show(getattr(config, key)), config.origin(key)) for key, kind in KEYS.items()]


_KUBERNETES: Final = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
"""Kubernetes sets such variables in every container for a Service whose name begins with "kvloft"; they are not settings."""

_Layer = dict[str, tuple[object, str]]


def _from_mapping(given: Mapping[str, object], origin: str) -> _Layer:
    return {_known(key, origin): (value, origin) for key, value in given.items()}


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


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``, for a process that it starts."""
    return {**os.environ, **changes}


def server_environment() -> dict[str, str]:
    """This process's environment for a server: without kvloft's settings, which it is told otherwise."""
    return {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}


def _auto_socket() -> str:
    """In the directory for such things that the system made for this user, or else in one that all of its processes know."""
    run = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [f"{run}/kvloft/auto.sock"] if os.path.isabs(run) and os.path.isdir(run) else []  # noqa: PTH112, PTH117 (plain strings)
    places.append(f"/tmp/kvloft-{os.geteuid()}/auto.sock")
    return next((place for place in places if len(place.encode()) <= MAX_SOCKET_BYTES), places[-1])


def _from_file(environ: Mapping[str, str]) -> _Layer:
    path = environ.get(ENV_FILE)
    if not path:
        return {}
    import yaml  # here and not above: it takes a fifth of a server's start, and few have such a file

    blame, wanted = f"{ENV_FILE} = {path!r} (environment)", "it must hold lines such as: host_size: 8GiB"
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 (a NUL in the name must be a ValueError here, too)
            text = file.read()
        document = yaml.safe_load(text)
    except RecursionError as e:
        raise ConfigError(f"{blame} is nested too deeply; {wanted}") from e
    except OSError as e:
        raise ConfigError(f"{blame} cannot be read ({e.strerror}); it must name a YAML file.") from e
    except (yaml.YAMLError, ValueError) as e:
        mark = getattr(e, "problem_mark", None)
        where = f" (see line {mark.line + 1})" if mark is not None else ""
        raise ConfigError(f"{blame} is not YAML{where}; {wanted}") from e
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{blame} holds a {type(document).__name__}; {wanted}")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)
    if twice := first_twice([key.value for key, _ in node.value]):  # PyYAML would take the last one without a word
        raise ConfigError(f"{blame} sets {twice} twice; leave one of the two lines out")
    return _from_mapping(document, f"file {path}")


def first_twice(keys: Sequence[str]) -> str | None:
    """The first key that is there twice."""
    return next((key for i, key in enumerate(keys) if key in keys[:i]), None)


def _known(key: object, origin: str, spell: Callable[[str], str] = str, written: str | None = None) -> str:
    if isinstance(key, str) and key in KEYS:
        return key
    import difflib

    near = difflib.get_close_matches(str(key).lower(), KEYS, n=1, cutoff=0.5)
    hint = f"did you mean {spell(near[0])}?" if near else f"known keys are {', '.join(map(spell, KEYS))}."
    raise ConfigError(f"{_shown(key) if written is None else written} ({origin}) is not a setting of kvloft; {hint}")


def _parse(key: str, raw: object, origin: str, may_be_null: bool) -> object:
    kind = KEYS[key]
    try:
        return kind.parse(raw)
    except (ValueError, TypeError, ArithmeticError):
        null = f", or null for {kind.null}" if kind.null and may_be_null else ""
        raise ConfigError(f"{key} = {_shown(raw)} ({origin}) is not allowed; it must be {kind.allowed}{null}.") from None


def _shown(value: object) -> str:
    if value is None:
        return "null"
    text = f'"{value}"' if isinstance(value, str) and value.isprintable() and '"' not in value else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
