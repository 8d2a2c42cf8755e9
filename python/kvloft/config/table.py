"""Defines each setting's name, default, allowed values, parser and formatter."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from kvloft.config.environment import MAX_SOCKET_BYTES, auto_socket
from kvloft.config.units import (
    HintError,
    format_quota,
    format_size,
    format_ttl,
    parse_quota,
    parse_seconds,
    parse_size,
    parse_ttl,
)

FROM_DEFAULT: Final = "default"
"""The origin of a setting that no source sets."""
MIB: Final = 1 << 20
GIB_BELOW: Final = 1024
"""A size below this value that has no unit was probably meant in GiB."""
AUTO: Final = "auto"
"""``server`` value that makes the first engine start a server."""


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
    if url := re.fullmatch(r"(file:|[A-Za-z][A-Za-z0-9+.-]*://)(.*)", value.strip()):
        is_file = url[1].lower().startswith("file:")
        fix = f"use /{url[2].lstrip('/')}" if is_file else "use a path on this machine"
        raise HintError(f"is a URL; {fix}.")
    value = os.path.expanduser(_parse_text(value))  # noqa: PTH111
    if value.startswith("~"):
        raise ValueError(value)
    return os.path.abspath(value)  # noqa: PTH100 - a str for Rust


def parse_socket(value: object) -> str | None:
    """Parse a socket path. Return None and "auto" unchanged. Raises ValueError."""
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
    # Text is later encoded as UTF-8, which fails for lone surrogates. UnicodeError is a
    # ValueError.
    value.encode()
    return value


def _parse_choice(value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(value)
    return str(value)


class Setting(NamedTuple):
    """A setting's parser, description and formatter.

    ``parse`` raises ValueError for an invalid value. ``allowed`` describes the valid values and
    follows "it must be" in error messages. ``show`` formats a value. ``null`` says what a null
    value means, and is empty if null is invalid.
    """

    parse: Callable[[object], object]
    allowed: str
    show: Callable[[Any], str] = str
    null: str = ""


def _size(low: int = 4096, high: int = 1 << 60, example: str = "") -> Setting:
    def parse(value: object) -> int:
        try:
            return parse_size(value, low=low, high=high)
        except ValueError:
            number = str(value).strip()
            if number.isdecimal() and 0 < int(number) < low:
                unit = "GiB" if low < MIB and int(number) < GIB_BELOW else "MiB"
                raise HintError(f"has no unit; did you mean {number}{unit}?") from None
            raise

    allowed = f"a size from {format_size(low)} to {format_size(high)}{example}"
    return Setting(parse, allowed, format_size)


def _or_none(setting: Setting) -> Setting:
    def parse(value: object) -> object:
        return None if value is None else setting.parse(value)

    return Setting(
        parse, setting.allowed, lambda v: "(none)" if v is None else setting.show(v), "no limit"
    )


def _choice(*allowed: str) -> Setting:
    return Setting(
        partial(_parse_choice, allowed=allowed), " or ".join(f'"{each}"' for each in allowed)
    )


def _set(default: Any, setting: Setting) -> Any:
    return field(default=default, metadata={"setting": setting})


_SIZE: Final = _size(example=', such as "8GiB", "500MB" or a number of bytes')
_PATH: Final = Setting(_parse_path, "a directory path", lambda v: v or "(none)", "no disk tier")
_SERVER: Final = Setting(
    parse_socket,
    '"auto" or a path of at most 107 bytes such as "unix:/run/user/1000/kvloft/kvloft.sock"',
    lambda v: (v if v == AUTO else f"unix:{v}") if v else "(none)",
    "a store in the engine",
)
_TEXT: Final = Setting(_parse_text, "text", lambda v: repr(v) if v else "(empty)")
_THREADS: Final = Setting(partial(_parse_count, low=1, high=64), "a number from 1 to 64")
_FILE: Final = Setting(_parse_path, "a YAML file path", lambda v: v or "(none)", "none")
_QUOTA: Final = _or_none(
    Setting(parse_quota, 'a percentage such as "10%", or a size such as "8GiB"', format_quota)
)
_TTL: Final = _or_none(
    Setting(parse_ttl, 'a time from 1s to 3650d, such as "24h" or "7d"', format_ttl)
)
_TIME: Final = Setting(
    parse_seconds,
    'a time from 0 to 1h, such as "10s", "250ms" or a number of seconds',
    lambda v: f"{v:g}s",
)
_TIMEOUT: Final = _TIME._replace(
    parse=partial(parse_seconds, low=0.001),
    allowed='a time from 1ms to 1h, such as "5ms" or a number of seconds',
)


@dataclass(frozen=True, slots=True)
class Config:
    """The effective settings and their origins. Sizes are in bytes, and times are in seconds."""

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
    server_timeout: float = _set(0.005, _TIMEOUT)
    server_linger: float = _set(300.0, _TIME)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    bare_numbers: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)
    """Values without a unit in settings where a missing unit may be a mistake."""
    socket: str | None = field(init=False, compare=False, repr=False)
    """The server's socket path, or None if no server is configured."""

    def __post_init__(self) -> None:
        # Read the path only once: the user's runtime directory may disappear later.
        socket = auto_socket() if self.server == AUTO else self.server
        object.__setattr__(self, "socket", socket)

    @property
    def disk_bytes(self) -> int:
        """Return the size of the disk tier in bytes, or 0 if disk_path is not set."""
        return self.disk_size if self.disk_path is not None else 0

    def origin(self, key: str) -> str:
        """Return the source that sets ``key``, or "default"."""
        return self.origins.get(key, FROM_DEFAULT)


OF_LIMITS: Final = ("salt_quota", "salt_disk_quota", "salt_ttl", "salt_limits")
"""Settings that define tenant limits (see `kvloft.limits`)."""
OF_STORE: Final = ("host_size", "disk_path", "disk_size", "eviction", "disk_threads", *OF_LIMITS)
"""Store settings. An engine that uses a server ignores them."""
KEYS: Final[Mapping[str, Setting]] = {
    f.name: f.metadata["setting"] for f in fields(Config) if f.metadata
}


def is_checked_for_unit(key: str, value: object) -> bool:
    """Return True if the unit of this setting's value might have been left out by mistake."""
    if key == "server_timeout":
        return True
    return KEYS[key] in (_SIZE, _QUOTA, _TTL) and isinstance(value, int)
