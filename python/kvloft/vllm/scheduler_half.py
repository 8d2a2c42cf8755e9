"""The vLLM-facing half of the scheduler side. It has one method per hook, connects the settings,
the namespace and the store to SchedulerCore, and never touches KV bytes.

The connector treats errors as misses. After an error, `admit` also plans a failed load; otherwise,
vLLM would never schedule the request.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from kvloft import _core
from kvloft.auto import look_after
from kvloft.config.table import AUTO, Config
from kvloft.errors import ConfigError
from kvloft.machine import warnings
from kvloft.plan import Miss, Offer, PlanSettings, SchedulerCore, Wait
from kvloft.plan.breaker import RETRY_S
from kvloft.plan.kv_events import Event
from kvloft.seam.ids import ReqId
from kvloft.seam.plan import StepPlan
from kvloft.seam.shape import CacheShape
from kvloft.seam.views import RequestView
from kvloft.store import arena_of, disk_path_of, open_store
from kvloft.version import BUILD
from kvloft.vllm.events import EventWriter, announcer_of
from kvloft.vllm.identity.adapters import AdapterNames, media_prefix
from kvloft.vllm.identity.namespace import (
    are_replaced,
    description_of,
    namespace_fields,
)
from kvloft.vllm.identity.reload import WeightsWatch, can_load_weights
from kvloft.vllm.patches import (
    ADD_ADAPTER,
    ENGINE_RPC,
    ENGINE_SLEEP,
    OF_EVERY_ENGINE,
    PAUSE_RESET,
    POOL_RESET,
    IfReturned,
    listen,
    settle,
)
from kvloft.vllm.shape import draft_limit, has_draft_kv, max_running, pool_size
from kvloft.vllm.stats import COUNTERS, GAUGES, KVLoftStats
from kvloft.vllm.store_log import EventPoller, StoreLog, tiers_text
from kvloft.vllm.support import transfer_warnings
from kvloft.vllm.views import VllmRequest, num_running, tables_of, view_step

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvloft")
_pausing: ContextVar[bool] = ContextVar("kvloft_pausing", default=False)
"""True while vLLM resets caches to pause or sleep."""

STATS_STEPS = 32
"""Number of steps between reads of the store's counters when there is nothing else to report."""
REPLACEABLE_WEIGHTS = (
    "server = unix:{} ({}) is not supported if a trainer can replace a running engine's weights "
    "(weight_transfer_config, worker_extension_cls): other engines would load KV computed with "
    "different weights. Remove the `server` setting."
)


