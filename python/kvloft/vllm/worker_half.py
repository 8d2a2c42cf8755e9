"""The vLLM-facing half of the worker side. It creates the WorkerCore and implements every hook that
does more than forward a call to the WorkerCore.

vLLM releases call hooks in different orders. vLLM 0.30 and older skip ``wait_for_save`` in empty
steps, and with speculative decoding, vLLM collects results before ``wait_for_save``. Saves
therefore run in the first hook after the forward pass. However, vLLM writes a draft model's KV and
the states of accepted draft tokens only after it has collected results. With either of these, saves
run in ``wait_for_save``, the last hook.
"""

from itertools import chain
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

import vllm
from kvloft.config.table import Config
from kvloft.seam.shape import CacheShape
from kvloft.transfer.frames import RAW
from kvloft.transfer.layout import LayoutError
from kvloft.transfer.movers import MoverSettings
from kvloft.transfer.worker import WorkerCore
from kvloft.vllm.identity.namespace import are_replaced
from kvloft.vllm.identity.reload import WeightsWatch
from kvloft.vllm.patches import DISCARD, SLEEP, WORKER_RELOAD, listen, settle
from kvloft.vllm.shape import group_layers, has_draft_kv
from kvloft.vllm.stats import KVLoftStats


class WorkerHalf:
    """Implements kvloft's hooks in a vLLM worker process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        shape: CacheShape,
        config: Config,
    ) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._num_blocks = kv_cache_config.num_blocks
        self.fails_requests = not shape.is_divisible
        """True if failed loads are reported by request, because block ids do not identify groups.
        """
        self._group_layers = [] if shape.is_divisible else group_layers(kv_cache_config)
        dtypes = f"{model.dtype}|{vllm_config.cache_config.cache_dtype}"
        self._fingerprint = f"{vllm.__version__}|{current_platform.device_name}|{dtypes}"
        # Before a step's first hook, vLLM may already write to new blocks: it zeroes them or moves
        # states into them.
        zeroes_first = bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))
        moves_states = any(group.kind == "state" for group in shape.groups)
        settings = MoverSettings(
            config.gpu_copies,
            config.staging_size,
            gathers_first=zeroes_first or moves_states,
            encodes=shape.encoding != RAW,
        )
        self.core = WorkerCore(shape, rank=parallel.rank % parallel.world_size, settings=settings)
        if model.enable_sleep_mode and not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
            settle([SLEEP])
            for patch in (SLEEP, DISCARD):
                listen(patch, self.drain, SLEEP.find().get_instance())
        if not are_replaced(vllm_config):
            self._watch = WeightsWatch(model, vllm_config.load_config, self.core.stop)
            listen(WORKER_RELOAD, self._watch.hear_reload)
        self._saves_late = has_draft_kv(vllm_config) or (
            moves_states and vllm_config.speculative_config is not None
        )
        self._bad_blocks: set[int] = set()
        self.hook_errors = 0

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        groups = [kv_caches]
        if self._group_layers:
            for name in chain(*self._group_layers):
                if name not in kv_caches:  # no other check detects this
                    raise LayoutError(
                        f"layer {name!r} of a KV cache group has no KV tensor, so kvloft cannot "
                        "cache the layer's KV"
                    )
            groups = [{name: kv_caches[name] for name in names} for names in self._group_layers]
        self.core.register(groups, self._num_blocks, self._fingerprint)

    def take_finished(self) -> set[str]:
        """Start any copies that no hook has started yet. Return the requests whose loads have
        completed.
        """
        self.core.run_loads()
        if not self._saves_late:
            self.core.run_saves()
        req_ids, bad_blocks = self.core.take_finished_loads()
        self._bad_blocks |= bad_blocks
        return set(req_ids)

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_stats(self) -> KVLoftStats | None:
        totals = self.core.take_totals()
        data = {
            "saved_bytes": totals.num_bytes_saved,
            "save_seconds": totals.seconds_saving,
            "loaded_bytes": totals.num_bytes_loaded,
            "load_seconds": totals.seconds_loading,
            "hook_errors": self.hook_errors,
        }
        self.hook_errors = 0
        data = {name: value for name, value in data.items() if value}
        return KVLoftStats(data) if data else None

    def drain(self, *_args: Any, **_kwargs: Any) -> None:
        """Finish all copies before the allocator unmaps memory.

        vLLM waits only for GPU work, not for copies in kvloft's queue. A kernel that accesses
        unmapped pages would crash the engine.
        """
        self.core.drain()

    def close(self) -> None:
        self.core.shutdown()
