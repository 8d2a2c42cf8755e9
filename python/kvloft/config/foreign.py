"""Settings of LMCache and of vLLM's OffloadingConnector, and kvloft's equivalents.

For errors only; docs/migrating.md has the same table with examples.
"""

import re
from collections.abc import Callable
from typing import Final

from kvloft.config.units import format_size

_NOT_NEEDED: Final = "kvloft does not need it; remove it"
_ONE_HOST: Final = "kvloft serves one host and does not support it; remove it"
_PREFIXES: Final = "kvloft reuses prefixes only and does not support it; remove it"
_HOST_SIZE: Final = 'use host_size, for example "32GiB"'
_SERVER: Final = 'use server, for example "unix:/run/kvloft/kvloft.sock"'
_TIMEOUT: Final = 'use load_timeout, for example "10s"'
_DISK_PATH: Final = 'use disk_path, for example "/var/cache/kvloft"'
_DISK_SIZE: Final = 'use disk_size, for example "500GiB"'
_SAVE: Final = 'use save = "prompt", which saves no generated tokens'

_LMCACHE: Final = {
    "local_cpu": _HOST_SIZE,
    "max_local_cpu_size": _HOST_SIZE,
    "l1_size_gb": _HOST_SIZE,
    "reserve_local_cpu_size": _NOT_NEEDED,
    "local_disk": _DISK_PATH,
    "max_local_disk_size": _DISK_SIZE,
    "blocking_timeout_secs": _TIMEOUT,
    "mp_host": _SERVER,
    "mp_port": _SERVER,
    "rpc_port": _NOT_NEEDED,
    "chunk_size": _NOT_NEEDED,
    "save_decode_cache": _SAVE,
    "save_unfull_chunk": _NOT_NEEDED,
    "use_layerwise": _NOT_NEEDED,
    "pre_caching_hash_algorithm": _NOT_NEEDED,
    "cache_policy": 'use eviction = "adaptive" or "lru"',
    "instance_id": "kvloft does not need it; namespace separates engines",
    "remote_url": _ONE_HOST,
    "remote_serde": _ONE_HOST,
    "enable_p2p": _ONE_HOST,
    "enable_pd": "use NixlConnector next to kvloft, in MultiConnector",
    "enable_blending": _PREFIXES,
    "enable_controller": "use vLLM's --kv-events-config, which kvloft extends",
}
_OFFLOADING: Final = {
    "cpu_bytes_to_use": _HOST_SIZE,
    "num_cpu_blocks": _HOST_SIZE,
    "block_size": _NOT_NEEDED,
    "eviction_policy": 'use eviction = "adaptive" or "lru"',
    "root_dir": _DISK_PATH,
    "spec_name": _NOT_NEEDED,
    "store_threshold": "kvloft saves each chunk at first use; remove it",
    "secondary_tiers": "use disk_path and disk_size for a disk",
}


def _gib(value: object) -> str:
    return f"{float(str(value)):g}GiB"


def _path(value: object) -> str:
    text = str(value).removeprefix("file:")
    if not text.startswith("/"):
        raise ValueError(value)
    return f"/{text.lstrip('/')}"


def _bytes(value: object) -> str:
    return format_size(int(str(value)))


def _save(value: object) -> str:
    return "all" if str(value).lower() in ("true", "1") else "prompt"


_VALUES: Final[dict[str, tuple[str, Callable[[object], str]]]] = {
    "max_local_cpu_size": ("host_size", _gib),
    "l1_size_gb": ("host_size", _gib),
    "cpu_bytes_to_use": ("host_size", _bytes),
    "local_disk": ("disk_path", _path),
    "root_dir": ("disk_path", _path),
    "max_local_disk_size": ("disk_size", _gib),
    "blocking_timeout_secs": ("load_timeout", lambda value: f"{float(str(value)):g}s"),
    "save_decode_cache": ("save", _save),
}
"""The setting for each key whose value can be converted."""


def equivalent(key: str, value: object = None) -> str | None:
    """Return a sentence part about a setting of another cache, with the equivalent of ``value`` if
    it can be converted; None for an unknown key.
    """
    name = re.sub(r"^lmcache[._](mp\.)?", "", key.lower())
    if key.lower().startswith("lmcache.mp."):
        name = f"mp_{name}"
    cache, fixes = "an LMCache setting", _LMCACHE
    if name in _OFFLOADING:
        cache, fixes = "a setting of vLLM's OffloadingConnector", _OFFLOADING
    elif key.lower().startswith("lmcache"):
        fixes = {name: "kvloft has no equivalent; remove it"} | _LMCACHE
    if name not in fixes:
        return None
    return f"is {cache}; {_converted(name, value) or fixes[name]}"


def _converted(name: str, value: object) -> str | None:
    if value is None or name not in _VALUES:
        return None
    setting, convert = _VALUES[name]
    try:
        return f'use {setting} = "{convert(value)}"'
    except (ValueError, ArithmeticError):
        return None
