"""Plans loads, and settles each load after all ranks have reported it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import isinf

from kvloft.plan.admission import Admission
from kvloft.plan.context import PlanContext
from kvloft.plan.leases import Lease
from kvloft.plan.request_state import RequestState
from kvloft.seam.batch import ChunkBatch, Tables
from kvloft.seam.ids import ReqId
from kvloft.seam.plan import LAYOUT, LoadPlan, LoadResult


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load, the lease to hold until the load completes, and the number of tokens per tier."""

    plan: LoadPlan
    lease: Lease | None
    tokens_by_tier: Mapping[str, int]


@dataclass(slots=True)
class LoadProgress:
    """Progress of a load that some ranks have not reported yet."""

    lease: Lease | None
    num_ranks_left: int
    has_chunks: bool
    has_failed: bool = False
    """True if the load failed on a rank or a chunk failed verification."""
    is_other_layout: bool = False
    """True if a chunk's memory layout differs from the worker's. Such a chunk is not damaged."""

    def add(self, result: LoadResult) -> bool:
        """Add one rank's result. Return True if all ranks have reported."""
        self.has_failed |= bool(result.bad_keys) or result.failed
        self.is_other_layout |= any(problem == LAYOUT for _, problem in result.bad_keys)
        self.num_ranks_left -= 1
        return self.num_ranks_left == 0

    @property
    def counts_for_breaker(self) -> bool:
        return (self.has_chunks or self.has_failed) and not self.is_other_layout

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


def plan_load(
    request: RequestState, unit_tokens: int, num_tokens: int, load_id: int
) -> PlannedLoad:
    """Plan copies to the blocks of tokens [local_tokens, local_tokens + num_tokens).

    Blocks are ``lost`` if the lease no longer covers their chunk.
    """
    begin = request.local_tokens // unit_tokens
    end = (request.local_tokens + num_tokens) // unit_tokens
    chunks: ChunkBatch | tuple[()] = ()
    units_by_tier: dict[str, int] = {}
    if (lease := request.lease) is not None:
        chunks, units_by_tier = lease.store_lease.batch(request.blocks.tables, begin, end)
        request.lease = None
    unplanned = request.blocks[begin + sum(units_by_tier.values()) : end]
    lost = tuple(filter(None, unplanned))  # skip the null block, whose id is 0
    tokens_by_tier = {tier: num * unit_tokens for tier, num in units_by_tier.items()}
    return PlannedLoad(LoadPlan(request.req_id, load_id, chunks, lost), lease, tokens_by_tier)


class LoadPlanner:
    """Plans loads for admitted requests and tracks each load until all ranks have reported."""

    def __init__(self, context: PlanContext, admission: Admission) -> None:
        self._context, self._admission = context, admission
        self._unit_tokens = context.settings.shape.unit_tokens
        self._load_ids = count()
        self.queued: list[LoadPlan] = []
        """Loads for the next step plan."""
        self.in_progress: dict[int, LoadProgress] = {}

    def plan(self, request: RequestState, num_tokens: int) -> None:
        """Queue a load of ``num_tokens`` for a request that vLLM has admitted."""
        context = self._context
        self._admission.gates.take_blocks(request, num_tokens)
        load = plan_load(request, self._unit_tokens, num_tokens, next(self._load_ids))
        lost = load.plan.lost
        if load.lease is not None:
            self._admission.begin_load(request, load.lease, num_tokens, is_whole=not lost)
        request.loaded_tokens = load.tokens_by_tier
        num_units = (request.local_tokens + num_tokens) // self._unit_tokens
        context.notes.add_states(request, num_units)
        self._queue(load.plan, load.lease)
        for tier, tokens in load.tokens_by_tier.items():
            context.counters[f"load_tokens_{tier}"] += tokens
        if lost:
            request.fail_load()
            context.counters["load_lost_blocks"] += len(lost)

    def plan_failure(self, req_id: ReqId, num_tokens: int, tables: Tables) -> None:
        """Queue a load that fails without copying, which makes vLLM compute the tokens."""
        begin = 0
        if (request := self._context.requests.get(req_id)) is not None:
            begin = request.local_tokens // self._unit_tokens
            request.fail_load()
        lost = tuple(tables[begin : begin + num_tokens // self._unit_tokens])
        self._queue(LoadPlan(req_id, next(self._load_ids), lost=lost), None)

    def _queue(self, plan: LoadPlan, lease: Lease | None) -> None:
        num_ranks = self._context.settings.shape.num_ranks
        has_chunks = bool(plan.chunks)
        self.in_progress[plan.load_id] = LoadProgress(lease, num_ranks, has_chunks)
        self.queued.append(plan)

    def take_queued(self) -> tuple[LoadPlan, ...]:
        loads, self.queued = tuple(self.queued), []
        return loads

    def settle(self, result: LoadResult) -> None:
        """Process one rank's load result."""
        if result.bad_keys:
            self._remove_damaged(result)
        if result.bad_keys or result.failed:
            self._admission.gates.fail(result.req_id)
            if (request := self._context.requests.get(result.req_id)) is not None:
                request.fail_load()
                request.forget_saves()
        load = self.in_progress.get(result.load_id)
        if load is None or not load.add(result):
            return
        del self.in_progress[result.load_id]
        load.release()
        if load.counts_for_breaker:
            self.count_copy(failed=load.has_failed)

    def _remove_damaged(self, result: LoadResult) -> None:
        """Remove chunks that failed verification. Keep chunks with a different memory layout, which
        are valid for other engines.
        """
        context = self._context
        damaged = [key for key, problem in result.bad_keys if problem != LAYOUT]
        if damaged:
            context.store.discard(damaged)
        context.counters["verify_failures"] += len(damaged)
        context.counters["layout_mismatches"] += len(result.bad_keys) - len(damaged)

    def count_copy(self, *, failed: bool) -> None:
        """Record a completed load or, once the breaker has tripped, a failed save."""
        context = self._context
        if context.breaker.count(context.clock(), failed=failed):
            context.counters["load_breaker_trips"] += 1
            self._admission.release_all()
            if isinf(context.breaker.retry_s):
                context.notes.withdraw()

    def close(self) -> None:
        for load in self.in_progress.values():
            load.release()
        self.in_progress.clear()
        self.queued.clear()
