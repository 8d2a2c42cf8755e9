"""Records the KV cache configs of all ranks.

vLLM passes only the first rank's layers, and one size per group, to the scheduler's connector.
However, pipeline stages have different layers, and layers can differ in size. kvloft therefore
observes the call that passes a config to each rank, which the scheduler process makes before it
creates the scheduler. Engines without kvloft load this module too, so it must not import the
connector.
"""

from collections.abc import Sequence
from typing import Any

from kvloft.errors import UnsupportedError
from kvloft.vllm.patches import RANK_CONFIGS, listen


class Ranks:
    """The KV cache configs, one per rank, that this process last passed to the ranks."""

    def __init__(self) -> None:
        self.configs: Sequence[Any] = ()

    def hear(
        self, _executor: Any, kv_cache_configs: Sequence[Any], *_args: Any, **_kwargs: Any
    ) -> None:
        self.configs = list(kv_cache_configs)


_RANKS = Ranks()


def watch() -> None:
    """Start recording the configs of all ranks. Idempotent."""
    listen(RANK_CONFIGS, _RANKS.hear)


def configs_of_ranks(vllm_config: Any, kv_cache_config: Any) -> Sequence[Any]:
    """Return the KV cache config of every rank in the scheduler's engine, or only
    ``kv_cache_config`` if the other ranks' configs are unknown.

    Raises UnsupportedError if these configs are unknown and pipeline parallelism is enabled.
    """
    parallel, found = vllm_config.parallel_config, _RANKS.configs
    if len(found) == parallel.world_size and _outline(found[0]) == _outline(kv_cache_config):
        return found
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        raise UnsupportedError(
            f"kvloft does not support pipeline_parallel_size={parallel.pipeline_parallel_size} "
            "here, because the other ranks' KV cache configs are unknown "
            f"({RANK_CONFIGS.owner}.{RANK_CONFIGS.method} was not called in this process); "
            "set pipeline_parallel_size to 1"
        )
    return [kv_cache_config]


def _outline(config: Any) -> Any:
    """Return the values that the scheduler's config shares with the first rank's config."""
    return config.num_blocks, [
        (list(group.layer_names), group.kv_cache_spec.block_size)
        for group in config.kv_cache_groups
    ]
