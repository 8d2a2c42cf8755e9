"""Parses and formats sizes, times and quotas."""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final


class HintError(ValueError):
    """An invalid value. The message, which suggests a fix, is printed after the value."""


_UNITS: Final = {"": 1, "b": 1} | {
    f"{prefix}{kind}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for kind, base in (("ib", 1024), ("b", 1000), ("i", 1024), ("", 1000))
}
_TTL_SECONDS: Final = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
MAX_TTL_S: Final = 3650 * 86400
_SECONDS: Final[dict[str, int | Decimal]] = {
    "": 1,
    "s": 1,
    "ms": Decimal("0.001"),
    "min": 60,
    "h": 3600,
}
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*")


def parse_size(value: object, low: int = 4096, high: int = 1 << 60) -> int:
    """Parse a size such as ``"8GiB"``, ``"500MB"``, ``"2Gi"``, ``"32G"`` or a plain number and
    return it in bytes. Raises ValueError if the value is malformed or out of range.
    """
    return _whole(_scaled(value, _UNITS), low, high)


def parse_seconds(value: object, low: float = 0.0) -> float:
    """Parse a time of at most 1h, such as ``"250ms"`` or ``"2min"``, and return it in seconds.
    Raises ValueError if the value is malformed or out of range.
    """
    seconds = float(_scaled(value, _SECONDS))
    if not low <= seconds <= 3600.0:
        raise ValueError(value)
    return seconds


Quota = int | float
"""Limit on a tier's use: a number of bytes (int), or a fraction from 0.0 to 1.0 (float)."""


def parse_quota(value: object) -> Quota:
    """Parse a quota: a size such as ``"8GiB"``, or a fraction such as ``"10%"`` or 0.1.

    Sizes are returned in bytes. A number up to 1.0 with a decimal point is a fraction, even as
    text, because command-line arguments are text. Fractions are rounded to the nearest millionth.
    Raises ValueError if the value is malformed, out of range, or a fraction between 0 and one
    millionth.
    """
    if isinstance(value, str) and re.fullmatch(r"\s*0*[01]\.[0-9]{1,9}\s*", value):
        value = float(value)
    if isinstance(value, float) and (value == 0.0 or 1e-6 <= value <= 1.0):
        return round(value, 6)
    text = value if isinstance(value, str) else ""
    match = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]{1,4})?)\s*%\s*", text)
    if match is None:
        return parse_size(value, low=0)
    part = float(Decimal(match[1]) / 100)
    if part > 1.0:
        raise ValueError(value)
    return part


def format_quota(quota: Quota) -> str:
    """Format a quota as text that :func:`parse_quota` accepts."""
    if isinstance(quota, int):
        return format_size(quota)
    return f"{Decimal(str(quota)) * 100:f}".rstrip("0").rstrip(".") + "%"


def parse_ttl(value: object) -> int:
    """Parse a time to live of up to 10 years, such as ``"24h"`` or ``"7d"``. Raises ValueError."""
    return _whole(_scaled(value, _TTL_SECONDS), 1, MAX_TTL_S)


def format_ttl(seconds: int) -> str:
    """Format a time to live as text that :func:`parse_ttl` accepts."""
    unit = "d" if seconds % 86400 == 0 else "h" if seconds % 3600 == 0 else "s"
    return f"{seconds // _TTL_SECONDS[unit]}{unit}"


def format_size(size_bytes: int) -> str:
    """Format a size exactly, in the largest binary unit that divides it."""
    for unit, base in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes and size_bytes % base == 0:
            return f"{size_bytes // base}{unit}"
    return f"{size_bytes}B"


def size_text(size_bytes: int) -> str:
    """Format a size with up to four digits and a binary unit, such as "256 MiB" or "1.5 GiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def has_unit(value: object) -> bool:
    """Return True if ``value``, a valid size or time, has a unit."""
    return _quantity(value)[1] != ""


def _quantity(value: object) -> tuple[Decimal, str]:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return Decimal(value), ""
    if not isinstance(value, str) or (match := _QUANTITY.fullmatch(value)) is None:
        raise ValueError(value)
    return Decimal(match[1]), match[2].lower()


def _scaled(value: object, units: Mapping[str, int | Decimal]) -> Decimal:
    amount, unit = _quantity(value)
    if unit == "m" and "min" in units:
        raise HintError(f"uses the ambiguous unit m; did you mean {amount}min?")
    if unit not in units:
        raise ValueError(value)
    return amount * units[unit]


def _whole(amount: Decimal, low: int, high: int) -> int:
    if amount != int(amount) or not low <= amount <= high:
        raise ValueError(amount)
    return int(amount)
