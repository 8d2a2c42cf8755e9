"""What every rank of an engine keeps. vLLM tells a connector in the scheduler's process of the first rank's layers only, and of one
size for all of a group, though pipeline stages have other layers, and layers may differ in size.

So the call with which vLLM hands each rank its own is listened to: it comes from that process, before the scheduler is made. It
must not import the connector: engines without kvloft load this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvloft.errors import UnsupportedError
from kvloft.vllm.patches import RANK_CONFIGS, listen


class Ranks:
    """The KV cache configs that were handed out last in this process, one a rank."""

    def __init__(self) -> None:
        self.configs: Sequence[Any] = ()

    def hear(self, _executor: Any, kv_cache_configs: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
        self.configs = list(kv_cache_configs)


_RANKS = Ranks()


def watch() -> None:
    """Hear what ranks are told, from now on; again does nothing."""
    listen(RANK_CONFIGS, _RANKS.hear)


def configs_of_ranks(vllm_config: Any, kv_cache_config: Any) -> Sequence[Any]:
    """Of the scheduler's ``kv_cache_config`` those of all ranks of its engine; only itself where they are not known.

    Raises UnsupportedError if there are pipeline stages, of which it says too little then.
    """
    parallel, found = vllm_config.parallel_config, _RANKS.configs
    if len(found) == parallel.world_size and _outline(found[0]) == _outline(kv_cache_config):
        return found
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        raise UnsupportedError(
            f"kvloft serves pipeline_parallel_size={parallel.pipeline_parallel_size} where it hears what vLLM tells each rank "
            f"({RANK_CONFIGS.owner}.{RANK_CONFIGS.method}), and it did not; set it to 1"
        )
    return [kv_cache_config]


def _outline(config: Any) -> Any:
    """What the first rank's config and the scheduler's copy of it have in common."""
    return config.num_blocks, [(list(group.layer_names), group.kv_cache_spec.block_size) for group in config.kv_cache_groups]
