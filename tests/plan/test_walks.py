"""Applies the events of the state machine in long random walks, with realistic frequencies. The
seed selects a walk.

Most events are ordinary work. Faults are rare, so that requests make progress. ``python
tests/plan/test_walks.py FIRST LAST`` runs the walks with seeds FIRST to LAST - 1.
"""

import sys
from pathlib import Path
from random import Random

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [
        str(root / "tests" / "plan"),
        str(root / "tests" / "model"),
        str(root / "python"),
    ]

import pytest
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from test_machine import STORIES, can_feed, dress

FLAVOURS = ["plain"] * 5 + [
    "salt",
    "adapter",
    "rows",
    "item",
    "no load",
    "session",
    "session",
    "session",
]


def some_setup(rng: Random) -> Setup:
    return Setup(
        block_tokens=rng.choice([2, 4]),
        num_blocks=rng.choice([32, 40, 60]),
        num_frames=rng.choice([3, 8, 24, 200, 200]),
        with_disk=rng.random() < 0.5,
        num_ranks=rng.choice([1, 1, 2]),
        run_ahead=rng.random() < 0.6,
        num_drafts=rng.choice([0, 0, 2, 3]),
        local_cache=rng.random() < 0.6,
        fail_policy=rng.random() < 0.2,
        max_running=rng.choice([2, 8]),
        lookahead=rng.choice([0, 0, 1]),
    )


def some_fault(engine: SymbolicEngine, rng: Random) -> None:
    kind = rng.randrange(10)
    living = [r for r in engine.requests.values() if r.status != "finished"]
    if kind == 0 and living:
        engine.finish(rng.choice(living), aborted=True)
    elif kind == 1:
        engine.reset_prefix_cache(with_connector=rng.random() < 0.5)
    elif kind == 2 and not engine.setup.local_cache:
        engine.swap_weights_hot()
    elif kind == 3:
        engine.store.drop_next = rng.randrange(1, 4)
    elif kind == 4 and engine.store.entries:
        engine.workers.corrupt.add(rng.choice(sorted(engine.store.entries)))
    elif kind == 5:
        engine.failure_rate = rng.choice([0.0, 0.0, 0.3])
    elif kind == 6:
        engine.unreadable_step = True
    elif kind == 7:
        engine.store.tick(2, fail=True)
    elif kind == 8:
        engine.workers.broken = rng.random() < 0.3
    else:
        engine.now += rng.choice([0.5, 6.0])


def walk(seed: int, num_events: int = 140) -> SymbolicEngine:
    rng = Random(seed)
    engine = SymbolicEngine(some_setup(rng))
    fault_rate = rng.choice([0.0, 0.02, 0.1])
    fussy = rng.choice([0.0, 0.05, 0.3])
    slow = rng.random() < 0.5
    for event in range(num_events):
        what = rng.random()
        if what < fault_rate:
            some_fault(engine, rng)
        elif what < 0.2 and len(engine.requests) < 9:
            request = Request(
                f"r{event}", rng.choice(STORIES)[: rng.randrange(1, 34)], rng.randrange(1, 14)
            )
            engine.add(
                dress(
                    request,
                    rng.choice(FLAVOURS),
                    [rng.randrange(3) for _ in range(rng.randrange(1, 9))],
                    engine,
                )
            )
        elif what < 0.25:
            sessions = [r for r in engine.requests.values() if r.updates is not None]
            if sessions and can_feed(session := rng.choice(sessions)):
                engine.feed_session(session, rng.choice([None, [rng.randrange(3)], [1, 0, 2, 1]]))
        elif what < 0.3:
            engine.store.tick(rng.randrange(3))
        elif engine.can_schedule() and rng.random() < 0.6:
            engine.schedule(rng.choice([3, 7, 16, 1000]), rng, fussy=fussy)
        elif engine.can_execute():
            num_copies = [rng.randrange(4) for _ in range(engine.setup.num_ranks)]
            engine.execute(rng, num_copies if slow else None)
        elif engine.can_update():
            engine.update()
        engine.check()
    engine.store.drop_next, engine.failure_rate = 0, 0.0
    settle(engine)
    return engine


@pytest.mark.parametrize("part", range(8))
def test_walk(part: int) -> None:
    engines = [walk(seed) for seed in range(part * 25, part * 25 + 25)]
    assert sum(e.num_preemptions for e in engines) > 20
    assert sum(e.num_loaded_tokens for e in engines) > 100
    assert sum(e.num_saved_blocks for e in engines) > 1000


if __name__ == "__main__":
    failures: dict[str, list[int]] = {}
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            walk(seed)
        except Exception as error:
            failures.setdefault(f"{type(error).__name__}: {str(error)[:100]}", []).append(seed)
    for message, seeds in failures.items():
        print(len(seeds), seeds[:8], message)
