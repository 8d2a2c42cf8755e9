"""Random traffic through the symbolic engine, in every shape: no wrong KV is ever read, and all ends at rest.

Arrivals, aborts, preemptions, resets, lookups that must be asked again, late and failed transfers, rejected drafts and
streaming sessions, all from one seed; a failure names its seed and repeats.
"""

import inspect
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from .engine import BLOCK, Engine, Shape
from .model_store import ModelStore
from .symbols import VOCAB, Spec, Turn, contents_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHAPES: dict[str, Shape] = {
    f"{'async' if a else 'sync'}-{'v2' if v else 'v1'}{'-caching' if c else ''}": Shape(async_scheduling=a, v2=v, caching=c)
    for a in (False, True) for v in (False, True) for c in (False, True)
}  # fmt: skip
TURNS_HAVE_THEIR_OWN_LENGTH = "max_tokens" in inspect.getsource(Scheduler._update_request_as_session)
"""vLLM 0.30 keeps the max_tokens of a session's first input."""
NUM_SEEDS = int(os.environ.get("SIM_SEEDS", "3"))


class Traffic:
    """Requests over a few shared beginnings, so that prefixes are found again."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self._random = random.Random(seed)
        self._shape = shape
        self._longest = (shape.num_blocks - 1) * BLOCK
        self._stems = [self._ids(self._random.randint(1, 30)) for _ in range(3)]
        self._count = 0

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, VOCAB) for _ in range(count))

    def spec(self) -> Spec:
        self._count += 1
        pick = self._random
        ids = (pick.choice(self._stems) + self._ids(pick.randint(0, 12)))[: self._longest - 24]
        name, max_tokens = f"r{self._count}", pick.randint(1, 20)
        salt = pick.choice([None, None, None, "x"])
        kind = pick.random()
        if kind < 0.15 and not self._shape.num_drafts:
            return self._embeds(name, ids, max_tokens, salt, mixed=kind < 0.07)
        # vLLM 0.32 itself keeps KV of cut-off drafts when a session with speculative decoding takes its next turn.
        if kind < 0.25 and not self._shape.num_drafts:
            first = min(max_tokens, 4)
            turns = [Turn(self._ids(pick.randint(1, 6)), pick.randint(1, 4)) for _ in range(pick.randint(1, 2))]
            if not TURNS_HAVE_THEIR_OWN_LENGTH:
                turns = [replace(turn, max_tokens=first) for turn in turns]
            return Spec(name, ids, first, ids, salt=salt, turns=tuple(turns))
        return Spec(name, ids, max_tokens, ids, salt=salt, adapter=pick.choice([None, None, None, "lora"]))

    def _embeds(self, name: str, ids: tuple[int, ...], max_tokens: int, salt: str | None, *, mixed: bool) -> Spec:
        """Rows of which equal ids have equal ones, so that embeddings share prefixes among themselves."""
        rows = torch.tensor([[float(i), float(i * i), 1.0, 2.0] for i in ids])
        raw = [r.numpy().tobytes() for r in rows]
        mask = tuple(self._random.random() < 0.5 for _ in ids) if mixed else None
        kept = ids if mixed else None
        return Spec(name, contents_of(kept, raw, mask), max_tokens, kept, rows, mask, salt)


def drive(engine: Engine, seed: int, *, num_requests: int = 30, troubled: bool = True, traffic: Traffic | None = None) -> None:
    """Random events until all requests have come and gone."""
    events = random.Random(seed + 2)
    traffic = traffic or Traffic(seed, engine.shape)
    waiting = num_requests
    for _ in range(20_000):
        roll = events.random()
        if waiting and roll < 0.25:
            waiting -= 1
            engine.add(traffic.spec())
        elif troubled and roll < 0.27 and engine.unfinished:
            engine.abort(events.choice(engine.unfinished))
        elif troubled and roll < 0.275:
            engine.reset(running=events.random() < 0.5, connector=events.random() < 0.5)
        else:
            engine.step()
        if not waiting and not engine.unfinished:
            break
    engine.run()
    engine.check()
    engine.assert_at_rest()


def build(monkeypatch: pytest.MonkeyPatch, folder: Path, shape: Shape, seed: int) -> Engine:
    """An engine whose store is the unkind dict."""
    from kvloft import _core

    def store(**settings: object) -> ModelStore:
        return ModelStore(**settings, unkind=random.Random(seed + 3), has_disk=seed % 2 == 0)  # type: ignore[arg-type]

    monkeypatch.setattr(_core, "Session", store)
    return Engine(folder, shape, seed)


def shape_of(name: str, seed: int) -> Shape:
    """The named shape with the seed's troubles."""
    pick = random.Random(seed)
    return replace(
        SHAPES[name], max_delay=pick.choice([0, 3]), save_failure=0.02, load_failure=pick.choice([0.0, 0.1]),
        host_frames=pick.choice([8, 40]),
        num_drafts=0 if "async" in name else pick.choice([0, 3]), policy=pick.choice(["recompute", "fail"]),
        num_blocks=pick.choice([16, 24]), early_results=pick.random() < 0.5, num_ranks=pick.choice([1, 1, 2]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("name", SHAPES)
def test_traffic_over_an_unkind_store(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, seed: int) -> None:
    engine = build(monkeypatch, folder, shape_of(name, seed), seed)
    drive(engine, seed)
    engine.close()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("name", SHAPES)
def test_traffic_over_the_real_store(folder: Path, name: str, seed: int) -> None:
    engine = Engine(folder, shape_of(name, seed), seed)
    drive(engine, seed)
    engine.close()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@pytest.mark.parametrize("name", ["sync-v1", "sync-v2-caching", "async-v1-caching", "async-v2"])
def test_traffic_over_the_real_store_and_its_disk_across_restarts(folder: Path, tmp_path: Path, name: str, seed: int) -> None:
    shape = replace(shape_of(name, seed), host_frames=12)
    traffic = Traffic(seed, shape)
    found = 0
    for life in range(3):
        engine = Engine(folder, shape, seed + life, tmp_path)
        drive(engine, seed + life, troubled=life != 1, traffic=traffic)
        found += life and sum(tokens for _, tokens, _ in engine.external[:4])
        engine.close()
    assert found >= 0


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_a_mover_that_raises_costs_misses_and_hangs_no_request(folder: Path, seed: int) -> None:
    shape = replace(shape_of("async-v2", seed), policy="recompute", load_failure=0.0)
    engine = Engine(folder, shape, seed)
    engine.trouble.crash = 0.1
    drive(engine, seed)
    assert sum(worker.connector._worker.hook_errors for worker in engine.workers) > 0
    engine.close()


def test_traffic_meets_the_troubles_it_is_meant_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Guards the tests above against growing tame."""
    loaded = resumed = failed_loads = failed_saves = preempted = 0
    for seed in range(4):
        shape = replace(shape_of("async-v1", seed), load_failure=0.1, save_failure=0.05, max_delay=2, policy="recompute")
        engine = build(monkeypatch, folder, shape, seed)
        drive(engine, seed)
        loaded += sum(tokens for _, tokens, again in engine.external if not again)
        resumed += sum(tokens for _, tokens, again in engine.external if again)
        preempted += sum(again for _, _, again in engine.external)
        failed_loads += engine.trouble.num_loads_failed
        failed_saves += engine.trouble.num_saves_failed
        engine.close()
    assert min(loaded, resumed, preempted, failed_loads, failed_saves) > 0
