"""Tests wrong hits in vLLM's prefix cache (vLLM #49377, #49449). The output is wrong, but kvloft
must not save KV that depends on such a hit.
"""

import random
from typing import Any

import pytest

from kvloft.plan.block_writers import BlockWriters

from .engine import Engine, Outcome
from .groups import GROUPS
from .machine import MODEL, STORIES
from .memory import Memory
from .requests import make_request
from .shape import HAS_GROUPS, Shape
from .symbols import Spec

SHAPES = {
    "one group": Shape(num_blocks=40),
    "drafter": Shape(GROUPS["drafter in the one group"], num_drafts=1, num_blocks=40),
}
NAMES = (
    "window",
    "window before full",
    "one window",
    "one short window",
    "drafter in the one window",
    "two windows",
    "window and local",
)
if HAS_GROUPS:
    SHAPES |= {name: Shape(GROUPS[name], num_blocks=80, kv_groups="all") for name in NAMES}
PROMPT = STORIES[0][:17]


def add(
    engine: Engine, name: str, ids: tuple[int, ...], stale: Any = (), num_tokens: int = 2
) -> Any:
    """Add a request and return its block hashes.

    The ``stale`` hashes of another request replace the hashes of the first blocks.
    """
    spec = Spec(name, ids, num_tokens, ids)
    engine.specs[name], engine.outcomes[name] = spec, Outcome()
    request = make_request(spec, engine._hasher)
    request.block_hashes[: len(stale)] = stale
    engine.scheduler.add_request(request)
    return request.block_hashes


def serve(engine: Engine, name: str, ids: tuple[int, ...], stale: Any = ()) -> Any:
    hashes = add(engine, name, ids, stale)
    engine.run()
    return hashes


def engine_of(shape: Shape) -> Engine:
    """Return an engine in which kvloft does not load, so all hits are hits in vLLM's own cache."""
    engine = Engine(MODEL, shape, 1)
    engine.core._loads_allowed = False
    engine.ledger.lose("nothing is loaded")
    return engine


def hit_wrongly(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool) -> None:
    """Run requests that hit the first blocks of another prompt, and check that nothing is saved.

    With ``is_stored``, kvloft has stored the correct first blocks.
    """
    if is_stored:
        serve(engine, "own", PROMPT[:9])
        engine.reset(running=False, connector=False)
    hashes = serve(engine, "other", STORIES[1][:13])
    monkeypatch.setattr(Memory, "check", lambda *_: None)  # the output is wrong because of vLLM
    monkeypatch.setattr(Memory, "check_drafter", lambda *_: None)
    num_saved = engine.ledger.num_saved
    serve(engine, "wrong", PROMPT, stale=list(hashes[:3]))
    serve(engine, "next", PROMPT, stale=list(hashes[:3]))
    assert engine.ledger.num_saved == num_saved, "nothing after a wrong block may be saved"


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_nothing_computed_on_a_wrong_hit_is_saved(
    name: str, is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(SHAPES[name])
    hit_wrongly(engine, monkeypatch, is_stored=is_stored)
    engine.close()


def test_the_scene_detects_wrong_kv_without_the_check_of_writers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BlockWriters, "know_hit", lambda *_: True)
    with pytest.raises(AssertionError, match="does not hold its key's KV"):
        hit_wrongly(engine_of(SHAPES["one group"]), monkeypatch, is_stored=False)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_hit_is_saved_again_if_its_writer_is_known(shape: Shape) -> None:
    """The store has lost all chunks, as after a server restart.

    Covers writers that have finished and writers in the same step.
    """
    engine = engine_of(shape)
    serve(engine, "first", PROMPT)
    engine.store.discard(engine.store.keys)
    num_saved = engine.ledger.num_saved
    serve(engine, "again", PROMPT)
    num_dense = len([group for group in shape.groups if group.kind == "full"])
    assert engine.ledger.num_saved - num_saved >= max(1, 4 * num_dense)
    engine.store.discard(engine.store.keys)
    num_saved = engine.ledger.num_saved
    add(engine, "a", STORIES[1][:14])
    add(engine, "b", STORIES[1][:14])
    engine.step()
    engine.run()
    assert engine.ledger.num_saved - num_saved >= 3
    engine.close()


@pytest.mark.parametrize(
    "name",
    ["window", "window of half blocks", "window of long blocks", "one window", "two windows"]
    if HAS_GROUPS
    else [],
)
def test_correct_hits_are_never_strange(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU memory is small, so blocks change owners often, also while their records are outdated."""
    checked, strange = [], []
    find_strange = BlockWriters.find_strange

    def find(self: BlockWriters, unchecked: Any, writers: Any) -> Any:
        checked.extend(unchecked)
        found = find_strange(self, unchecked, writers)
        strange.extend(request.req_id for request in found)
        return found

    monkeypatch.setattr(BlockWriters, "find_strange", find)
    for seed in range(4):
        pick = random.Random(seed)
        engine = engine_of(
            Shape(
                GROUPS[name],
                num_blocks=(14 if seed % 2 else 30) * len(GROUPS[name]),
                async_scheduling=seed > 1,
                max_batched_tokens=64,
                max_seqs=8,
                kv_groups="all",
            )
        )
        done: list[Spec] = []
        while len(done) < 40:
            if pick.random() > 0.35:
                engine.step()
                continue
            ids = STORIES[pick.randrange(4)][: pick.randint(9, 30)]
            if done and pick.random() < 0.5:
                before = pick.choice(done)
                ids = (*before.contents, *before.truth(), *ids[: pick.randint(1, 8)])
            num_tokens = pick.randint(1, 25)
            ids = ids[: engine.shape.longest - num_tokens - 3]
            done.append(Spec(f"r{len(done)}", ids, num_tokens, ids))
            engine.add(done[-1])
        engine.run()
        engine.close()
    assert len(checked) > 50 and strange == []


def test_a_request_preempted_by_a_reset_trusts_blocks_that_vllm_kept() -> None:
    """The reset preempts the request, but vLLM does not clear its own cache, because another
    request's load holds a block.
    """
    engine = Engine(MODEL, Shape(num_blocks=16), 1)
    for name, length, num_tokens in (("first", 16, 5), ("second", 4, 1)):
        add(engine, name, STORIES[0][:length], num_tokens=num_tokens)
    engine.step()
    engine.step()
    for _ in range(2):
        engine.reset(running=True, connector=False)
    engine.settle()
    assert not engine.ledger.breaches
    engine.close()
