"""Benchmarks kvloft's scheduler side: `python benches/bench_scheduler.py [--json]`.

Measures:
- steps with 256 decoding requests: planning from vLLM's SchedulerOutput, and processing the
  workers' report
- admission of one long prompt, as a miss and as a hit, with one and with multiple KV cache groups
- admission of many hits in one step
- repeated matching of many requests waiting for disk reads

The benchmark uses a real store and real keys but does not copy KV. It requires vLLM.
"""

import argparse
import gc
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

from kvloft import _core
from kvloft.plan import Miss, Offer, PlanSettings, SchedulerCore, Wait
from kvloft.seam.batch import Tables
from kvloft.seam.plan import LoadResult, StepPlan, StepReport
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.seam.views import RequestView
from kvloft.store import arena_of, groups_of
from kvloft.vllm.identity.adapters import AdapterNames
from kvloft.vllm.views import VllmRequest, view_step

BLOCK_TOKENS = 16
NUM_RUNNING = 256
PROMPT_TOKENS = 131_072
NUM_CROWD, CROWD_TOKENS = 40, 32_768
ONE_GROUP = (GroupShape(BLOCK_TOKENS),)
GROUPS = (
    GroupShape(BLOCK_TOKENS),
    *(GroupShape(BLOCK_TOKENS, kind="window", reach=1023) for _ in range(6)),
)
"""vLLM's KV cache groups for Gemma 3."""
GROUPS_TOKENS = 32_768
TARGET_US = 100.0
NUM_WAITING = 10_000
TARGET_ASK_US = 2.0
ADAPTERS = AdapterNames()


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table, with times in ``unit``. The target applies to the median."""

    name: str
    median: float
    p99: float
    unit: str
    target: float | None
    met: bool | None


class Engine:
    """A minimal scheduler in which each request decodes one token per step."""

    def __init__(
        self,
        num_frames: int,
        run_ahead: bool = False,
        groups: tuple[GroupShape, ...] = ONE_GROUP,
        *,
        wrap_store: Callable[[Any], Any] = lambda store: store,
    ) -> None:
        shape = CacheShape(groups)
        self.groups = groups
        self.tables: dict[str, Tables] = {}
        self.session = _core.Session(
            frame_bytes=shape.frame_sizes,
            host_bytes=num_frames * shape.frame_bytes(0),
            namespace=bytes(32),
            groups=groups_of(shape),
        )
        self.store = wrap_store(self.session)
        root = _core.root_key(bytes(32), None, None)

        def new_chain(_: RequestView, lookahead: int) -> _core.KeyChain:
            return _core.KeyChain(root, block_tokens=BLOCK_TOKENS, lookahead=lookahead)

        settings = PlanSettings(shape, arena_of(self.session, shape))
        self.core = SchedulerCore(self.store, new_chain, settings, clock=time.monotonic)
        self.run_ahead = run_ahead
        self.requests: list[Any] = []
        self.next_block = 1

    def request(self, name: str, token_ids: list[int]) -> Any:
        """Return a stand-in for vLLM's Request with the attributes that kvloft reads."""
        return SimpleNamespace(
            request_id=name,
            _all_token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=0,
            lora_request=None,
            cache_salt=None,
            prompt_embeds=None,
            mm_features=[],
            skip_reading_prefix_cache=False,
            prompt_is_token_ids=None,
        )

    def blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def admit(self, request: Any) -> SchedulerOutput:
        """Schedule a whole prompt in one step and return the scheduler output."""
        live = VllmRequest(request, ADAPTERS)
        num_tokens = len(request._all_token_ids)
        request.block_ids = self.blocks(num_tokens // BLOCK_TOKENS + 1)
        self.core.admit(live, 0, self.table(request))  # type: ignore[arg-type]
        self.requests.append(request)
        new = SimpleNamespace(
            req_id=request.request_id, num_computed_tokens=0, block_ids=(request.block_ids,)
        )
        return self.output([new], [], {request.request_id: num_tokens})

    def table(self, request: Any) -> Any:
        """Return the request's block tables. Groups do not share block ids."""
        if len(self.groups) == 1:
            return Tables([request.block_ids])
        self.tables[request.request_id] = Tables(
            [
                [block + (nth << 24) for block in request.block_ids]
                for nth in range(len(self.groups))
            ],
            0,
        )  # type: ignore[misc]
        return self.tables[request.request_id]

    def output(
        self, new: list[Any], running: list[Any], scheduled: dict[str, int]
    ) -> SchedulerOutput:
        columns = [self.grown(request) for request in running]
        cached = CachedRequestData(
            req_ids=[request.request_id for request in running],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=columns,
            num_computed_tokens=[request.num_computed_tokens for request in running],
            num_output_tokens=[1] * len(running),
        )
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            preempted_req_ids=set(),
        )

    def grown(self, request: Any) -> Any:
        if request.num_computed_tokens // BLOCK_TOKENS < len(request.block_ids):
            return None
        fresh = self.blocks(1)
        request.block_ids += fresh
        if len(self.groups) > 1:
            for nth, table in enumerate(self.tables[request.request_id].tables):
                table.append(fresh[0] + (nth << 24))  # type: ignore[attr-defined]
        return (fresh,)

    def decode(self) -> SchedulerOutput:
        """Return the output of a step in which every request decodes one token.

        Sampled tokens are known in the next step or, with ``run_ahead``, in the step after that.
        """
        for request in self.requests:
            lag = 1 if self.run_ahead else 0
            while len(request._all_token_ids) <= request.num_computed_tokens - lag:
                request._all_token_ids.append(request.num_computed_tokens % 50_000)
        output = self.output(
            [], self.requests, {request.request_id: 1 for request in self.requests}
        )
        return output

    def plan(self, output: SchedulerOutput) -> StepPlan:
        view = view_step(output)
        if len(self.groups) > 1:
            view = view._replace(
                new=[replace(new, block_ids=()) for new in view.new], tables=self.tables.get
            )  # type: ignore[arg-type]
        return self.core.plan_step(view)

    def after(self, output: SchedulerOutput) -> None:
        for request in self.requests:
            request.num_computed_tokens += output.num_scheduled_tokens.get(request.request_id, 0)


