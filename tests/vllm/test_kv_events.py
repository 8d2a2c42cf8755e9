"""Tests KV events in vLLM's format: which blocks are announced, and the warning that is logged if
events cannot be published.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvloft.plan.announcer import Announcer
from kvloft.plan.kv_events import DISK, HOST, Block, Removed, Stored
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.vllm import events
from kvloft.vllm.events import EventWriter, announcer_of, describe
from kvloft.vllm.scheduler_half import SchedulerHalf

HASHES = [b"0" * 32, b"1" * 32, b"2" * 32]


def live(**fields: Any) -> Any:
    plain = {
        "mm_features": [],
        "prompt_embeds": None,
        "lora_request": None,
        "cache_salt": None,
        "block_hashes": HASHES,
    }
    return SimpleNamespace(
        request=SimpleNamespace(**plain | fields), tokens=lambda: (list(range(100, 112)), 12)
    )


def blocks(**fields: Any) -> Any:
    return describe(4, live(**fields), 4, 1, 3)


def test_blocks_have_vllms_hashes_and_their_tokens() -> None:
    assert blocks() == [
        Block(HASHES[1], HASHES[0], array("I", [104, 105, 106, 107])),
        Block(HASHES[2], HASHES[1], array("I", [108, 109, 110, 111])),
    ]
    assert describe(4, live(), 4, 0, 1)[0].parent is None


@pytest.mark.parametrize(
    ("config", "hash_tokens"), [(SimpleNamespace(hash_block_size=2), 2), (SimpleNamespace(), 4)]
)
def test_a_block_with_several_hashes_is_called_by_its_last(
    config: Any, hash_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block has multiple hashes in a group with longer blocks, and in all groups with
    ``--prefix-match-unit``. vLLM's events also use the last hash.
    """
    monkeypatch.setattr(events, "Announcer", lambda _store, _shape, describe, **_: describe)
    listens = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    shape = CacheShape((GroupShape(4, 3), GroupShape(12)))
    store: Any = SimpleNamespace(watch=id)
    told: Any = announcer_of(listens, config, store, shape, is_shared=False)
    finest = [b"%02d" % end * 16 for end in range(hash_tokens, 25, hash_tokens)]
    salted = live(block_hashes=finest, cache_salt="s")
    salted.tokens = lambda: (list(range(100, 126)), 26)
    for size in (4, 12):
        ends = range(size, 25, size)
        names = [b"%02d" % end * 16 for end in ends]
        found = told(salted, size, 0, len(names))
        assert [(block.hash, block.parent) for block in found] == [
            *zip(names, [None, *names], strict=False)
        ]
        assert [list(block.token_ids) for block in found] == [
            [*range(100 + end - size, 100 + end)] for end in ends
        ]
        assert [block.extra is not None for block in found] == [
            True,
            *[False] * (len(names) - 1),
        ], "only the first block contains the salt"
        assert told(salted, size, 0, len(names) + 1) == (), (
            "the last block lacks some of its hashes"
        )


@pytest.mark.parametrize(
    "odd", [{"mm_features": [object()]}, {"prompt_embeds": object()}, {"block_hashes": HASHES[:2]}]
)
def test_blocks_that_others_could_not_join_are_left_out(odd: dict[str, Any]) -> None:
    assert blocks(**odd) == ()


@pytest.mark.parametrize(("hash_tokens", "block_tokens"), [(4, 2), (4, 6)])
def test_a_block_that_no_hash_ends_with_is_left_out(hash_tokens: int, block_tokens: int) -> None:
    """vLLM has hashes only for groups in its prefix cache. Other groups can have blocks of any
    size.
    """
    assert describe(hash_tokens, live(), block_tokens, 0, 1) == ()


def test_events_have_the_fields_of_the_release() -> None:
    writer = EventWriter(
        [object.__new__(FullAttentionSpec)] * 2, CacheShape((GroupShape(4, 2), GroupShape(8)))
    )
    stored: Any = writer.write(Stored(HOST, blocks()))
    assert isinstance(stored, BlockStored)
    parent, *own = map(maybe_convert_block_hash, HASHES)
    assert (stored.block_hashes, stored.parent_block_hash, stored.medium) == (own, parent, "CPU")
    assert (stored.token_ids, stored.block_size, stored.lora_id) == (list(range(104, 112)), 4, None)
    removed: Any = writer.write(Removed(DISK, HASHES))
    assert isinstance(removed, BlockRemoved) and (removed.block_hashes, removed.medium) == (
        [parent, *own],
        "STORAGE",
    )
    windows: Any = [
        writer.write(event) for event in (Stored(HOST, blocks(), 1), Removed(HOST, HASHES, 1))
    ]
    assert [event.group_idx for event in (stored, removed, *windows)] == [0, 0, 1, 1]
    assert (stored.block_size, windows[0].block_size) == (4, 8)
    older = type("Older", (dict,), {"__struct_fields__": ("medium",)})
    assert events._make(older, medium=1, group_idx=0) == {"medium": 1}


