"""Subscribes to the KV events of a real engine through ZMQ. Before each prompt, the events must
predict the number of tokens that kvloft offers.

The subscriber reads the wire format, like a router written in another language, and uses neither
vLLM's nor kvloft's classes.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvloft import _core

from . import tiny
from .cache_server import CacheServer, until
from .client import BLOCK, PACE, Engine, Req, full_blocks, kvloft, random_ids
from .conftest import Truth
from .test_server import server, shared  # noqa: F401

FRAME_KIB = 32
"""A size between one and two frames of the tiny model, in KiB."""


class Subscriber:
    """A router's view of an engine: maps medium -> (group, block hash) -> the other fields of the
    block's event.
    """

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._joins = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(self.endpoint)
        self._hashes: dict[tuple[int | bytes | None, tuple[int, ...]], int | bytes] = {}
        self.begin()

    def begin(self) -> None:
        """Remove all blocks, because a new engine invalidates all earlier events."""
        self.blocks: dict[str, dict[tuple[int, int | bytes], dict[str, Any]]] = {
            "GPU": {},
            "CPU": {},
            "STORAGE": {},
        }
        self.num_removed = self.num_cleared = 0
        self._next = 0

    def join(self) -> None:
        """Wait until this subscriber is connected to the engine. Earlier events are lost."""
        assert self._joins.poll(int(10_000 * PACE)), "no publisher"
        self._joins.recv_multipart()
        # The subscription follows the handshake, and the publisher does not report when it has
        # processed the subscription.
        time.sleep(0.2 * PACE)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._joins.close(linger=0)
        self._socket.close(linger=0)

    def settings(self) -> dict[str, Any]:
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}

    def hear(self) -> None:
        """Receive all events published so far and check that no batch is missing."""
        while self._socket.poll(int(300 * PACE)):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._next, "a batch was missed"
            self._next += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._replay(event)

    def _replay(self, event: dict[str, Any]) -> None:
        kind, medium = event["type"], event.get("medium")
        if kind == "AllBlocksCleared":
            self.num_cleared += 1
            for known in self.blocks.values():
                known.clear()
            return
        known, group = self.blocks[medium], event.get("group_idx") or 0
        if kind == "BlockRemoved":
            self.num_removed += len(event["block_hashes"]) * (medium != "GPU")
            for each in event["block_hashes"]:
                assert known.pop((group, each), None) is not None or medium == "GPU", (
                    "removed, but was not present"
                )
            return
        size, parent = event["block_size"], event["parent_block_hash"]
        if medium == "GPU" and len(event["token_ids"]) > size * len(event["block_hashes"]):
            # If vLLM caches only part of a window, it sends the tokens of all blocks and does not
            # identify the cached blocks.
            return
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for nth, each in enumerate(event["block_hashes"]):
            assert (group, each) not in known or medium == "GPU", "announced twice"
            known[group, each] = {
                "tokens": tuple(event["token_ids"][nth * size : (nth + 1) * size]),
                "parent": parent,
                "size": size,
                "extra": (event.get("extra_keys") or [None] * (nth + 1))[nth],
                "lora": (event["lora_id"], event["lora_name"]),
                "kind": event.get("kv_cache_spec_kind"),
            }
            self._hashes[parent, known[group, each]["tokens"]] = each
            parent = each

    def num_tokens(self, prompt: Req, *media: str, extra: list[Any] | None = None) -> int:
        """Return the number of leading prompt tokens whose blocks are in any of ``media``.

        ``extra`` contains the extra keys of the first block.
        """
        assert prompt.ids is not None
        known = {each: block for medium in media for each, block in self.blocks[medium].items()}
        parent, found = None, 0
        while True:
            tokens, keys = prompt.ids[found : found + BLOCK], extra if not found else None
            wanted = (parent, tokens, keys)
            here = [
                each
                for (_, each), block in known.items()
                if (block["parent"], block["tokens"], block["extra"]) == wanted
            ]
            if len(tokens) < BLOCK or not here:
                return found
            (parent,), found = here, found + BLOCK

    def names(self, prompt: Req, sizes: set[int]) -> dict[int, int | bytes | None]:
        """Return the hashes of the prompt's announced prefixes by end position.

        Blocks of different ``sizes`` that end at the same position must have the same hash.
        """
        assert prompt.ids is not None
        names: dict[int, int | bytes | None] = {0: None}
        for end in range(min(sizes), len(prompt.ids) + 1):
            heard = [
                self._hashes.get((names[end - n], prompt.ids[end - n : end]))
                for n in sizes
                if end - n in names
            ]
            found = {name for name in heard if name is not None}
            assert len(found) <= 1, (
                "blocks of different sizes with the same end have different hashes"
            )
            if found:
                (names[end],) = found
        return names


@pytest.fixture
def router() -> Iterator[Subscriber]:
    folder = Path(tempfile.mkdtemp(prefix="kv-"))  # a socket path must be short
    subscriber = Subscriber(folder)
    yield subscriber
    subscriber.close()
    shutil.rmtree(folder)


def settle(engine: Engine) -> None:
    """Wait until all chunks queued for the disk are written and announced."""
    engine.flush()
    step(engine)


def step(engine: Engine) -> None:
    """Run a request for a few steps, because vLLM collects events only during steps."""
    engine.ask(Req(random_ids(1, BLOCK // 2), max_tokens=2))


def ask_as_predicted(engine: Engine, router: Subscriber, truth: Truth, prompt: Req) -> int:
    """Run the prompt, check its output, and check that kvloft offers as many tokens as the events
    predict.

    Returns the number of offered tokens.
    """
    settle(engine)
    router.hear()
    expected = min(
        router.num_tokens(prompt, "CPU", "STORAGE"), full_blocks(prompt.num_prompt_tokens - 1)
    )
    result = engine.ask(prompt.again())[0]
    assert result.tokens == truth.tokens(prompt)
    assert result.num_external == expected
    return expected


def test_events_predict_each_prompts_hit(
    truth: Truth, start: Callable[..., Engine], router: Subscriber, tmp_path: Path
) -> None:
    """Uses few frames and slots so that chunks are evicted from both tiers.

    After a restart, kvloft announces chunks on disk when a request looks them up.
    """
    config = kvloft(
        tmp_path / "disk", host_size=f"{12 * FRAME_KIB}KiB", disk_size=f"{40 * FRAME_KIB}KiB"
    )
    prompts = [
        truth.pick(lambda seed: Req(random_ids(seed, 150), max_tokens=4), 9100 + i)
        for i in range(10)
    ]
    engine = start(kv_transfer_config=config, kv_events_config=router.settings())
    router.join()
    given = [
        ask_as_predicted(engine, router, truth, prompts[i])
        for i in [0, 0, 1, 0, 2, 3, 1, 4, 5, 6, 7, 8, 9, 9, 0, 3, 8]
    ]
    assert given[0] == 0 and given[1] > 0 and sum(map(bool, given)) > 4
    assert engine.store()["host_evictions"] > 0 and router.num_removed > 0
    assert router.blocks["STORAGE"] and not router.blocks["GPU"]
    engine.stop()
    router.hear()
    router.begin()
    engine = start(kv_transfer_config=config, kv_events_config=router.settings())
    router.join()
    last = prompts[8]
    settle(engine)
    router.hear()
    assert router.num_tokens(last, "CPU", "STORAGE") == 0
    assert engine.ask(last.again())[0].num_external > 0, "the prompt should be on disk"
    assert ask_as_predicted(engine, router, truth, last) > 0
    assert engine.reset(connector=True)
    assert ask_as_predicted(engine, router, truth, last) == 0
    engine.assert_at_rest()


def test_an_engine_announces_evictions_by_others_and_the_loss_of_its_server(
    truth: Truth,
    start: Callable[..., Engine],
    router: Subscriber,
    server: CacheServer,  # noqa: F811
) -> None:
    """Another engine fills host memory, the operator clears the cache, and the server is killed.

    The engine then announces the chunks on the server's disk again.
    """
    server.end()
    server.start(host_size=f"{12 * FRAME_KIB}KiB")
    prompt = truth.pick(lambda seed: Req(random_ids(seed, 150), max_tokens=4), 9500)
    engine = start(kv_transfer_config=shared(server), kv_events_config=router.settings())
    router.join()
    assert [ask_as_predicted(engine, router, truth, prompt) > 0 for _ in range(2)] == [False, True]
    assert router.num_tokens(prompt, "CPU") > 0
    (space,) = server.namespaces()
    other = _core.Session.connect(
        str(server.socket),
        frame_bytes=space["frame_sizes"],
        namespace=space["namespace"],
        timeout_s=60.0 * PACE,
    )
    chain = _core.KeyChain(_core.root_key(space["namespace"], None, None), block_tokens=1)
    num_frames = other.arena_sizes[0] // sum(other.frame_sizes)
    chain.append_tokens(list(range(num_frames)))
    (chunks,), _ = other.reserve([(chain, (), 0, 0, num_frames, [list(range(1, num_frames + 1))])])
    assert chunks is not None
    assert other.settle(chunks.tickets()) == (num_frames, 0)
    settle(engine)
    router.hear()
    assert (router.num_tokens(prompt, "CPU"), router.num_tokens(prompt, "STORAGE") > 0) == (0, True)
    assert ask_as_predicted(engine, router, truth, prompt) > 0
    _core.server_clear(str(server.socket))
    assert ask_as_predicted(engine, router, truth, prompt) == 0
    settle(engine)
    server.end()
    step(engine)
    router.hear()
    assert not router.blocks["CPU"] and not router.blocks["STORAGE"]
    server.start(host_size=f"{12 * FRAME_KIB}KiB")

    def is_told() -> bool:
        step(engine)
        router.hear()
        return router.num_tokens(prompt, "STORAGE") > 0

    until(is_told, "chunks on disk are not announced again")
    assert ask_as_predicted(engine, router, truth, prompt) > 0
    other.close()
    engine.assert_at_rest()


def test_blocks_have_vllms_hashes(
    start: Callable[..., Engine], router: Subscriber, tmp_path: Path
) -> None:
    """Covers a salt, an adapter, and prompts that diverge in the middle of a chunk.

    Embeddings are not announced.
    """
    adapter = ("a", 1, str(tiny.write_lora(tmp_path / "adapter", seed=5)))
    stem = random_ids(9300, 3 * BLOCK)
    prompts = [Req(stem + random_ids(seed, 5 * BLOCK + 7), max_tokens=40) for seed in (9301, 9302)]
    prompts += [Req(prompts[0].ids, salt="of a user"), Req(prompts[0].ids, lora=adapter)]
    engine = start(
        kv_transfer_config=kvloft(),
        kv_events_config=router.settings(),
        enable_prefix_caching=True,
        num_blocks=200,
        enable_lora=True,
        max_lora_rank=8,
    )
    router.join()
    engine.ask(*prompts)
    settle(engine)
    router.hear()
    gpu, host = dict(router.blocks["GPU"]), dict(router.blocks["CPU"])
    num_tokens = [full_blocks(p.num_prompt_tokens + p.max_tokens - 1) for p in prompts]
    assert {each: block for each, block in gpu.items() if each in host} == host, (
        "hashes and all other fields must be equal"
    )
    assert len(host) == (sum(num_tokens) - len(stem)) // BLOCK
    assert router.num_tokens(prompts[2], "CPU", extra=["of a user"]) == full_blocks(
        len(prompts[2].ids or ())
    )
    engine.ask(Req(embeds=tiny.embedding_rows(list(stem)), max_tokens=4))
    engine.add(Req(random_ids(9303, 5), max_tokens=4))
    engine.step(1)
    assert engine.reset() is False
    engine.run()
    settle(engine)
    router.hear()
    assert router.blocks["GPU"] and router.blocks["CPU"] == host and not router.num_cleared, (
        "vLLM did not reset"
    )
    assert engine.reset() is True
    settle(engine)
    router.hear()
    assert not router.blocks["GPU"] and router.blocks["CPU"] == host, (
        "kvloft's blocks must be announced again"
    )


def test_an_engine_without_events_notes_nothing(start: Callable[..., Engine]) -> None:
    engine = start(kv_transfer_config=kvloft())
    engine.ask(Req(random_ids(9400, 100)))
    assert engine.call("_scheduler._announcer") is None
    assert engine.call("take_events") == []