def report_of(plan: StepPlan) -> StepReport:
    return StepReport(saved=tuple(copy.ticket for save in plan.saves for copy in save.chunks))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    answer = call()
    return (time.perf_counter() - start) * 1e6, answer


def row(
    name: str, times_us: Sequence[float], unit: str = "us", target: float | None = None
) -> Result:
    scale = 1e-3 if unit == "ms" else 1.0
    median = statistics.median(times_us) * scale
    p99 = statistics.quantiles(times_us, n=100)[98] * scale if len(times_us) > 1 else median
    return Result(name, median, p99, unit, target, None if target is None else median <= target)


def decode_results(
    num_steps: int, run_ahead: bool, groups: tuple[GroupShape, ...] = ONE_GROUP
) -> list[Result]:
    """Measure decode steps with requests at different offsets within their blocks.

    In each step, one sixteenth of the requests fill a block.
    """
    num_chunks = NUM_RUNNING * (num_steps // BLOCK_TOKENS + 40) * len(groups)
    engine = Engine(num_chunks, run_ahead, groups)
    random = Random(0)
    for i in range(NUM_RUNNING):
        prompt = [random.randrange(50_000) for _ in range(300 + i % BLOCK_TOKENS)]
        output = engine.admit(engine.request(f"request-{i}", prompt))
        engine.core.absorb(report_of(engine.plan(output)))
        engine.after(output)
    plans: list[float] = []
    wholes: list[float] = []
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        output = engine.decode()
        plan_us, plan = timed(lambda output=output: engine.plan(output))
        report = report_of(plan)
        absorb_us, _ = timed(lambda report=report: engine.core.absorb(report))
        plans.append(plan_us)
        wholes.append(plan_us + absorb_us)
        engine.after(output)
    gc.unfreeze()
    how = f"{NUM_RUNNING} decoding requests{', running ahead' if run_ahead else ''}"
    how += f", {len(groups)} groups" if len(groups) > 1 else ""
    engine.store.close()
    target = None if len(groups) > 1 else TARGET_US
    return [
        row(f"step, {how}: planning", plans),
        row(f"step, {how}: planning and report", wholes, target=target),
    ]


def prompt_results(turns: int) -> list[Result]:
    """Measure one prompt of 131,072 tokens: first as a miss that is saved, then as a full hit."""
    num_chunks = PROMPT_TOKENS // BLOCK_TOKENS
    missed: list[float] = []
    saved: list[float] = []
    settled: list[float] = []
    found: list[float] = []
    loaded: list[float] = []
    random = Random(1)
    ids = [random.randrange(50_000) for _ in range(PROMPT_TOKENS)]
    for _ in range(turns):
        engine = Engine(num_chunks + 8)
        request = engine.request("first", list(ids))
        us, answer = timed(
            lambda engine=engine, request=request: engine.core.match(
                VllmRequest(request, ADAPTERS), 0
            )
        )
        assert answer == Miss()
        missed.append(us)
        output = engine.admit(request)
        us, plan = timed(lambda engine=engine, output=output: engine.plan(output))
        saved.append(us)
        report = report_of(plan)
        us, _ = timed(lambda engine=engine, report=report: engine.core.absorb(report))
        settled.append(us)
        live = VllmRequest(engine.request("second", list(ids)), ADAPTERS)
        us, answer = timed(lambda engine=engine, live=live: engine.core.match(live, 0))
        assert answer == Offer(PROMPT_TOKENS)
        found.append(us)
        table = Tables([engine.blocks(PROMPT_TOKENS // BLOCK_TOKENS)])
        us, _ = timed(
            lambda engine=engine, live=live, table=table: engine.core.admit(
                live, PROMPT_TOKENS, table
            )
        )
        loaded.append(us)
        engine.core.close()
        engine.store.close()
    how = f"{PROMPT_TOKENS} tokens"
    return [
        row(f"{how}: keys and lookup, miss", missed, "ms"),
        row(f"{how}: save plan", saved, "ms"),
        row(f"{how}: processing the save report", settled, "ms"),
        row(f"{how}: keys and lookup, full hit", found, "ms"),
        row(f"{how}: load plan", loaded, "ms"),
    ]


def groups_results(turns: int) -> list[Result]:
    """Measure saving a prompt with multiple KV cache groups, and loading it in the next step."""
    num_chunks = GROUPS_TOKENS // BLOCK_TOKENS
    times: dict[str, list[float]] = {}
    random = Random(3)
    ids = [random.randrange(50_000) for _ in range(GROUPS_TOKENS)]

    def note(what: str, call: Callable[[], Any]) -> Any:
        us, answer = timed(call)
        times.setdefault(what, []).append(us)
        return answer

    for _ in range(turns):
        engine = Engine(num_chunks * len(GROUPS) + 8, groups=GROUPS)
        output = engine.admit(engine.request("first", list(ids)))
        plan = note("keys and save plan", lambda engine=engine, output=output: engine.plan(output))
        report = report_of(plan)
        note(
            "processing the save report",
            lambda engine=engine, report=report: engine.core.absorb(report),
        )
        live = VllmRequest(engine.request("second", list(ids)), ADAPTERS)
        found = note(
            "keys and lookup, full hit",
            lambda engine=engine, live=live: engine.core.match(live, 0),
        )
        assert found == Offer(GROUPS_TOKENS - BLOCK_TOKENS)  # vLLM must compute at least one token
        live.request.block_ids = engine.blocks(num_chunks)
        table = engine.table(live.request)
        num_tokens = found.num_tokens
        note("load plan", partial(engine.core.admit, live, num_tokens, table))
        (load,) = engine.plan(engine.output([], [], {})).loads
        assert len(load.chunks) == num_tokens // BLOCK_TOKENS + 6 * 64
        engine.core.close()
        engine.store.close()
    return [
        row(f"{GROUPS_TOKENS} tokens, 7 groups: {what}", us, "ms") for what, us in times.items()
    ]


def admitted_crowd_results(turns: int) -> list[Result]:
    """Measure the admission of many cached prompts in one step.

    Covers looking up the prompts, planning all loads, and pickling the plan for a worker.
    """
    num_chunks = CROWD_TOKENS // BLOCK_TOKENS
    engine = Engine(NUM_CROWD * num_chunks)
    prompts = [
        [(nth * 7919 + i * 31) % 50_000 for i in range(CROWD_TOKENS)] for nth in range(NUM_CROWD)
    ]
    for nth, ids in enumerate(prompts):
        engine.core.absorb(
            report_of(engine.plan(engine.admit(engine.request(f"first-{nth}", list(ids)))))
        )
    found: list[float] = []
    admitted: list[float] = []
    sent: list[float] = []
    for turn in range(turns):
        lives = [
            VllmRequest(engine.request(f"{turn}-{nth}", list(ids)), ADAPTERS)
            for nth, ids in enumerate(prompts)
        ]
        tables = [Tables([engine.blocks(num_chunks)]) for _ in lives]
        idle = engine.output([], [], {})
        gc.collect()

        def match(lives: list[VllmRequest] = lives) -> None:
            assert all(engine.core.match(live, 0) == Offer(CROWD_TOKENS) for live in lives)

        def admit(
            lives: list[VllmRequest] = lives, tables: list[Tables] = tables, idle: Any = idle
        ) -> StepPlan:
            for live, own in zip(lives, tables, strict=True):
                engine.core.admit(live, CROWD_TOKENS, own)
            return engine.plan(idle)

        found.append(timed(match)[0])
        us, plan = timed(admit)
        admitted.append(us)
        sent.append(timed(lambda plan=plan: pickle.loads(pickle.dumps(plan)))[0])
        assert sum(len(load.chunks) for load in plan.loads) == NUM_CROWD * num_chunks
        engine.core.absorb(
            StepReport(loads=tuple(LoadResult(load.req_id, load.load_id) for load in plan.loads))
        )
        for live in lives:
            engine.core.finish(live.req_id)
    engine.store.close()
    how = f"{NUM_CROWD} cached prompts of {CROWD_TOKENS} tokens"
    return [
        row(f"{how}: keys and lookups", found, "ms"),
        row(f"{how}: admission in one step", admitted, "ms"),
        row(f"{how}: pickling the plan", sent, "ms"),
    ]


def waiting_crowd_results(num_steps: int) -> list[Result]:
    """Measure the cost per request of matching 10,000 requests that wait for disk reads."""
    engine = Engine(1000, wrap_store=DiskThatHangs)
    random = Random(2)
    crowd = [
        engine.request(f"waits-{i}", [random.randrange(50_000) for _ in range(64)])
        for i in range(NUM_WAITING)
    ]
    still_waits = engine.core.still_waits

    def ask() -> None:
        for request in crowd:
            if not still_waits(request.request_id, 0):
                assert isinstance(engine.core.match(VllmRequest(request, ADAPTERS), 0), Wait), (
                    "no chunk of the prompt is on disk"
                )

    gc.collect()
    gc.freeze()  # as vLLM does at startup
    first = [timed(ask)[0] / NUM_WAITING]
    again: list[float] = []
    for _ in range(num_steps):
        engine.plan(engine.output([], [], {}))
        again.append(timed(ask)[0] / NUM_WAITING)
    gc.unfreeze()
    engine.core.close()
    engine.session.close()
    how = f"{NUM_WAITING} requests waiting for the disk"
    return [
        row(f"{how}: first match", first),
        row(f"{how}: repeated match", again, target=TARGET_ASK_US),
    ]


class DiskThatHangs:
    """A store that has every prompt on disk but never completes a disk read."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.lease = store.acquire(
            _core.KeyChain(_core.root_key(bytes(32), None, None), block_tokens=BLOCK_TOKENS)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lookup(self, chain: Any) -> tuple[int, int]:
        return 0, chain.num_blocks

    def acquire(self, chain: Any, num_units: int) -> Any:
        lease = self.lease
        return SimpleNamespace(
            poll=lambda: (lease.poll()[0], chain.num_blocks),
            batch=lease.batch,
            release=lambda: None,
        )


def table(results: Sequence[Result]) -> str:
    lines = [f"{'':<66} {'median':>11} {'p99':>11} {'target':>9}"]
    for result in results:
        target = "" if result.target is None else f"<= {result.target:g}"
        verdict = "" if result.met is None else ("met" if result.met else "MISSED")
        times = f"{result.median:>8.2f} {result.unit} {result.p99:>8.2f} {result.unit}"
        lines.append(f"{result.name:<66} {times} {target:>9} {verdict}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--steps", type=int, default=1000, help="number of timed decoding steps (default 1000)"
    )
    options = parser.parse_args(argv)
    results: list[Result] = []
    for run_ahead in (False, True):
        results += decode_results(options.steps, run_ahead)
    results += prompt_results(7)
    results += decode_results(options.steps, False, GROUPS)
    results += groups_results(21)
    results += admitted_crowd_results(7)
    results += waiting_crowd_results(20)
    print(
        json.dumps([asdict(result) for result in results], indent=1)
        if options.json
        else table(results)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
