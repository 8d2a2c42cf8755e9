"""The engine of the correctness machine: vLLM's real Scheduler or AsyncScheduler and KV cache
manager, kvloft's real connector in both roles with a real store, and workers whose memory holds
symbols.

The engine behaves like vLLM's engine core, with synchronous steps or two batches in flight. All
messages to and from workers are pickled, as between processes. Each step fails if the ledger
contains a breach. `settle` checks that all resources were released.
"""

import pickle
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvloft import _core, store
from kvloft.vllm import scheduler_half, support
from kvloft.vllm.identity.weights import LooksInTime

from .groups import are_grouped
from .ledger import Ledger, State, copies
from .memory import Memory
from .mover import SlowMover, Trouble
from .requests import make_request
from .shape import HASH, Shape, kv_config, vllm_config
from .steady import SteadyStore
from .symbols import Spec
from .worker import Worker


@dataclass
class Outcome:
    """A request's output and finish reason (None while the request runs)."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    turns: int = 0
    has_lost_blocks: bool = False
    """True if the request was preempted while its last step was in flight. The previous step's
    tokens then arrived too late to be saved.
    """


@contextmanager
def all_is_tried() -> Iterator[None]:
    """Enable configurations that kvloft rejects because they have not been tested with a model."""
    refused = ("_of_drafts_with_states", "_of_drafts_with_block_sizes")
    with pytest.MonkeyPatch.context() as patch:
        for name in refused:
            patch.setattr(support, name, lambda *_: iter(()))
        yield


class Engine:
    """The engine (see the module docstring).

    ``model`` is a directory that contains config.json, ``disk`` is the directory of the disk tier,
    and ``ledger`` is the ledger of the previous engine.
    """

    store_type: ClassVar[type[SteadyStore]] = SteadyStore

    def __init__(
        self,
        model: Path,
        shape: Shape,
        seed: int,
        disk: Path | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.shape = shape
        self.ledger = ledger or Ledger(shape.num_ranks, shape.groups)
        self.trouble = Trouble(random.Random(seed))
        self.now, self.step_s = 0.0, 0.05
        self.is_broken = False
        """True after a step has found a breach. The engine must not be used after that."""
        self.specs: dict[str, Spec] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.admissions: list[tuple[str, int, bool]] = []
        """Admitted requests in vLLM's order: the request, the number of tokens to load, and True if
        the request had been preempted.
        """
        self.num_steps = self.num_scheduled = self.num_preempted = self.num_loaded = (
            self.num_hits
        ) = self.num_mixed_hits = 0
        self._hoped: dict[str, tuple[int, int]] = {}
        """The first token and the number of tokens of each load whose request has not yet run.

        A load is counted as a hit when its request runs.
        """
        self._config, self._kv_config = (
            vllm_config(model, shape, disk, self.ledger.namespace),
            kv_config(shape),
        )
        self._block, hash_block = resolve_kv_cache_block_sizes(self._kv_config, self._config)
        init_none_hash(get_hash_fn_by_name(HASH))
        self._hasher = get_request_block_hasher(hash_block, get_hash_fn_by_name(HASH))
        self.store: SteadyStore | None = None
        with all_is_tried():
            self.scheduler = self._make_scheduler(hash_block)
            self.workers = [self._make_worker(rank, seed) for rank in range(shape.num_ranks)]
        self._flying: deque[tuple[Any, Any]] = deque()
        self._reports: defaultdict[int, list[tuple[int, Any]]] = defaultdict(list)
        """Reports of the ranks for steps whose results are still in flight."""
        self._states: dict[str, list[State]] = {}
        """The Mamba states that vLLM offers in the planned step, by request."""
        self._steps_without_tokens = 0
        if shape.has_connector:
            self.half = self.scheduler.connector._scheduler
            self.core = self.half.core
            assert self.core._store is self.store, (
                "kvloft opened its store itself, so the machine cannot observe it"
            )
            assert self.core._clock() == self.now, "kvloft does not use the machine's clock"
            assert self.half._adapters._looks._timeout_s < 30.0
            # With a short timeout, the result would depend on the speed of the file system.
            self.half._adapters._looks = LooksInTime(30.0)
            self._aggregator = KVOutputAggregator.from_connector(
                self.scheduler.connector, shape.num_ranks
            )
            self._watch()

    def _make_scheduler(self, hash_block: int) -> Any:
        """Make a scheduler whose clock and store are controlled by the machine."""
        original = scheduler_half.time, store._core
        scheduler_half.time = SimpleNamespace(monotonic=lambda: self.now)  # type: ignore[assignment]
        store._core = SimpleNamespace(**vars(_core) | {"Session": self._open_session})  # type: ignore[assignment]
        try:
            scheduler: Any = (AsyncScheduler if self.shape.async_scheduling else Scheduler)(
                vllm_config=self._config,
                kv_cache_config=self._kv_config,
                block_size=self._block,
                hash_block_size=hash_block,
                structured_output_manager=StructuredOutputManager(self._config),
                log_stats=False,
            )
        finally:
            scheduler_half.time, store._core = original
        scheduler.use_v2_model_runner = self.shape.v2
        scheduler.max_num_encoder_input_tokens = 4096
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
        return scheduler

    def _open_session(self, **settings: Any) -> Any:
        self.store = self.store_type(
            _core.Session(**settings), self.ledger, settings["groups"], has_disk=self.shape.has_disk
        )
        return self.store

    def _make_worker(self, rank: int, seed: int) -> Worker:
        memory, connector = Memory(self.shape, self.ledger), None
        if self.shape.has_connector:
            self._config.parallel_config.rank = rank
            connector = KVConnectorFactory.create_connector(
                self._config, KVConnectorRole.WORKER, self._kv_config
            )
            core = connector._worker.core
            assert core._given_make_mover is None
            core._given_make_mover = lambda layouts, frames: SlowMover(
                layouts,
                frames,
                self.trouble,
                self.ledger,
                self._owns,
                is_early=core._settings.gathers_first,
            )
            connector.register_kv_caches(memory.kv_caches())
        return Worker(connector, memory, self.specs, self.shape, random.Random(seed + 1))

    def _owns(self, req_id: str, blocks: Any) -> bool:
        """Return True if vLLM still holds all ``blocks`` for the request, which may have been
        aborted.
        """
        return set(blocks) <= set(
            chain.from_iterable(self.scheduler.kv_cache_manager.get_block_ids(req_id))
        )

    def _watch(self) -> None:
        """Make the ledger check all offers and admissions."""
        connector = self.scheduler.connector
        match, admit = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def matched(request: Any, local: int) -> Any:
            self._hoped.pop(request.request_id, None)
            state = self.core._requests.get(request.request_id)
            has_offer = state is not None and state.lease is not None
            # KV for an adapter whose files are newer than this process is not shared between runs.
            is_apart = (
                self.specs[request.request_id].adapter is not None and self.ledger.num_lives > 1
            )
            (self.ledger.standing.add if has_offer or is_apart else self.ledger.standing.discard)(
                request.request_id
            )
            answer, is_async = match(request, local)
            assert answer is None or is_async == (answer > 0)
            if (
                answer == 0 and self.core._admission.gates.first_without_blocks is not None
            ):  # kvloft lets the request compute its tokens
                self.ledger.standing.add(request.request_id)
            spec = self.specs[request.request_id]
            if spec.skips_cache:
                self.ledger.expect(not answer, f"{spec.id} asked for no cached KV")
            else:
                prefix = spec.prefix(request._all_token_ids)
                self.ledger.check_offer(spec.id, prefix, local, answer, self.shape.unit)
            return answer, is_async

        def admitted(request: Any, blocks: Any, num_tokens: int) -> None:
            req_id = request.request_id
            self.admissions.append((req_id, num_tokens, request.num_preemptions > 0))
            if num_tokens:
                local, answer = self.ledger.asked[req_id]
                self.ledger.expect(
                    num_tokens == answer,
                    f"{req_id}: {num_tokens} tokens accepted of {answer} offered",
                )
                self.ledger.admitted[req_id] = self._hoped[req_id] = (local, num_tokens)
                self.num_loaded += num_tokens
            admit(request, blocks, num_tokens)

        def planned(output: Any) -> Any:
            state = getattr(output, "kv_connector_block_state", None)
            self._states = dict(state.boundary_state_offloads) if state is not None else {}
            return plan(output)

        plan = connector.build_connector_meta
        connector.get_num_new_matched_tokens, connector.update_state_after_alloc = matched, admitted
        connector.build_connector_meta = planned

    # -- requests
    # -----------------------------------------------------------------------------------------

    def add(self, spec: Spec) -> None:
        if self.shape.may_leave_drafter_out(spec.most_tokens):
            self.ledger.lose("the drafter is left out of some steps")
        self.specs[spec.id] = spec
        self.outcomes[spec.id] = Outcome()
        self.scheduler.add_request(make_request(spec, self._hasher))

    def abort(self, req_id: str) -> None:
        if self.outcomes[req_id].reason is None:
            self.outcomes[req_id].reason = "abort"
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool, connector: bool) -> None:
        """Call reset_prefix_cache. With ``connector``, switch to different weights if the reset
        succeeds.

        vLLM rejects a reset of running requests while a load or a batch holds blocks.
        """
        try:
            done = self.scheduler.reset_prefix_cache(
                reset_running_requests=running, reset_connector=connector
            )
        except RuntimeError as error:
            assert "remote KV transfer" in str(error)
            return
        if connector:
            self.ledger.lose("the cache was reset")
        if connector and done:
            self.ledger.new_weights()

    @property
    def unfinished(self) -> list[str]:
        return [r for r, o in self.outcomes.items() if o.reason is None]

    @property
    def loading(self) -> list[str]:
        """Return the requests that are waiting for a load."""
        waits, requests = RequestStatus.WAITING_FOR_REMOTE_KVS, self.scheduler.requests
        return [
            req_id
            for req_id in self.unfinished
            if req_id in requests and requests[req_id].status == waits
        ]

    # -- steps
    # -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run one iteration of the engine core's loop and check the result."""
        self.is_broken = True
        self.now += self.step_s
        self._step()
        self.num_steps += 1
        self._end_a_session_that_blocks()
        assert not self.ledger.breaches, self.ledger.breaches[:3]
        if self.shape.has_connector:
            errors = self.half.hook_errors + sum(
                w.connector._worker.hook_errors for w in self.workers
            )
            assert not errors or self.trouble.crash, (
                "an exception was converted into a miss; see the log"
            )
        self.is_broken = False

    def _end_a_session_that_blocks(self) -> None:
        """End a session that blocks other requests.

        Sessions between two turns keep their blocks, and vLLM does not preempt these sessions. Even
        without a connector, a few sessions can fill the pool and deadlock until a user ends a
        session.
        """
        self._steps_without_tokens += 1
        sessions = (
            [r for r in self.unfinished if self.specs[r].turns]
            if self._steps_without_tokens > 100
            else []
        )
        if sessions:
            self._steps_without_tokens = 0
            self.abort(sessions[0])

    def _lost_session(self) -> str | None:
        """Return a session that vLLM has lost.

        With async scheduling, even without a connector, vLLM 0.32 drops a session from every queue
        if it is preempted in the step that ends its turn. A user would end such a session.
        """
        scheduler = self.scheduler
        queued = {
            request.request_id
            for queue in (scheduler.waiting, scheduler.running)
            for request in queue
        }
        sessions = (
            r
            for r in self.unfinished
            if self.specs[r].turns and r in scheduler.requests and r not in queued
        )
        return next(sessions, None) if self.shape.async_scheduling else None

    def _step(self) -> None:
        if self.shape.async_scheduling:
            self._step_async()
        elif self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._absorb(output, self._execute(output))
            if self.shape.num_drafts and output.total_num_scheduled_tokens:
                ids = list(output.num_scheduled_tokens)
                self.scheduler.update_draft_token_ids(
                    DraftTokenIds(ids, self.workers[0].drafts(ids))
                )

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
        self.num_scheduled += 1
        self.num_preempted += len(getattr(output, "preempted_req_ids", None) or ())
        if not self.shape.has_connector:
            return self._alike([w.execute(output, None) for w in self.workers])
        self._check_plan(output)
        metadata = pickle.dumps(output.kv_connector_metadata)
        results = []
        for rank, worker in enumerate(self.workers):
            result = worker.execute(output, pickle.loads(metadata))
            transfers = result.kv_connector_output
            transfers.kv_connector_worker_meta = meta = pickle.loads(
                pickle.dumps(transfers.kv_connector_worker_meta)
            )
            self._reports[id(output)] += (
                [(rank, report) for report in meta.reports] if meta is not None else []
            )
            results.append(result)
        self._count_hits()
        return self._aggregator.aggregate(results) if len(results) > 1 else results[0]

    def _count_hits(self) -> None:
        """Count hits: admitted loads that succeeded and whose KV was checked on every rank before
        the request's first step.

        If all layers have full attention, vLLM may compute the last loaded token again.
        """
        for work in self.workers[0].works:
            local, num_tokens = self._hoped.pop(work.req_id, (0, 0))
            if num_tokens and work.start >= local + num_tokens - (
                not are_grouped(self.shape.groups)
            ):
                self.num_hits += 1
                self.num_mixed_hits += local > 0

    def _alike(self, results: list[Any]) -> Any:
        assert all(result.sampled_token_ids == results[0].sampled_token_ids for result in results)
        return results[0]

    def _check_plan(self, output: Any) -> None:
        plan = output.kv_connector_metadata.plan
        for plans, check in ((plan.saves, self._check_save), (plan.loads, self._check_load)):
            for each in plans:
                check(each, output)
        for req_id, states in self._states.items():
            if req_id not in (output.preempted_req_ids or ()):
                spec, request = self.specs[req_id], self.scheduler.requests[req_id]
                limit = request.num_prompt_tokens if spec.saves == "prompt" else request.num_tokens
                tables = self.scheduler.kv_cache_manager.get_block_ids(req_id)
                held = [state for state in states if self._holds(tables, *state)]
                self.ledger.check_states(req_id, spec.prefix(request._all_token_ids), held, limit)

    def _holds(self, tables: Any, group: int, block: int, num_tokens: int) -> bool:
        """Return True if the table still holds the block for the state after ``num_tokens``.

        vLLM can free and reallocate the block in the same scheduling pass, even to the same
        request.
        """
        at = num_tokens // self.shape.groups[group].block_tokens - 1
        return bool(tables[group][at : at + 1] == [block])

    def _check_save(self, save: Any, output: Any) -> None:
        request = self.scheduler.requests[save.req_id]
        drafts = len(output.scheduled_spec_decode_tokens.get(save.req_id, ()))
        tables = self.scheduler.kv_cache_manager.get_block_ids(save.req_id)
        prefix = self.specs[save.req_id].prefix(request._all_token_ids)
        computed = request.num_computed_tokens - drafts
        states = self._states.get(save.req_id, ())
        self.ledger.check_save(save, prefix, tables, computed, states)
        if self.specs[save.req_id].saves == "prompt":
            own = [
                (g, copy.blocks[-1])
                for g, copy in copies(save.chunks)
                if copy.blocks[-1] in tables[g]
            ]
            end = max(
                (tables[g].index(last) + 1) * self.shape.groups[g].block_tokens for g, last in own
            )
            self.ledger.expect(
                end <= request.num_prompt_tokens,
                f"{save.req_id} must save its prompt only, but {end} tokens are saved",
            )

    def _check_load(self, load: Any, output: Any) -> None:
        request = self.scheduler.requests[load.req_id]
        tables = self.scheduler.kv_cache_manager.get_block_ids(load.req_id)
        self.ledger.check_load(load, self.specs[load.req_id].prefix(request._all_token_ids), tables)

    def _absorb(self, output: Any, result: Any) -> None:
        for rank, report in self._reports.pop(id(output), ()):
            self.ledger.check_report(rank, report)
        requests = self.scheduler.requests
        for req_id in output.num_scheduled_tokens:
            self.outcomes[req_id].has_lost_blocks = (
                req_id in requests and requests[req_id].status == RequestStatus.PREEMPTED
            )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                outcome = self.outcomes[one.request_id]
                outcome.tokens += one.new_token_ids
                self._steps_without_tokens = 0
                if one.finish_reason is not None and outcome.reason is None:
                    self._ended(self.specs[one.request_id], outcome, str(one.finish_reason))

    def _ended(self, spec: Spec, outcome: Outcome, reason: str) -> None:
        """Handle the end of a request or of one input of a session."""
        if reason == "length" and outcome.turns < len(spec.turns):
            turn = spec.turns[outcome.turns]
            outcome.turns += 1
            self.scheduler.add_request(make_request(spec, self._hasher, turn))
            return
        outcome.reason = reason
        if spec.turns and spec.id in self.scheduler.requests:
            self.scheduler.finish_requests(spec.id, RequestStatus.FINISHED_ABORTED)

    def run(self, max_steps: int = 3000) -> None:
        """Run steps until the engine is idle.

        A session can block other requests for a hundred steps before the engine ends it. With
        hundreds of requests, each request can need some steps in which no other request runs.
        """
        sessions = sum(bool(self.specs[r].turns) for r in self.unfinished)
        for _ in range(max_steps + 10 * len(self.unfinished) + 150 * sessions):
            if not self.scheduler.has_requests() and not self._flying:
                if not (lost := self._lost_session()):
                    return
                self.abort(lost)
            self.step()
        raise AssertionError(f"the engine does not become idle: {self.unfinished}")

    # -- the end of a test
    # -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Run without further faults. Every request must finish with the correct output, and all
        resources must be released.
        """
        self.trouble.end()
        self.step_s = 1.0
        if self.store is not None:
            self.store.is_kind = True
        self.run()
        self._check_outcomes()
        self._assert_at_rest()
        assert not self.ledger.breaches, self.ledger.breaches[:3]

    def _check_outcomes(self) -> None:
        """Check the outcome of every request.

        The output must be correct, or a prefix of the correct output if the request was aborted or
        its load failed. The KV of a request that finished normally must be stored.
        """
        for req_id, outcome in self.outcomes.items():
            spec = self.specs[req_id]
            truth = spec.truth()
            if outcome.reason == "length":
                assert outcome.tokens == truth, f"{req_id} has a different output"
                if self.shape.has_connector and not spec.turns:
                    prefix = spec.prefix([0] * len(spec.contents) + truth)
                    # vLLM frees the blocks before it reports which draft tokens the last step
                    # accepted.
                    late = (1 + self.shape.num_drafts) * (1 + outcome.has_lost_blocks)
                    whole = min(
                        len(prefix) - late, len(spec.contents) if spec.saves else len(prefix)
                    )
                    self.ledger.check_stored(
                        req_id, prefix, whole - self.ledger.ahead, self.shape.unit
                    )
            elif outcome.reason == "error":
                assert self.shape.policy == "fail"
                assert req_id in self.ledger.doubtful, f"{req_id} failed without a cause"
            else:
                assert outcome.reason == "abort", (req_id, outcome)
                assert outcome.tokens == truth[: len(outcome.tokens)]

    def _assert_at_rest(self) -> None:
        """Check that no pins, reservations, blocks or queued requests remain (I5, I8)."""
        scheduler = self.scheduler
        for left in (
            "requests",
            "running",
            "waiting",
            "deferred_frees",
            "finished_recving_kv_req_ids",
            "failed_recving_kv_req_ids",
        ):
            assert not len(getattr(scheduler, left, ())), left
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.num_blocks - 1
        if not self.shape.has_connector:
            return
        self.ledger.check_at_rest()
        self.store.settle_disk()
        assert not self.core.has_work_in_flight
        assert not self.core._requests
        stats: dict[str, int] = {}
        for _ in range(500):  # reads that no request waits for can complete later
            stats = self.store.stats()
            if not stats["pins"] and not stats["frames_reserved"]:
                break
            time.sleep(0.01)
        assert (stats["pins"], stats["frames_reserved"]) == (0, 0), stats
        assert stats["frames_visible"] + stats["frames_free"] == stats["frames_total"], stats

    def close(self) -> None:
        self.scheduler.shutdown()
