"""Settings of LMCache and of vLLM's OffloadingConnector, and kvloft's equivalents.

For errors only; docs/migrating.md has the same table with examples.
"""

from typing import Final

_NOT_NEEDED: Final = "kvloft does not need it; remove it"
_ONE_HOST: Final = "kvloft serves one host and does not support it; remove it"
_PREFIXES: Final = "kvloft reuses prefixes only and does not support it; remove it"
_HOST_SIZE: Final = 'use host_size, for example "32GiB"'

_LMCACHE: Final = {
    "local_cpu": _HOST_SIZE,
    "max_local_cpu_size": _HOST_SIZE,
    "l1_size_gb": _HOST_SIZE,
    "local_disk": 'use disk_path, for example "/var/cache/kvloft"',
    "max_local_disk_size": 'use disk_size, for example "500GiB"',
    "chunk_size": _NOT_NEEDED,
    "save_decode_cache": 'use save = "prompt", which saves no generated tokens',
    "save_unfull_chunk": _NOT_NEEDED,
    "use_layerwise": _NOT_NEEDED,
    "pre_caching_hash_algorithm": _NOT_NEEDED,
    "cache_policy": 'use eviction = "adaptive" or "lru"',
    "lmcache_instance_id": "kvloft does not need it; namespace separates engines",
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
    "root_dir": 'use disk_path, for example "/var/cache/kvloft"',
    "secondary_tiers": "use disk_path and disk_size for a disk",
}


def equivalent(key: str) -> str | None:
    """Return a sentence part about a setting of another cache; None for an unknown key."""
    name = key.lower().removeprefix("lmcache.")
    if name in _LMCACHE:
        return f"is an LMCache setting; {_LMCACHE[name]}"
    if name in _OFFLOADING:
        return f"is a setting of vLLM's OffloadingConnector; {_OFFLOADING[name]}"
    return None
