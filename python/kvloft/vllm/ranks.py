"""The KV cache configs of all ranks. vLLM passes the scheduler's connector only the first rank's
layers, with one size per group, although pipeline stages have other layers, and layers can differ
in size.

kvloft therefore observes the call that passes each rank its config, which this process makes before
it creates the scheduler. It must not import the connector: engines without kvloft load this module.
"""

from collections.abc import Sequence
from typing import Any

from kvloft.errors import UnsupportedError
from kvloft.vllm.patches import RANK_CONFIGS, listen


class Ranks:
    """The KV cache configs that were handed out last in this process, one per rank."""

    def __init__(self) -> None:
        self.configs: Sequence[Any] = ()

    def hear(
        self, _executor: Any, kv_cache_configs: Sequence[Any], *_args: Any, **_kwargs: Any
    ) -> None:
        self.configs = list(kv_cache_configs)


_RANKS = Ranks()


def watch() -> None:
    """Observe the configs of ranks from now on. Idempotent."""
    listen(RANK_CONFIGS, _RANKS.hear)


def configs_of_ranks(vllm_config: Any, kv_cache_config: Any) -> Sequence[Any]:
    """Return the KV cache configs of all ranks of the scheduler's engine; only ``kv_cache_config``
    if they are unknown.

    Raises UnsupportedError if they are unknown and there are pipeline stages.
    """
    parallel, found = vllm_config.parallel_config, _RANKS.configs
    if len(found) == parallel.world_size and _outline(found[0]) == _outline(kv_cache_config):
        return found
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        raise UnsupportedError(
            f"kvloft does not support pipeline_parallel_size={parallel.pipeline_parallel_size} "
            "here: it lacks the configs of all "
            f"ranks ({RANK_CONFIGS.owner}.{RANK_CONFIGS.method}); set it to 1"
        )
    return [kv_cache_config]


def _outline(config: Any) -> Any:
    """The common part of the first rank's config and the scheduler's copy of it."""
    return config.num_blocks, [
        (list(group.layer_names), group.kv_cache_spec.block_size)
        for group in config.kv_cache_groups
    ]