class SchedulerHalf:
    """Implements kvloft's hooks in vLLM's scheduler process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        ranks: Sequence[KVCacheConfig],
        shape: CacheShape,
        config: Config,
    ) -> None:
        """Open the store. ``ranks`` holds the KV cache config of every rank, or only this process's
        config if the other configs are unknown. The first config belongs to this process.
        """
        for warning in warnings(config):  # this check must precede opening the store
            logger.warning("kvloft: %s", warning)
        self._unit_tokens, self._new_tables = shape.unit_tokens, tables_of(shape)
        self._are_resolved = not shape.is_divisible
        """True if vLLM frees running requests' blocks, so each step reads the block tables."""
        has_adapters = getattr(vllm_config, "lora_config", None) is not None
        is_blind = settle([*OF_EVERY_ENGINE, *([ADD_ADAPTER] * has_adapters)])
        fields = namespace_fields(vllm_config, ranks, shape, config.namespace)
        fields += [("unseen_reloads", uuid4().hex)] * is_blind
        self._namespace = _core.namespace_digest(fields)
        disk_path = disk_path_of(config, vllm_config.parallel_config)
        self._is_shared = config.server is not None
        self._is_live = are_replaced(vllm_config)
        if self._is_shared and self._is_live:
            raise ConfigError(REPLACEABLE_WEIGHTS.format(config.socket, config.origin("server")))
        self._leave_server = look_after(config, logger) if config.server == AUTO else None
        about = description_of(fields)
        self._store = open_store(config, shape, self._namespace, about, disk_path=disk_path)
        self._shape = shape
        transfer = vllm_config.kv_transfer_config
        arena = arena_of(self._store, shape)
        self._announcer = announcer_of(
            vllm_config, ranks[0], self._store, shape, is_shared=self._is_shared
        )
        self._loads_allowed = transfer is None or transfer.is_kv_consumer
        settings = PlanSettings(
            shape,
            arena=arena,
            wait_s=config.load_timeout,
            loads_allowed=self._loads_allowed,
            saves_allowed=transfer is None or transfer.is_kv_producer,
            shares_blocks=bool(vllm_config.cache_config.enable_prefix_caching),
            save_prompts_only=config.save == "prompt",
            max_running=max_running(vllm_config),
            draft_limit=draft_limit(vllm_config),
            pool=pool_size(vllm_config, ranks[0], shape),
        )
        self.core = SchedulerCore(
            self._store, self._new_chain, settings, clock=time.monotonic, announcer=self._announcer
        )
        self._adapters = AdapterNames(
            media_prefix(vllm_config),
            are_seen=ADD_ADAPTER.find() is not None,
            on_replace=self.core.replace_adapter,
        )
        self._last: dict[str, int] = {}
        self.hook_errors, self._quiet_steps = 0, 0
        self._is_stopped = self._asks_siblings = False
        self.siblings: tuple[Any, ...] | None = None
        """MultiConnector's other children. None until `meet_scheduler` is called."""
        self._own_pool: Callable[[], Any] = lambda: None
        """Returns vLLM's block pool, or None if it is unknown."""
        sees_pauses = PAUSE_RESET.find() is not None and ENGINE_SLEEP.find() is not None
        self._clears_on_pause = not sees_pauses or config.on_pause == "clear" or self._is_live
        self._weights_go, self._has_draft_kv = False, has_draft_kv(vllm_config)
        self._can_sleep = bool(vllm_config.model_config.enable_sleep_mode)
        self._watch = WeightsWatch(
            vllm_config.model_config, vllm_config.load_config, self.stop, is_of=self._is_of
        )
        listen(ENGINE_RPC, self._watch.hear_rpc)
        listen(ENGINE_RPC, self.hear_rpc)
        listen(ADD_ADAPTER, self.see_adapter)
        listen(PAUSE_RESET, self.hear_pause)
        listen(ENGINE_SLEEP, self.hear_sleep)
        listen(POOL_RESET, self.hear_pool_reset)
        if self._announcer is not None:
            settle([POOL_RESET])
            specs = [group.kv_cache_spec for group in ranks[0].kv_cache_groups]
            self._writer = EventWriter(specs, shape)
        tiers = self._tiers_text(config, disk_path, 0 if arena is None else arena.size_bytes)
        logger.info("kvloft %s: namespace %s, %s", BUILD, self._namespace.hex()[:16], tiers)
        logger.debug("kvloft namespace fields: %s", fields)
        for text in transfer_warnings(transfer):
            logger.warning("kvloft: %s", text)
        self._log = StoreLog(self._store, self._namespace)
        self._poller = EventPoller(self._log.log_events) if self._is_shared else None
        self._log.log_events()

    def _tiers_text(self, config: Config, disk_path: str | None, size_bytes: int) -> str:
        stats = self._store.stats()
        num_found = None if stats.get("disk_broken") else stats.get("disk_used", 0)
        return tiers_text(
            config, self._shape, disk_path=disk_path, size_bytes=size_bytes, num_found=num_found
        )

    def _new_chain(self, view: RequestView, lookahead: int) -> _core.KeyChain:
        root = _core.root_key(self._namespace, view.adapter, view.cache_salt)
        return _core.KeyChain(root, block_tokens=self._unit_tokens, lookahead=lookahead)

    # -- hooks ------------------------------------------------------------------------------------

    def meet_scheduler(self, scheduler: Any, siblings: tuple[Any, ...]) -> None:
        """Set up everything that depends on vLLM's scheduler. ``siblings`` are MultiConnector's
        other children; its policy for failed loads governs all children.
        """
        self.siblings = siblings
        if siblings:
            self.core.meet_siblings()
        if pool := getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None):
            self._own_pool = weakref.ref(pool)
        fails_requests = not getattr(scheduler, "recompute_kv_load_failures", True)
        if fails_requests and self._loads_allowed:
            self._log.warn_of_failing_requests()
        retry_s = math.inf if fails_requests else RETRY_S
        self.core.meet_engine(partial(num_running, weakref.proxy(scheduler)), retry_s)

    def renew(self) -> None:
        """Switch to a new server if the old server has exited. Call this only between plans."""
        if self._is_shared and not self.core.has_queued_loads and self._store.renew():
            self.core.meet_store(arena_of(self._store, self._shape))

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens that a waiting request can load, or None while it must wait.
        The second value is True if there are tokens to load.

        MultiConnector ignores all children while any child returns None, so a child waits only if
        no sibling offers tokens.
        """
        self.renew()
        may_wait = self.siblings is not None
        tokens = self._match(request, num_computed_tokens, may_wait=may_wait)
        if tokens is None and self._sibling_offers(request, num_computed_tokens):
            tokens = self._match(request, num_computed_tokens, may_wait=False)
        return tokens, bool(tokens)

    def _match(self, request: Request, num_computed_tokens: int, *, may_wait: bool) -> int | None:
        if may_wait and self.core.still_waits(ReqId(request.request_id), num_computed_tokens):
            return None
        live = VllmRequest(request, self._adapters)
        match self.core.match(live, num_computed_tokens, may_wait=may_wait):
            case Offer(num_tokens):
                return num_tokens
            case Miss():
                return 0
            case Wait():
                return None

    def _sibling_offers(self, request: Request, num_computed_tokens: int) -> bool:
        """Return True if a sibling offers tokens for this request. A sibling that is another kvloft
        connector can call this connector recursively.
        """
        if not self.siblings or self._asks_siblings:
            return False
        self._asks_siblings = True
        try:
            return any(
                each.get_num_new_matched_tokens(request, num_computed_tokens)[0]
                for each in self.siblings
            )
        finally:
            self._asks_siblings = False

    def admit(
        self, request: Request, tables: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Admit a request. If the load cannot be planned, plan a failed load, because the request
        waits for a result.
        """
        live, own = VllmRequest(request, self._adapters), self._new_tables(tables)
        try:
            self.core.admit(live, num_external_tokens, own)
        except BaseException:  # a panic in Rust is not an Exception
            if num_external_tokens:
                self.core.fail_load(live, num_external_tokens, own)
            raise
        if request.lora_request is not None and request.num_preemptions:
            self._adapters.check_again(request.lora_request)

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        new_tables = self._new_tables if self._are_resolved else None
        return self.core.plan_step(view_step(output, new_tables))

    def reset(self) -> None:
        """Clear the cache, unless vLLM resets the cache for a pause that keeps the weights.

        If a trainer can replace weights, a pause clears the cache too, because the pause can be the
        only sign of new weights.
        """
        if _pausing.get() and not (self._clears_on_pause or self._weights_go):
            self.core.release_waiting()  # nothing is admitted during the pause
            return
        self._weights_go = False
        self.core.reset()

    def take_stats(self) -> KVLoftStats | None:
        """Return the statistics collected since the last call, or None if there are none.

        Reads the store's counters if a local counter has changed or `STATS_STEPS` steps have
        passed.
        """
        self._quiet_steps += 1
        if not self.core.counters and not self.hook_errors and self._quiet_steps < STATS_STEPS:
            return None
        stats = self._store.stats()
        if "host_share_bytes" in stats:
            self.core.count_on(max(stats["host_share_bytes"], stats["host_used_bytes"]))
        grown = {name: stats[name] - self._last.get(name, 0) for name in COUNTERS if name in stats}
        data = self.core.counters + Counter(grown) + Counter(hook_errors=self.hook_errors)
        self.core.counters.clear()
        self._quiet_steps, self.hook_errors, self._last = 0, 0, stats
        self._log.warn(data)
        self._log.log_events()
        return KVLoftStats(dict(data) | {name: stats[name] for name in GAUGES if name in stats})

    def take_kv_events(self) -> Iterable[KVCacheEvent]:
        """Return the changes in the store's tiers since the last call, or an empty sequence if KV
        events are disabled.
        """
        if self._announcer is None:
            return ()
        events: list[Event] = []
        try:
            events = self._announcer.take()
            return [self._writer.write(event) for event in events]
        except BaseException:  # subscribers may have missed events
            self._announcer.withdraw(events)
            raise

    # -- listeners for calls that have no connector hook ------------------------------------------

    def see_adapter(self, engine: Any, lora_request: Any, *_args: Any, **_kwargs: Any) -> None:
        """Check an adapter's files before vLLM loads it."""
        if self._is_of(engine):
            self._adapters.identify(lora_request)

    def hear_pause(self, *_args: Any, **_kwargs: Any) -> Callable[[], None]:
        """Treat any reset during this call as part of a pause or sleep."""
        return partial(_pausing.reset, _pausing.set(True))

    def hear_sleep(
        self, engine: Any, level: int = 1, *_args: Any, **_kwargs: Any
    ) -> IfReturned | None:
        """Record that vLLM discards the weights, except at sleep levels 0 and 1, and pause caching
        until a call that can load weights. vLLM keeps weights that are already asleep.
        """
        if level in (0, 1) or not self._is_of(engine):
            return None
        self._weights_go = True
        executor = getattr(engine, "model_executor", None)
        if not self._can_sleep or "weights" in getattr(executor, "sleeping_tags", ()):
            return None
        return IfReturned(partial(self._lose_weights, executor, level))

    def _is_of(self, engine: Any) -> bool:
        """Return False if ``engine`` is a different engine in this process."""
        connector = getattr(getattr(engine, "scheduler", None), "connector", None)
        children = getattr(connector, "_connectors", (connector,))
        return connector is None or any(getattr(each, "_half", None) is self for each in children)

    def _lose_weights(self, executor: Any, level: int) -> None:
        if "weights" not in getattr(executor, "sleeping_tags", ("weights",)):
            return
        if self._has_draft_kv and not self._is_live:
            self.stop(
                f"sleep level {level} discarded the weights, and reload_weights does not reload "
                "the draft model's weights"
            )
            return
        logger.info(
            "kvloft: sleep level %d discarded the weights; pausing the cache until weights are "
            "loaded",
            level,
        )
        self.core.pause_caching()

    def hear_rpc(
        self, engine: Any, method: Any = None, *_args: Any, **_kwargs: Any
    ) -> IfReturned | None:
        """Resume caching after a call that can load weights."""
        is_load = can_load_weights(method) and self._is_of(engine)
        return IfReturned(self.core.resume_caching) if is_load else None

    def hear_pool_reset(self, pool: Any, *_args: Any, **_kwargs: Any) -> Callable[[], None] | None:
        """Republish kvloft's events after vLLM has published the removal of all blocks, and record
        that hits contain no KV from before the reset.
        """
        own_pool = self._own_pool()
        if own_pool is not None and pool is not own_pool:  # another engine in this process
            return None
        queued = len(pool.kv_event_queue)

        def note_reset() -> None:
            if self._announcer is not None and len(pool.kv_event_queue) > queued:
                self._announcer.repeat()
            # vLLM resets the pool only if all blocks except the null block are free.
            if pool.get_num_free_blocks() == pool.num_gpu_blocks - 1:
                self.core.note_pool_reset()

        return note_reset

    def stop(self, reason: str) -> None:
        """Stop offers and saves, or only clear the cache if a trainer can replace weights."""
        if self._is_live:
            self.core.reset()
        elif not self._is_stopped:
            self._is_stopped = True
            logger.error("kvloft: caching is disabled until the engine restarts: %s", reason)
            self.core.stop()

    def close(self) -> None:
        if self._poller is not None:
            self._poller.close()
        self.core.close()
        self._adapters.close()
        if self._leave_server is not None:
            self._leave_server()
        self._store.close()
        self._log.log_events()
