"""Loads of several requests that fail at once in a full pool: vLLM must come to rest, on its real scheduler.

vLLM 0.32 gives a failed load's blocks back when the request is first in its queue, and stops the queue there if all its tokens
do not fit at once. With windows they need more blocks than the load had. Loads behind it hold theirs and are never looked at.
"""

import pytest

from .engine import Engine
from .groups import GROUPS
from .machine import MODEL, STORIES
from .shape import HAS_GROUPS, Shape
from .symbols import Spec

LENGTHS = (49, 43, 42, 41, 40)


def serve(names: str, blocks: int, load_failure: float, *, is_async: bool) -> Engine:
    """Requests of one long prefix with so many ``blocks`` a group; loads go wrong at this rate."""
    num_blocks = blocks * len(GROUPS[names])
    shape = Shape(GROUPS[names], num_blocks=num_blocks, async_scheduling=is_async, host_frames=300, kv_groups="all")
    engine = Engine(MODEL, shape, 1)
    engine.add(Spec("first", STORIES[0][:49], 1, STORIES[0][:49]))
    engine.run()
    engine.reset(running=False, connector=False)
    engine.trouble.load_failure = load_failure
    for length in LENGTHS:
        engine.add(Spec(f"r{length}", STORIES[0][:length], 1, STORIES[0][:length]))
    engine.run(200)
    engine.close()
    return engine


@pytest.mark.skipif(not HAS_GROUPS, reason="vLLM 0.32 and newer tell connectors enough about several groups")
@pytest.mark.parametrize("load_failure", [0.05, 1.0])
@pytest.mark.parametrize("names", ["window before full", "local", "state", "six windows"])
def test_requests_whose_loads_failed_give_way_to_those_behind(names: str, load_failure: float) -> None:
    for blocks in range(15, 31):
        engine = serve(names, blocks, load_failure, is_async=blocks % 2 > 0)
        assert all(outcome.reason == "length" for outcome in engine.outcomes.values())
        assert engine.ledger.doubtful and not engine.ledger.breaches
