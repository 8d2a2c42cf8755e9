"""Reads tenant limits from the settings and the ``salt_limits`` YAML file.

Salts are secrets: the store hashes them, and they must never appear in messages or logs.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvloft.config.sources import first_twice, keys_of, read_yaml
from kvloft.config.table import Config
from kvloft.config.units import HintError, Quota, has_unit, parse_quota, parse_ttl
from kvloft.errors import ConfigError

KEYS: Final = {
    "quota": ("quota", parse_quota),
    "disk_quota": ("disk_quota", parse_quota),
    "ttl": ("ttl_s", parse_ttl),
}
SALT_KEYS: Final = ("salt", "salt_file")
MAX_SALT_BYTES: Final = 1 << 16
WANTED: Final = (
    "the file must contain a list of entries such as: {salt_file: a.salt, quota: 10%, "
    "disk_quota: 20%, ttl: 24h}"
)


class Limits(NamedTuple):
    """Limits on host memory and disk, and the time to live in seconds. None means no limit."""

    quota: Quota | None = None
    disk_quota: Quota | None = None
    ttl_s: int | None = None


class TenantLimits(NamedTuple):
    """Default limits for salts, limits for requests without a salt, and limits for individual
    salts.
    """

    salted: Limits
    unsalted: Limits
    by_salt: tuple[tuple[str, Limits], ...]


class Given(NamedTuple):
    """A value in the ``salt_limits`` file, its location, and the matching global setting."""

    blame: str
    setting: str
    value: Quota
    is_bare: bool
    """True if the value is a number without a unit."""


def tenant_limits(config: Config) -> TenantLimits | None:
    """Return the limits, or None if no limit is set. Raises ConfigError if the file is invalid."""
    salted = Limits(config.salt_quota, config.salt_disk_quota, config.salt_ttl)
    own = _from_file(config.salt_limits, salted) if config.salt_limits is not None else {}
    by_salt = tuple((salt, each) for salt, each in own.items() if salt is not None)
    limits = TenantLimits(salted, own.get(None, Limits()), by_salt)
    return None if limits == TenantLimits(Limits(), Limits(), ()) else limits


def given_limits(config: Config) -> Iterator[Given]:
    """Yield the values in the ``salt_limits`` file. Raises ConfigError if the file is invalid."""
    for blame, entry in _entries(config.salt_limits) if config.salt_limits is not None else ():
        for key, (_, parse) in KEYS.items():
            if (raw := entry.get(key)) is not None:
                value = _parsed(parse, raw, f"{blame}: {key}")
                is_bare = isinstance(value, int) and not has_unit(raw)
                yield Given(f"{blame}: {key}", f"salt_{key}", value, is_bare)


def read_salt(raw: bytes, source: str) -> str:
    """Decode a salt and strip the final newline. Raises ConfigError if the salt is invalid."""
    try:
        salt = raw.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ConfigError(f"{source}: the salt is not valid UTF-8.") from None
    if salt == "":
        raise ConfigError(f"{source}: the salt is empty; no request has an empty cache_salt.")
    return salt


def _from_file(path: str, salted: Limits) -> dict[str | None, Limits]:
    found: dict[str | None, Limits] = {}
    for blame, entry in _entries(path):
        salt, limits = _entry(entry, blame, Path(path).parent, salted)
        if salt in found:
            raise ConfigError(f"{blame}: an earlier entry has the same salt; remove one of them.")
        found[salt] = limits
    return found


def _entries(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, entry) for each entry in the file. Error messages about an entry start with its
    name.
    """
    blame = f"salt_limits = {path}"
    entries, node = read_yaml(path, blame, f"{WANTED}.")
    if not isinstance(entries, list):
        raise ConfigError(f"{blame} is not a list; {WANTED}.")
    for nth, (entry, own) in enumerate(zip(entries, node.value, strict=True), 1):
        twice = first_twice(keys_of(own))
        if twice in (*SALT_KEYS, *KEYS):  # any other key might be a salt, which must not be printed
            raise ConfigError(f"{blame}: entry {nth} sets {twice} twice; remove one.")
        yield f"{blame}, entry {nth}", entry


def _entry(entry: Any, blame: str, folder: Path, salted: Limits) -> tuple[str | None, Limits]:
    if not isinstance(entry, dict) or len([key for key in entry if key in SALT_KEYS]) != 1:
        raise ConfigError(
            f"{blame}: expected either salt or salt_file (salt: null for requests without a salt); "
            f"{WANTED}."
        )
    if unknown := [key for key in entry if key not in (*KEYS, *SALT_KEYS)]:
        raise ConfigError(
            f"{blame}: {str(unknown[0])[:40]!r} is not a known key; known keys are "
            f"{', '.join((*SALT_KEYS, *KEYS))}."
        )
    if "salt_file" in entry:
        salt: str | None = _salt_in(entry["salt_file"], blame, folder)
    elif (salt := entry["salt"]) is not None and (not isinstance(salt, str) or not salt):
        raise ConfigError(f"{blame}: salt must be non-empty text; enclose it in quotes.")
    limits = salted if salt is not None else Limits()
    for key, (name, parse) in KEYS.items():
        if key in entry:
            limits = limits._replace(**{name: _parsed(parse, entry[key], f"{blame}: {key}")})
    return salt, limits


def _salt_in(name: object, blame: str, folder: Path) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{blame}: salt_file must be a file path.")
    try:
        with (folder / name).open("rb") as file:
            raw = file.read(MAX_SALT_BYTES + 1)
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not a valid path"
        raise ConfigError(
            f"{blame}: salt_file {folder / name} cannot be read ({reason})."
        ) from None
    if len(raw) > MAX_SALT_BYTES:
        raise ConfigError(
            f"{blame}: salt_file {name} is larger than 64 KiB; it must contain a single salt."
        )
    return read_salt(raw, f"{blame}: salt_file {name}")


def _parsed(parse: Any, value: object, blame: str) -> Any:
    try:
        return None if value is None else parse(value)
    except HintError as e:
        raise ConfigError(f"{blame} = {value} {e}") from None
    except (ValueError, TypeError, ArithmeticError):
        wanted = 'a percentage such as "10%", or a size'
        if parse is parse_ttl:
            wanted = 'a time from 1s to 3650d, such as "24h" or "7d"'
        raise ConfigError(
            f"{blame} is not allowed; it must be {wanted}, or null for no limit."
        ) from None
