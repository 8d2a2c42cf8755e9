"""A server's limits as text, for the first line of its log and for `kvloft status`.

Reads the server's settings as text; it must not depend on how they are enforced.
"""

from collections.abc import Iterator, Mapping
from typing import Final

NONE: Final = "(none)"


def rules(settings: Mapping[str, str]) -> str:
    """Return the quotas, TTLs, shares and NUMA nodes that are set; empty without any."""
    return "; ".join(_parts({name: text for name, text in settings.items() if text != NONE}))


def _parts(given: Mapping[str, str]) -> Iterator[str]:
    of_host = "of its namespace's host memory" if "%" in given.get("salt_quota", "") else "of host memory"
    words = {"salt_quota": f"at most {{}} {of_host}", "salt_disk_quota": "at most {} of the disk", "salt_ttl": "expires after {}"}
    bounds = [text.format(given[name]) for name, text in words.items() if name in given]
    if bounds:
        yield f"each salt: {', '.join(bounds)}"
    if "salt_limits" in given:
        yield f"{'other limits' if bounds else 'limits'} for single salts: {given['salt_limits']}"
    if "share" in given:
        yield f"fixed shares of host memory: {given['share']}"
    if "numa" in given:
        yield f"host memory on NUMA node{'s' if ',' in given['numa'] else ''} {given['numa']}"
