"""Checks that a router that follows KV events over ZMQ agrees with the store. The events of random
steps pass through vLLM's own publisher, with occasional gaps.

The store belongs to the engine or to a `kvloft serve` that is killed and restarted while another
engine saves, evicts and clears. The subscriber reads the wire format from a SUB socket,
occasionally loses messages, and requests the lost messages from the publisher's replay socket.
KV_EVENT_STEPS sets the number of steps (acceptance: 100000).
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from announced import BLOCK, PACE, Index, Prompt, SharedWorld, World, hash_of
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, EventPublisherFactory, KVEventBatch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvloft import _core
from kvloft.errors import StoreError
from kvloft.plan import announcer as announcing
from kvloft.plan.kv_events import DISK, HOST, Block, Event, Removed, Stored
from kvloft.seam.shape import CacheShape, GroupShape
from kvloft.vllm.events import EventWriter

TIERS = {"CPU": HOST, "STORAGE": DISK}
NUM_STEPS = int(os.environ.get("KV_EVENT_STEPS", "1000"))
CHECK_EVERY, RESTART_EVERY = 100, 400
BUFFERED = 50
"""Number of batches that the publisher keeps for subscribers that missed batches."""


class Router:
    """An `Index` that subscribes to the event stream of one engine."""

    def __init__(self, prompts: set[Prompt], endpoint: str, replay_endpoint: str) -> None:
        self.index, self._endpoint, self.num_missed = Index(prompts), endpoint, 0
        prefixes = {
            prompt[:end] for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)
        }
        # vLLM publishes the last 64 bits of a hash.
        self._hashes = {
            int.from_bytes(hash_of(prefix)[-8:], "big"): hash_of(prefix) for prefix in prefixes
        }
        assert len(self._hashes) == len(prefixes)
        self._sub, self._replay = (
            zmq.Context.instance().socket(kind) for kind in (zmq.SUB, zmq.DEALER)
        )
        self._sub.subscribe(b"")
        self._sub.connect(endpoint)
        self._replay.connect(replay_endpoint)
        self._next, self._is_in = 0, True

    def close(self) -> None:
        self._sub.close(linger=0)
        self._replay.close(linger=0)

    def stumble(self) -> None:
        """Leave or rejoin the stream."""
        (self._sub.disconnect if self._is_in else self._sub.connect)(self._endpoint)
        self._is_in = not self._is_in

    def hear(self) -> None:
        """Read all messages received so far."""
        while self._sub.poll(0):
            _topic, number, payload = self._sub.recv_multipart()
            self._take(int.from_bytes(number, "big"), payload)

    def catch_up(self, num_published: int) -> None:
        """Receive all batches published so far."""
        deadline = time.monotonic() + 30 * PACE
        while self._next < num_published:
            assert time.monotonic() < deadline, (
                f"batch {self._next} of {num_published} was never received"
            )
            if not self._sub.poll(50):
                self._ask()
            self.hear()
        assert self._next == num_published

    def _take(self, number: int, payload: bytes) -> None:
        if number > self._next:
            self._ask()
        if number == self._next:
            self._next += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._learn(event)

    def _ask(self) -> None:
        """Request the missed batches. The last message of a response has a negative number."""
        first = self._next
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert self._replay.poll(int(30_000 * PACE)), "no replay"
            _, _topic, number, payload = self._replay.recv_multipart()
            if int.from_bytes(number, "big", signed=True) < 0:
                break
            assert int.from_bytes(number, "big") <= self._next, (
                "the publisher dropped missed batches"
            )
            self._take(int.from_bytes(number, "big"), payload)
        self.num_missed += self._next - first

    def _learn(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.index.clear()
            return
        tier, hashes = (
            TIERS[event["medium"]],
            [self._hashes[each] for each in event["block_hashes"]],
        )
        if event["type"] == "BlockRemoved":
            self.index.replay([Removed(tier, hashes)])
            return
        tokens, parent = event["token_ids"], event["parent_block_hash"]
        assert (event["type"], event["block_size"], len(tokens)) == (
            "BlockStored",
            BLOCK,
            BLOCK * len(hashes),
        )
        parents = [self._hashes[parent] if parent is not None else None, *hashes]
        own = [array("I", tokens[at : at + BLOCK]) for at in range(0, len(tokens), BLOCK)]
        self.index.replay(
            [Stored(tier, [Block(*each) for each in zip(hashes, parents, own, strict=False)])]
        )


class Stream:
    """An engine's publisher and its subscriber.

    Replaces an `Index`, which would receive events immediately.
    """

    def __init__(
        self, folder: Path, lives: Iterator[int], rng: random.Random, prompts: set[Prompt]
    ) -> None:
        life = next(lives)
        endpoint, replay_endpoint = (
            f"ipc://{folder}/{kind}-{life}" for kind in ("events", "replay")
        )
        config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            buffer_steps=BUFFERED,
        )
        self._publisher = EventPublisherFactory.create(config)
        self._writer = EventWriter(
            [object.__new__(FullAttentionSpec)], CacheShape((GroupShape(BLOCK),))
        )
        self._router, self._rng, self._num_published = (
            Router(prompts, endpoint, replay_endpoint),
            rng,
            0,
        )
        self._num_unheard = 0

    def replay(self, events: list[Event]) -> None:
        """Publish the events of a step as one batch, as vLLM's scheduler does."""
        self._publish([self._writer.write(event) for event in events])

    def clear(self) -> None:
        self._publish([AllBlocksCleared()])

    def _publish(self, events: list[Any]) -> None:
        if not events:
            return
        self._publisher.publish(KVEventBatch(ts=0.0, events=events))
        self._num_published += 1
        self._num_unheard += 1
        if self._rng.random() < 0.02:
            self._router.stumble()
        if self._num_unheard == BUFFERED:
            self._catch_up()  # vLLM's documented limit: older batches are lost
        elif self._rng.random() < 0.3:
            self._router.hear()

    def _catch_up(self) -> None:
        self._router.catch_up(self._num_published)
        self._num_unheard = 0

    @property
    def tiers(self) -> dict[int, set[bytes]]:
        self._catch_up()
        return self._router.index.tiers

    def close(self) -> None:
        self._publisher.shutdown()
        Totals.num_batches += self._num_published
        Totals.num_missed += self._router.num_missed
        self._router.close()


