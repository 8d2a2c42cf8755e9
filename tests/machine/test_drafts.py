"""Scenarios for vLLM's real cache with a draft layer in the only group. The draft layer's KV at a
position depends on the next token.
"""

import pytest
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

from .engine import Engine
from .groups import GROUPS
from .machine import MODEL, STORIES
from .mutants import swap
from .shape import Shape
from .symbols import Spec

SHAPE = Shape(GROUPS["drafter in the one group"], num_drafts=1, num_blocks=40)


def serve(engine: Engine, name: str, ids: tuple[int, ...]) -> None:
    engine.add(Spec(name, ids, 2, ids))
    engine.run()


def scene(*lengths: int, forgets: bool = False) -> Engine:
    """Run one request for each of ``lengths``, one at a time. All prompts are prefixes of the same
    story.

    With ``forgets``, kvloft loses all chunks before the last request.
    """
    engine = Engine(MODEL, SHAPE, 1)
    for i, length in enumerate(lengths):
        if forgets and i == len(lengths) - 1:
            engine.store.discard(engine.store.keys)
        serve(engine, f"r{i}", STORIES[0][:length])
    engine.close()
    return engine


def others(engine: Engine) -> int:
    return engine.workers[0].memory.num_of_others


def test_a_block_whose_next_token_was_another_one_is_not_hit() -> None:
    assert others(scene(4, 9)) == 0


def test_kv_is_wrong_without_dropping_the_last_block(
    monkeypatch: pytest.MonkeyPatch, vllm_release: tuple[int, int]
) -> None:
    """Reproduces vLLM #46971 and #55503. vLLM 0.33 includes the next token in its keys, but only
    without a connector.
    """
    groups_that_drop = "drop_eagle_group_ids" if vllm_release >= (0, 33) else "eagle_group_ids"

    def init(original, self, *args, **kwargs):  # type: ignore[no-untyped-def]
        original(self, *args, **kwargs)
        assert getattr(self, groups_that_drop)
        setattr(self, groups_that_drop, set())

    swap(monkeypatch, KVCacheCoordinator, "__init__", init)
    assert others(scene(4, 9)) > 0


def test_vllm_joins_blocks_of_two_writers_and_serves_one_position_of_another_continuation() -> None:
    """The second request recomputes the first block, but the third request hits the first request's
    block.

    If this test fails, vLLM has fixed the bug, and `Memory._are_of_others` can be removed.
    """
    assert others(scene(4, 9, 13)) > 0


def test_a_block_of_vllms_own_cache_is_not_saved_under_another_next_token_than_its_writers() -> (
    None
):
    """The third request hits the first request's block.

    The last position of this block is wrong for the key of the third request, and later blocks
    depend on this position.
    """
    assert scene(4, 9, 13, forgets=True).ledger.num_saved == 1 + 2


def test_a_block_of_vllms_own_cache_is_saved_by_a_request_with_the_same_continuation() -> None:
    assert scene(9, 13, forgets=True).ledger.num_saved == 2 + 3


def test_a_block_is_not_trusted_after_a_finished_request_wrote_to_it() -> None:
    """Runs prompts with lengths 4, 9 and 13 after kvloft's records attribute every block to a
    request with the continuation of the last prompt.

    The request with length 4 overwrites such a block and finishes before kvloft sees its next
    token. The block stays in vLLM's cache.
    """
    engine = Engine(MODEL, SHAPE, 1)
    serve(engine, "r0", STORIES[0][:9])
    keys = engine.core._writers._keys
    first = next(iter(keys.values()))
    keys.update(dict.fromkeys(range(SHAPE.num_blocks), first))
    engine.reset(running=False, connector=False)
    engine.store.discard(engine.store.keys)
    engine.add(Spec("r1", STORIES[0][:4], 1, STORIES[0][:4]))
    engine.run()
    serve(engine, "r2", STORIES[0][:9])
    engine.store.discard(engine.store.keys)
    serve(engine, "r3", STORIES[0][:13])
    assert others(engine) > 0
    engine.close()
