"""Tests that vLLM's real scheduler does not deadlock when loads of multiple groups fill the pool.

With sliding windows and chunked local attention, vLLM 0.32 keeps too few blocks free for requests
with finished loads. vLLM frees the blocks of a failed load only when the load's request is first in
a queue, and does not schedule later requests if the tokens of the first request do not fit in one
step. In both cases, the later requests keep the blocks of their loads and are never scheduled.
"""

import pytest

from .engine import Engine
from .groups import GROUPS
from .machine import MODEL, STORIES
from .shape import HAS_GROUPS, Shape
from .symbols import Spec

KINDS = (
    "window before full",
    "local",
    "state",
    "six windows",
    "one window",
    "two windows",
    "window and local",
)
UNEQUAL = ("window of half blocks", "window of long blocks", "two windows of different blocks")
pytestmark = pytest.mark.skipif(
    not HAS_GROUPS,
    reason="only vLLM 0.32 and newer give connectors enough information about multiple groups",
)


def serve(
    names: str, blocks: int, stored: int, lengths: tuple[int, ...], load_failure: float = 0.0
) -> Engine:
    """Run requests that share a prefix. kvloft has stored the prefix's first ``stored`` tokens.

    The pool has ``blocks`` blocks per group. If ``blocks`` is odd, scheduling is async.
    """
    num_blocks, is_async = blocks * len(GROUPS[names]), blocks % 2 > 0
    shape = Shape(
        GROUPS[names],
        num_blocks=num_blocks,
        async_scheduling=is_async,
        host_frames=300,
        kv_groups="all",
    )
    engine = Engine(MODEL, shape, 1)
    engine.add(Spec("first", STORIES[0][: stored + 1], 1, STORIES[0][: stored + 1]))
    engine.run()
    engine.reset(running=False, connector=False)
    engine.trouble.load_failure = load_failure
    for i, length in enumerate(lengths):
        engine.add(Spec(f"r{i}", STORIES[0][:length], 1, STORIES[0][:length]))
    engine.run(400)
    engine.close()
    assert all(outcome.reason == "length" for outcome in engine.outcomes.values())
    assert engine.num_loaded and not engine.ledger.breaches
    return engine


@pytest.mark.parametrize("load_failure", [0.05, 1.0])
@pytest.mark.parametrize("names", [*KINDS, *UNEQUAL])
def test_requests_with_failed_loads_yield_to_others(names: str, load_failure: float) -> None:
    for blocks in range(15, 31):
        assert serve(names, blocks, 48, (49, 43, 42, 41, 40), load_failure).ledger.doubtful


def test_room_is_counted_in_each_groups_own_blocks() -> None:
    """If room were counted only in the longest blocks of any group, two loads would seem to fit but
    would deadlock.
    """
    serve("window of longer blocks", 15, 48, (50, 50))


@pytest.mark.parametrize("names", [*KINDS, *UNEQUAL])
def test_loads_leave_each_other_room_to_go_on(names: str) -> None:
    for blocks in range(18, 31):
        serve(names, blocks, 32, (56, 33, 55, 34, 54, 35, 53))