@pytest.mark.parametrize(
    ("role", "blocks", "why"),
    [
        ("kv_both", (4,), None),
        ("kv_both", (4, 4), None),
        ("kv_both", (4, 8), None),
        ("kv_producer", (4,), '"kv_role" is "kv_producer"'),
        ("kv_consumer", (4,), '"kv_role" is "kv_consumer"'),
    ],
)
def test_a_log_line_says_if_events_are_impossible(
    role: Any, blocks: tuple[int, ...], why: str | None, logged: Any
) -> None:
    transfer = KVTransferConfig(kv_connector="KVLoftConnector", kv_role=role)
    listens = SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True), kv_transfer_config=transfer
    )
    watched: list[int] = []
    store: Any = SimpleNamespace(watch=watched.append)
    announcer = announcer_of(
        listens, None, store, CacheShape(tuple(map(GroupShape, blocks))), is_shared=False
    )
    assert len(watched) == (why is None)
    assert (announcer is None) == bool(why) and len(logged()) == bool(why)
    assert why is None or why in logged()[0].getMessage()


@pytest.mark.parametrize("config", [SimpleNamespace(), SimpleNamespace(kv_events_config=None)])
def test_a_store_without_a_listener_records_nothing(config: Any) -> None:
    assert announcer_of(config, None, None, CacheShape((GroupShape(4),)), is_shared=False) is None  # type: ignore[arg-type]


def test_an_error_retracts_all_events_and_stops_them() -> None:
    """The lost changes are unknown. Missing events are better than wrong events."""
    answers = [([(b"key", 1)], False), None]
    store: Any = SimpleNamespace(changes=lambda *_: answers.pop(0))
    announcer = Announcer(
        store, CacheShape((GroupShape(4),)), lambda *_: [Block(HASHES[0], None, array("I", [1]))]
    )
    announcer.note(live(), SimpleNamespace(key=lambda *_: b"key"), range(1))  # type: ignore[arg-type]
    half: Any = object.__new__(SchedulerHalf)
    half._announcer, half._writer = announcer, SimpleNamespace(write=lambda event: event)
    assert [type(event) for event in half.take_kv_events()] == [Stored]
    with pytest.raises(TypeError):
        half.take_kv_events()
    assert half.take_kv_events() == [Removed(HOST, [HASHES[0]])]
    assert half.take_kv_events() == [] and not answers


def test_removed_chunks_are_retracted_if_their_step_fails() -> None:
    """The announcer no longer lists the chunk, so without the lost event, nothing would show that
    subscribers still list it.
    """
    answers: list[Any] = [([(b"0", 1)], False), ([(b"0", 0), (b"1", 1)], False)]
    store: Any = SimpleNamespace(changes=lambda *_: answers.pop(0))
    announcer = Announcer(
        store,
        CacheShape((GroupShape(4),)),
        lambda _live, _size, nth, _end: [Block(HASHES[nth], None, array("I"))],
    )
    chain: Any = SimpleNamespace(key=lambda nth, _group: b"%d" % nth)
    announcer.note(live(), chain, range(2))
    half: Any = object.__new__(SchedulerHalf)
    half._announcer, half._writer = announcer, SimpleNamespace(write=lambda event: event)
    assert half.take_kv_events() == [Stored(HOST, [Block(HASHES[0], None, array("I"))])]
    half._writer.write = lambda event: event.hashes  # a Stored event has no hashes
    with pytest.raises(AttributeError):
        half.take_kv_events()
    half._writer.write = lambda event: event
    assert half.take_kv_events() == [Removed(HOST, HASHES[:2])]
    half._announcer.withdraw([Removed(HOST, HASHES[:2])])
    assert half.take_kv_events() == [], (
        "an event that cannot be written must not be retried in every step"
    )


def test_events_are_repeated_only_after_vllms_clear_event() -> None:
    """While requests hold blocks, vLLM does not reset its cache and does not publish an event."""
    told: list[str] = []
    half: Any = object.__new__(SchedulerHalf)
    half._announcer, pool = (
        SimpleNamespace(repeat=lambda: told.append("again")),
        SimpleNamespace(kv_event_queue=["before"], get_num_free_blocks=lambda: 5, num_gpu_blocks=9),
    )
    half._own_pool = lambda: None
    half.hear_pool_reset(pool)()
    assert not told
    after = half.hear_pool_reset(pool)
    pool.kv_event_queue.append("AllBlocksCleared")
    after()
    assert told == ["again"]
