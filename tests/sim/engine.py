"""The symbolic engine: vLLM's real Scheduler or AsyncScheduler, kvloft's real connector, workers that hold symbols.

Plays vLLM's engine core: sync steps, or two batches in flight. Everything that crosses to a worker and back is pickled, as
between processes. Ends with `assert_at_rest`: every owner gave back what it had.
"""

import pickle
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvloft.vllm.connector import KVLoftConnector
from vllm import SamplingParams

from .mover import SlowMover, Trouble
from .symbols import Spec
from .worker import Worker

BLOCK = 4
HASH = "sha256"


@dataclass(frozen=True)
class Shape:
    """One configuration of engine and cache."""

    async_scheduling: bool = False
    v2: bool = False
    caching: bool = False
    num_blocks: int = 20
    max_batched_tokens: int = 16
    max_seqs: int = 6
    num_drafts: int = 0
    policy: str = "recompute"
    host_frames: int = 40
    num_ranks: int = 1
    max_delay: int = 0
    save_failure: float = 0.0
    load_failure: float = 0.0
    early_results: bool = False


@dataclass
class Outcome:
    """What a request said, and how it ended (None: not yet)."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    turns: int = 0


class Engine:
    """See the module. ``model`` is a folder with a config.json; ``disk`` a folder for the disk tier."""

    def __init__(self, model: Path, shape: Shape, seed: int, disk: Path | None = None) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self.trouble = Trouble(random.Random(seed + 1), shape.max_delay, shape.save_failure, shape.load_failure)
        self.specs: dict[str, Spec] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.external: list[tuple[str, int, bool]] = []
        self._config = _config(model, shape, disk)
        self._kv_config = _kv_config(shape)
        init_none_hash(get_hash_fn_by_name(HASH))
        self._hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name(HASH))
        scheduler = AsyncScheduler if shape.async_scheduling else Scheduler
        self.workers = [self._worker(rank) for rank in range(shape.num_ranks)]
        self.scheduler: Any = scheduler(
            vllm_config=self._config, kv_cache_config=self._kv_config, block_size=BLOCK, hash_block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(self._config), log_stats=True,
        )  # fmt: skip
        self.scheduler.use_v2_model_runner = shape.v2
        self.half = self.scheduler.connector._scheduler
        self.core = self.half.core
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, shape.num_ranks)
        self._flying: deque[tuple[Any, Any]] = deque()
        self._steps_without_tokens = 0
        self._watch_admissions()

    def _worker(self, rank: int) -> Worker:
        self._config.parallel_config.rank = rank
        connector = KVLoftConnector(self._config, KVConnectorRole.WORKER, self._kv_config)
        kv = torch.full((self.shape.num_blocks, BLOCK), -1, dtype=torch.int64)
        core = connector._worker.core
        core._given_make_mover = lambda layouts, frames: SlowMover(layouts[0], frames, kv, self.trouble, self._owns)
        connector.register_kv_caches({"layer": kv})
        return Worker(connector, kv, self.specs, num_drafts=self.shape.num_drafts, early_results=self.shape.early_results, seed=7)

    def _watch_admissions(self) -> None:
        original: Callable[..., None] = self.scheduler.connector.update_state_after_alloc

        def admitted(request: Any, blocks: Any, num_external_tokens: int) -> None:
            self.external.append((request.request_id, num_external_tokens, request.num_preemptions > 0))
            original(request, blocks, num_external_tokens)

        self.scheduler.connector.update_state_after_alloc = admitted

    def _owns(self, req_id: str, blocks: Sequence[int]) -> bool:
        """Whether vLLM still holds all ``blocks`` for the request, aborted or not."""
        table = self.scheduler.kv_cache_manager.get_block_ids(req_id)[0]
        return set(blocks) <= set(table)

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, spec: Spec) -> None:
        self.specs[spec.id] = spec
        self.outcomes[spec.id] = Outcome()
        self.scheduler.add_request(self._request(spec, spec.ids, spec.max_tokens, resumable=bool(spec.turns)))

    def _request(self, spec: Spec, ids: Any, max_tokens: int, *, resumable: bool, embeds: bool = True) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(
            request_id=spec.id, prompt_token_ids=list(ids) if ids is not None else None, sampling_params=params,
            pooling_params=None, prompt_embeds=spec.embeds if embeds else None,
            prompt_is_token_ids=list(spec.is_token) if spec.is_token else None, cache_salt=spec.salt,
            lora_request=LoRARequest(spec.adapter, 1, f"/adapters/{spec.adapter}") if spec.adapter else None,
            block_hasher=self._hasher, resumable=resumable,
        )  # fmt: skip

    def abort(self, req_id: str) -> None:
        if self.outcomes[req_id].reason is None:
            self.outcomes[req_id].reason = "abort"
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool, connector: bool) -> None:
        """reset_prefix_cache; vLLM refuses it for running requests while a load or a batch holds blocks."""
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        except RuntimeError as error:
            assert "remote KV transfer" in str(error)

    @property
    def unfinished(self) -> list[str]:
        return [r for r, o in self.outcomes.items() if o.reason is None]

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn of the engine core's loop."""
        self._step()
        self._end_a_session_that_blocks()
        assert not self.trouble.violations, self.trouble.violations
        movers = [w.connector._worker.core._mover for w in self.workers]
        assert all(mover is None or isinstance(mover, SlowMover) for mover in movers), "the product's own mover is not slow"
        errors = self.half.hook_errors + sum(w.connector._worker.hook_errors for w in self.workers)
        assert not errors or self.trouble.crash, "an exception was turned into a miss; see the log"

    def _end_a_session_that_blocks(self) -> None:
        """Sessions between two turns keep their blocks, and vLLM preempts none of them: a few can fill the pool and wait for
        each other permanently, with or without a connector. Their user would end one."""
        self._steps_without_tokens += 1
        sessions = [r for r in self.unfinished if self.specs[r].turns] if self._steps_without_tokens > 200 else []
        if sessions:
            self._steps_without_tokens = 0
            self.abort(sessions[0])

    def _step(self) -> None:
        if self.shape.async_scheduling:
            self._step_async()
        elif self.scheduler.has_requests():
            output = self.scheduler.schedule()
            result = self._execute(output)
            self._absorb(output, result)
            if self.shape.num_drafts and output.total_num_scheduled_tokens:
                ids = list(output.num_scheduled_tokens)
                self.scheduler.update_draft_token_ids(DraftTokenIds(ids, self.workers[0].drafts(ids)))

    def _step_async(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._flying.append((output, self._execute(output)))
            executed = output.total_num_scheduled_tokens > 0
            if len(self._flying) < 2 and (executed or self.scheduler.has_requests()):
                return
        if self._flying:
            self._absorb(*self._flying.popleft())

    def _execute(self, output: Any) -> Any:
        self._check_saves(output)
        metadata = pickle.dumps(output.kv_connector_metadata)
        results = [w.execute(output, pickle.loads(metadata)) for w in self.workers]
        for result in results:
            transfers = result.kv_connector_output
            transfers.kv_connector_worker_meta = pickle.loads(pickle.dumps(transfers.kv_connector_worker_meta))
        return self._aggregator.aggregate(results) if len(results) > 1 else results[0]

    def _check_saves(self, output: Any) -> None:
        """A plan names only blocks its request owns while it is made (I6), and whole confirmed blocks (I7)."""
        for save in output.kv_connector_metadata.plan.saves:
            request = self.scheduler.requests[save.req_id]
            for copy in save.chunks:
                assert self._owns(save.req_id, copy.blocks), f"save of blocks {copy.blocks}, not {save.req_id}'s (I6)"
                table = self.scheduler.kv_cache_manager.get_block_ids(save.req_id)[0]
                assert 0 not in copy.blocks
                assert (table.index(copy.blocks[-1]) + 1) * BLOCK <= request.num_tokens, "more than is confirmed (I7)"

    def _absorb(self, output: Any, result: Any) -> None:
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                outcome = self.outcomes[one.request_id]
                outcome.tokens += one.new_token_ids
                self._steps_without_tokens = 0
                if one.finish_reason is not None and outcome.reason is None:
                    self._ended(self.specs[one.request_id], outcome, str(one.finish_reason))

    def _ended(self, spec: Spec, outcome: Outcome, reason: str) -> None:
        """One input of a session was answered, or the whole request."""
        if reason == "length" and outcome.turns < len(spec.turns):
            turn = spec.turns[outcome.turns]
            outcome.turns += 1
            self.scheduler.add_request(self._request(spec, turn.ids, turn.max_tokens, resumable=True, embeds=False))
            return
        outcome.reason = reason
        if spec.turns and spec.id in self.scheduler.requests:
            self.scheduler.finish_requests(spec.id, RequestStatus.FINISHED_ABORTED)

    def run(self, max_steps: int = 6000) -> None:
        """Step until nothing is left to do; a real disk may need time rather than steps."""
        for i in range(max_steps):
            if not self.scheduler.has_requests() and not self._flying:
                return
            self.step()
            if i > max_steps // 2:
                time.sleep(0.001)
        raise AssertionError(f"the engine does not come to rest: {self.unfinished}")

    # -- the end --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every request said its truth, or a beginning of it if it was aborted or its load failed."""
        for req_id, outcome in self.outcomes.items():
            truth = self.specs[req_id].truth()
            if outcome.reason == "length":
                assert outcome.tokens == truth, f"{req_id} said something else"
            elif outcome.reason == "error":
                assert self.shape.policy == "fail"
                assert self.trouble.num_loads_failed, f"{req_id} failed without a cause"
            else:
                assert outcome.reason == "abort", (req_id, outcome)
                assert outcome.tokens == truth[: len(outcome.tokens)]

    def assert_at_rest(self) -> None:
        """Pins, reservations, blocks and queues are back to nothing (I5, I8)."""
        scheduler = self.scheduler
        assert not scheduler.requests
        assert not scheduler.running
        assert not len(scheduler.waiting)
        assert not scheduler.deferred_frees
        assert not scheduler.finished_recving_kv_req_ids
        assert not scheduler.failed_recving_kv_req_ids
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.num_blocks - 1
        assert not self.core.has_work_in_flight
        assert not self.core._requests
        stats = self._settled_store()
        assert (stats["pins"], stats["frames_reserved"]) == (0, 0), stats
        assert stats["frames_visible"] + stats["frames_free"] == stats["frames_total"], stats

    def _settled_store(self) -> dict[str, int]:
        """The store's numbers once reads that are not waited for any more have ended."""
        stats: dict[str, int] = {}
        for _ in range(500):
            stats = self.half._store.stats()
            if not stats["pins"] and not stats["frames_reserved"]:
                break
            time.sleep(0.01)
        return stats

    def close(self) -> None:
        self.scheduler.shutdown()


def _config(model: Path, shape: Shape, disk: Path | None) -> Any:
    """A VllmConfig whose async_scheduling is what the shape says, which the CPU platform would switch off."""
    original: Any = CpuPlatform.check_and_update_config.__func__

    def check(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = shape.async_scheduling

    drafts = {"method": "ngram", "num_speculative_tokens": shape.num_drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    extra: dict[str, Any] = {"host_size": shape.host_frames * shape.num_ranks * 4096}
    extra |= {"disk_path": str(disk), "disk_size": "4MiB"} if disk else {}
    CpuPlatform.check_and_update_config = classmethod(check)
    try:
        config = EngineArgs(
            model=str(model), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=BLOCK,
            max_model_len=(shape.num_blocks - 1) * BLOCK, max_num_seqs=shape.max_seqs,
            max_num_batched_tokens=shape.max_batched_tokens, enable_prefix_caching=shape.caching, enable_chunked_prefill=True,
            async_scheduling=False, enable_prompt_embeds=not shape.num_drafts, prefix_caching_hash_algo=HASH,
            speculative_config=drafts if shape.num_drafts else None,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVLoftConnector", kv_connector_module_path="kvloft.vllm", kv_role="kv_both",
                kv_load_failure_policy=shape.policy, kv_connector_extra_config=extra),
        ).create_engine_config()  # fmt: skip
    finally:
        CpuPlatform.check_and_update_config = classmethod(original)
    config.scheduler_config.async_scheduling = shape.async_scheduling
    config.cache_config.num_gpu_blocks = shape.num_blocks
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = shape.num_ranks
    return config


def _kv_config(shape: Shape) -> KVCacheConfig:
    """One group of one layer whose page is one int64 a token."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    assert spec.page_size_bytes == 8 * BLOCK
    return KVCacheConfig(num_blocks=shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
