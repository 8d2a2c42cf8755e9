"""KVLoftConnector implements vLLM's hooks by calling the scheduler side or the worker side.

An error in a hook becomes a miss: every error is counted, each hook's first error is logged, and
the engine continues. Constructor errors propagate, because an engine with invalid settings must not
start. All loads are asynchronous.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvloft.config.sources import load_config
from kvloft.seam.plan import StepPlan, StepReport
from kvloft.vllm.patches import ADD_REQUEST, listen
from kvloft.vllm.ranks import configs_of_ranks
from kvloft.vllm.scheduler_half import SchedulerHalf
from kvloft.vllm.shape import cache_shape, encoding_of
from kvloft.vllm.stats import KVLoftPromMetrics, KVLoftStats
from kvloft.vllm.support import HAS_GROUPS, check_supported
from kvloft.vllm.views import hit_sources
from kvloft.vllm.worker_half import WorkerHalf

logger = logging.getLogger("vllm.kvloft")
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass
class KVLoftMetadata(KVConnectorMetadata):
    """Metadata that the scheduler sends to every worker in each step."""

    plan: StepPlan


@dataclass
class KVLoftWorkerMetadata(KVConnectorWorkerMetadata):
    """Metadata that the workers send to the scheduler: one report per rank."""

    reports: list[StepReport] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVLoftWorkerMetadata)
        return KVLoftWorkerMetadata(self.reports + other.reports)


def _miss_on_error(default: Callable[..., Any] = lambda _: None) -> Callable[[_F], _F]:
    """Make a hook return ``default(self)`` on error, count its errors, and log the first error."""

    def wrap(hook: _F) -> _F:
        @wraps(hook)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic in Rust is not an Exception
                self._count_error(hook.__name__)
                return default(self)

        return guarded  # type: ignore[return-value]

    return wrap


class KVLoftConnector(KVConnectorBase_V1):
    """An external KV cache for vLLM. docs/settings.md and docs/metrics.md list its settings and
    metrics.
    """

    # Only the half for this process's role is set, and vLLM calls only that half's hooks.
    _scheduler: SchedulerHalf
    _worker: WorkerHalf
    _half: SchedulerHalf | WorkerHalf

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        check_supported(vllm_config, kv_cache_config, config.kv_groups)
        self._errors_logged: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            ranks = configs_of_ranks(vllm_config, kv_cache_config)
            shape = cache_shape(vllm_config, ranks, encoding_of(ranks, config))
            self._half = self._scheduler = SchedulerHalf(vllm_config, ranks, shape, config)
            listen(ADD_REQUEST, self.meet_scheduler)
        else:
            own = [kv_cache_config]
            shape = cache_shape(vllm_config, own, encoding_of(own, config))
            self._half = self._worker = WorkerHalf(vllm_config, kv_cache_config, shape, config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False. Raises ConfigError if the settings are invalid.

        vLLM calls this method while parsing its arguments, before loading any weights.
        """
        load_config(extra_config or {})
        return False

    def _count_error(self, hook: str) -> None:
        self._half.hook_errors += 1
        if hook not in self._errors_logged:
            self._errors_logged.add(hook)
            logger.exception(
                "kvloft: error in %s; treating it as a miss (logged once, counted in hook_errors)",
                hook,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because a lost save only causes a later miss."""
        return False

    # -- worker side ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    @_miss_on_error()
    def unregister_kv_caches(self) -> None:
        """Suspend transfers. vLLM 0.33 and newer call this before unmapping pages for sleep."""
        self._worker.core.suspend()

    @_miss_on_error()
    def restore_kv_caches(self) -> None:
        """Resume transfers after vLLM has remapped the pages at the same addresses."""
        self._worker.core.resume()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    @_miss_on_error()
    def _begin(self, metadata: Any) -> None:
        self._worker.core.begin(metadata.plan)

    @_miss_on_error()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.core.run_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and layers never wait for them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole chunks are saved after the forward pass."""

    @_miss_on_error()
    def wait_for_save(self) -> None:
        self._worker.core.run_saves()

    @_miss_on_error(lambda self: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_finished()

    @_miss_on_error(lambda self: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    @_miss_on_error()
    def build_connector_worker_meta(self) -> KVLoftWorkerMetadata | None:
        report = self._worker.core.take_report()
        return KVLoftWorkerMetadata([report]) if report is not None else None

    # -- scheduler side ---------------------------------------------------------------------------

    @_miss_on_error(lambda self: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    @_miss_on_error()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.admit(request, blocks.get_block_ids(), num_external_tokens)

    @_miss_on_error(lambda self: {})
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        return hit_sources(self._scheduler.core.hit_tokens(request.request_id), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVLoftMetadata:
        plan = self._plan_step(scheduler_output)
        for note in self._scheduler.core.take_notes():
            self._note_for_events(note)
        return KVLoftMetadata(plan)

    @_miss_on_error()
    def _note_for_events(self, note: Callable[[], None]) -> None:
        """Pass chunks to the announcer. An error affects only their KV events, not the plan."""
        note()

    @_miss_on_error(lambda self: self._scheduler.core.plan_loads_only())
    def _plan_step(self, scheduler_output: Any) -> StepPlan:
        self._scheduler.renew()
        return self._scheduler.plan_step(scheduler_output)

    @_miss_on_error()
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        reports = metadata.reports if isinstance(metadata, KVLoftWorkerMetadata) else ()
        numbers = (report.prompt_step for report in reports if report.prompt_step is not None)
        self._scheduler.core.end_step(next(numbers, None))
        for report in reports:
            self._scheduler.core.absorb(report)

    @_miss_on_error(lambda self: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return False so that vLLM frees the blocks: saves read them while the request still owns
        them (I2).
        """
        self._scheduler.core.finish(request.request_id)
        return False, None

    @_miss_on_error(lambda self: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.core.has_work_in_flight

    @_miss_on_error(lambda self: False)
    def reset_cache(self) -> bool | None:
        self._scheduler.reset()
        return True

    def meet_scheduler(self, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
        """Detect whether this is the only connector or a child of MultiConnector. vLLM calls this
        method before adding a request.

        If this is the only connector, make vLLM free the blocks of preempted and finished requests
        immediately, as it does without a connector. By default, vLLM waits for in-flight steps that
        can still write to the blocks, because a connector could load into the blocks before these
        writes land. While vLLM 0.26 to 0.29 waits, it preempts one request after another.

        kvloft does not need the delay. Its loads run after any saves that read the blocks, and
        after all work launched before the load's step: on a GPU, loads wait for an event recorded
        when the step begins; on a CPU, workers run in order.
        """
        if self._scheduler.siblings is not None:
            return
        children = getattr(scheduler.connector, "_connectors", ())
        if scheduler.connector is self:
            self._scheduler.meet_scheduler(scheduler, ())
            # HiSparse still reads freed pages.
            if not getattr(scheduler, "defer_async_loads", False):
                scheduler.defer_block_free = False
        elif any(child is self for child in children):
            others = tuple(child for child in children if child is not self)
            self._scheduler.meet_scheduler(scheduler, others)

    @_miss_on_error(lambda self: ())
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_kv_events()

    # -- both -------------------------------------------------------------------------------------

    @_miss_on_error()
    def get_kv_connector_stats(self) -> KVLoftStats | None:
        return self._half.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLoftStats:
        return KVLoftStats(data=data) if data is not None else KVLoftStats()

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVLoftPromMetrics:
        return KVLoftPromMetrics(*args)

    @_miss_on_error()
    def shutdown(self) -> None:
        self._half.close()


class KVLoftGroupsConnector(KVLoftConnector, SupportsHMA):
    """KVLoftConnector with SupportsHMA. For connectors without SupportsHMA, vLLM disables its
    hybrid KV cache manager and uses a single group.
    """

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests whose loads completed and the requests whose loads failed.

        With multiple groups, block ids do not identify a request, so failures are reported by
        request. With one group, failures are reported by block, and vLLM recomputes only the tokens
        from the first bad block onward.
        """
        if not self._worker.fails_requests:
            return super().get_transfer_results(finished_req_ids)
        done, failed = self._take_finished()
        return base.KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    @_miss_on_error(lambda self: (set(), set()))
    def _take_finished(self) -> tuple[set[str], set[str]]:
        done, failed = self._worker.take_finished(), self._worker.core.failed_loads
        # Bad blocks are found before their load completes. With multiple groups, vLLM would fail
        # on a bad block, so drop them and report only the failed load.
        self._worker.take_bad_blocks()
        return done, set(failed)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as `request_finished`, but with the blocks of all groups."""
        finished: tuple[bool, dict[str, Any] | None] = self.request_finished(request, [])
        return finished


def class_of(kv_groups: str) -> type[KVLoftConnector]:
    """Return the connector class for the ``kv_groups`` setting."""
    with_groups = kv_groups == "all" or (kv_groups == "auto" and HAS_GROUPS)
    return KVLoftGroupsConnector if with_groups else KVLoftConnector