class Totals:
    """Counts that show whether a test covered gaps and server restarts."""

    num_batches = num_missed = num_servers = 0

    @classmethod
    def begin(cls) -> None:
        cls.num_batches = cls.num_missed = cls.num_servers = 0


class Served:
    """A `kvloft serve` process, started as a user would start it."""

    def __init__(
        self, socket: str, *, host_bytes: int, disk_path: str, disk_bytes: int, disk_threads: int
    ) -> None:
        sizes = {
            "host-size": host_bytes,
            "disk-path": disk_path,
            "disk-size": disk_bytes,
            "disk-threads": disk_threads,
        }
        options = [f"--{name}={value}" for name, value in sizes.items()]
        argv = [sys.executable, "-m", "kvloft.cli", "serve", f"--socket={socket}", *options]
        with Path(socket).with_name("log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        Totals.num_servers += 1
        deadline = time.monotonic() + 60 * PACE
        while not self._answers(socket):
            assert time.monotonic() < deadline and self._process.poll() is None, "no server"
            time.sleep(0.01)

    @staticmethod
    def _answers(socket: str) -> bool:
        try:
            return bool(_core.server_status(socket))
        except StoreError:
            return False

    def close(self, timeout_s: float = 60 * PACE) -> None:
        """Stop the server. Every second server is killed with SIGKILL."""
        self._process.send_signal(signal.SIGKILL if Totals.num_servers % 2 else signal.SIGTERM)
        self._process.wait(timeout_s)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket path must be short
        yield Path(folder)


@pytest.mark.timeout((300 + NUM_STEPS // 10) * PACE)
@pytest.mark.parametrize("kind", ["its own", "a server's"])
def test_a_routers_index_matches_the_store(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "SLICE", 5)
    Totals.begin()
    subscribe = partial(Stream, folder, count(), random.Random(7))
    sizes: dict[str, Any] = {"capacity": 3, "slots": 40, "subscribe": subscribe}
    world = (
        World(17, folder, **sizes)
        if kind == "its own"
        else SharedWorld(17, folder, host=Served, **sizes)
    )
    try:
        for nth in range(1, NUM_STEPS + 1):
            world.step()
            if nth % CHECK_EVERY == 0:
                world.rest()
            if nth % RESTART_EVERY == 0:
                world.restart()
        world.rest()
        world.announcer.withdraw()
        world.index.replay(world.announcer.take())
        assert not world.index.tiers[HOST] | world.index.tiers[DISK]
    finally:
        world.close()
    assert world.num_lost and Totals.num_batches > NUM_STEPS // 20 and Totals.num_missed
    assert kind == "its own" or Totals.num_servers > 1
    print(
        f"{NUM_STEPS} steps: {Totals.num_batches} batches, {Totals.num_missed} of them missed, "
        f"{Totals.num_servers} servers"
    )
