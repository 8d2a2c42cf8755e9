"""A store, its announcer and a subscriber that take steps in any order, for tests of KV events.

The store belongs to the engine or to a server. With a server, another engine also saves and evicts
chunks, and the server is stopped and restarted. The oracle looks up every prefix and checks the
assumptions that a subscriber can make about each event. The test decides how events reach the
subscriber and how a server is started.
"""

import hashlib
import os
import random
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvloft import _core
from kvloft.plan.announcer import Announcer
from kvloft.plan.kv_events import DISK, HOST, Block, Stored
from kvloft.seam.batch import ChunkCopy
from kvloft.seam.shape import CacheShape, GroupShape

FRAME, BLOCK, MAX_BLOCKS = 4096, 2, 7
NAMESPACE = b"e" * 32
NUM_STEPS = int(os.environ.get("KV_EVENT_STEPS", "4000"))
PACE = float(os.environ.get("TEST_PACE", "1"))
Prompt = tuple[int, ...]


def hash_of(prompt: Prompt) -> bytes:
    return hashlib.sha256(repr(prompt).encode()).digest()


def describe(live: Any, size: int, begin: int, end: int) -> list[Block]:
    """Describe blocks [begin, end) as vLLM does.

    A block's hash is the hash of the prefix that ends with the block, so blocks of any ``size``
    with the same end have the same hash.
    """
    prefixes = [live.prompt[: (nth + 1) * size] for nth in range(begin, end)]
    parents = [hash_of(prefix[:-size]) if len(prefix) > size else None for prefix in prefixes]
    return [
        Block(hash_of(own), parent, array("I", own[-size:]))
        for own, parent in zip(prefixes, parents, strict=True)
    ]


def seal(arena: _core.Arena, chunk: ChunkCopy) -> None:
    """Write a chunk's trailer, as a worker does."""
    place = {"offset": chunk.frame * FRAME, "part_bytes": FRAME, "page_bytes": [64], "rank": 0}
    own = {"key": chunk.key, "layout": b"l" * 32, "num_blocks": chunk.num_blocks}
    arena.seal(place | own)


class Index:
    """A subscriber. It fails on events that contradict earlier events or the prompts."""

    def __init__(self, prompts: set[Prompt]) -> None:
        self.tiers: dict[int, set[bytes]] = {HOST: set(), DISK: set()}
        prefixes = {
            prompt[:end] for prompt in prompts for end in range(BLOCK, len(prompt) + 1, BLOCK)
        }
        self._of = {hash_of(prefix): prefix for prefix in prefixes}

    def replay(self, events: list[Any]) -> None:
        for event in events:
            tier = self.tiers[event.tier]
            if not isinstance(event, Stored):
                assert set(event.hashes) <= tier and len(set(event.hashes)) == len(event.hashes), (
                    "removed, but was not present"
                )
                tier -= set(event.hashes)
                continue
            for block, before in zip(event.blocks, [None, *event.blocks], strict=False):
                prefix = self._of[block.hash]
                assert block.hash not in tier, "announced twice"
                assert tuple(block.token_ids) == prefix[-BLOCK:]
                assert block.parent == (hash_of(prefix[:-BLOCK]) if len(prefix) > BLOCK else None)
                assert before is None or before.hash == block.parent, (
                    "the event contains more than one run"
                )
                tier.add(block.hash)

    def clear(self) -> None:
        """Handle vLLM's event for the removal of all blocks. The engine then announces chunks in
        other tiers again.
        """
        self.tiers = {HOST: set(), DISK: set()}

    def close(self) -> None:
        """Handle the engine's exit."""


class World:
    """A store, its announcer and a subscriber, which take steps in any order.

    ``subscribe`` creates a subscriber for each engine.
    """

    is_shared = False

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        capacity: int,
        slots: int,
        subscribe: Callable[[set[Prompt]], Any] = Index,
    ) -> None:
        self.subscribe = subscribe
        self.rng, self.capacity = random.Random(seed), capacity
        self.prompts = {
            tuple(self.rng.choices((1, 2), k=BLOCK * self.rng.randint(1, MAX_BLOCKS)))
            for _ in range(40)
        }
        self.shape: dict[str, Any] = {"frame_bytes": FRAME, "namespace": NAMESPACE}
        self.memory: dict[str, Any] = {
            "host_bytes": 9 * FRAME,
            "disk_path": str(folder / "disk"),
            "disk_bytes": slots * FRAME,
            "disk_threads": 2,
        }
        self.num_lost = 0
        self.start()

    def open(self) -> _core.Session:
        return _core.Session(**self.shape, **self.memory)

    def start(self) -> None:
        """Start a new engine with a new announcer and a new subscriber."""
        self.store = self.open()
        self.map_arena()
        self.store.watch(self.capacity)
        heard: Any = SimpleNamespace(changes=self.changes)
        shape = CacheShape((GroupShape(BLOCK),))
        self.announcer = Announcer(heard, shape, describe, is_shared=self.is_shared)
        self.index, self.noted = self.subscribe(self.prompts), set[Prompt]()
        self.tickets: list[int] = []
        self.leases: list[Any] = []

    def map_arena(self) -> None:
        self.arena = _core.Arena.open(self.store.arena_path, size_bytes=self.store.arena_sizes[0])

    def restart(self) -> None:
        self.store.close()
        self.index.close()
        self.start()

    def close(self) -> None:
        self.store.close()
        self.index.close()

    def changes(self, asked: list[bytes], limit: int) -> Any:
        rows, lost = self.store.changes(asked, limit)
        self.num_lost += lost
        return rows, lost

    def chain(self, prompt: Prompt) -> _core.KeyChain:
        chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=BLOCK)
        chain.append_tokens(list(prompt))
        return chain

    def any_prompt(self) -> Prompt:
        return self.rng.choice(sorted(self.prompts))

    def step(self) -> None:
        rng = self.rng
        match rng.choices(range(9), (40, 20, 5, 15, 12, 4, 40, 1, 1))[0]:
            case 0:
                self.save(self.any_prompt())
            case 1:
                while self.tickets:
                    self.store.settle([self.tickets.pop(rng.randrange(len(self.tickets)))])
            case 2 if self.tickets:
                self.store.abort([self.tickets.pop()])
            case 3:
                self.leases.append(self.store.acquire(self.chain(self.any_prompt())))
            case 4:
                self.leases.clear()
            case 5:
                prompt = self.any_prompt()
                self.store.discard([self.chain(prompt).key(rng.randrange(len(prompt) // BLOCK))])
            case 6:
                self.index.replay(self.announcer.take())
            case 7:
                self.store.clear()
            case 8:
                self.index.clear()
                self.announcer.repeat()

    def save(self, prompt: Prompt, *, whole: bool = False) -> None:
        """Save a prompt and notify the announcer as the scheduler side does."""
        row, tickets = self.reserve(self.store, prompt, whole=whole)
        chain, _, _, start, stop, _ = row
        self.announcer.note(SimpleNamespace(prompt=prompt), chain, range(start, stop))  # type: ignore[arg-type]
        self.noted |= {prompt[: (unit + 1) * BLOCK] for unit in range(start, stop)}
        self.tickets += tickets

    def reserve(
        self, store: _core.Session, prompt: Prompt, *, whole: bool = False
    ) -> tuple[Any, list[int]]:
        stop = len(prompt) // BLOCK
        start = 0 if whole else self.rng.choice([0, 0, 0, stop])
        chain = self.chain(prompt)
        row: Any = (chain, list(prompt), len(prompt), start, stop, [list(range(1, stop + 1))])
        (chunks,), _ = store.reserve([row])
        for chunk in chunks or ():
            seal(self.arena, chunk)
        return row, [chunk.ticket for chunk in chunks or ()]

    def rest(self) -> None:
        """Wait until the store is idle and all chunks are announced, then compare the index with
        lookups of all prefixes that were reported to the announcer.
        """
        self.leases.clear()
        self.store.abort(self.tickets)
        self.tickets.clear()
        deadline = time.monotonic() + 30 * PACE
        while self.store.stats()["frames_reserved"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert self.store.flush(30 * PACE)
        # If keys were lost, the announcer looks up all chunks again, one slice per call.
        for _ in range(300):
            self.index.replay(self.announcer.take())
        host, stored = set[bytes](), set[bytes]()
        for prefix in self.noted:
            num_blocks = len(prefix) // BLOCK
            blocks = {hash_of(prefix)}
            in_host, anywhere = self.store.lookup(self.chain(prefix))
            host |= blocks if in_host == num_blocks else set()
            stored |= blocks if anywhere == num_blocks else set()
        told = self.index.tiers
        assert told[HOST] == host
        assert told[HOST] | told[DISK] == stored
        if not self.is_shared:
            rows, _ = self.store.changes(list(self.announcer._known), 0)
            assert all(where for _, where in rows), (
                "still waiting for chunks that will never appear"
            )


class SharedWorld(World):
    """Like `World`, but with a server that ``host`` stops and restarts, and with another engine
    whose saves evict chunks.
    """

    is_shared = True

    def __init__(
        self, seed: int, folder: Path, *, host: Callable[..., Any] = _core.Server, **more: Any
    ) -> None:
        # a socket path must be short
        self.run, self.host = Path(tempfile.mkdtemp(prefix="kv-")), host
        self.server: Any = None
        super().__init__(seed, folder, **more)

    def connect(self) -> _core.Session:
        return _core.Session.connect(
            str(self.run / "kvloft.sock"), **self.shape, timeout_s=60 * PACE
        )

    def open(self) -> _core.Session:
        if self.server is None:
            self.serve()
        self.other = self.connect()
        return self.connect()

    def serve(self) -> None:
        self.server = self.host(str(self.run / "kvloft.sock"), **self.memory)

    def restart(self) -> None:
        self.other.close()
        super().restart()

    def close(self) -> None:
        super().close()
        self.other.close()
        assert self.server is not None
        self.server.close()
        shutil.rmtree(self.run)

    def step(self) -> None:
        rng = self.rng
        match rng.choices(range(5), (60, 30, 4, 1, 1))[0]:
            case 0:
                super().step()
            case 1:
                self.other.settle(self.reserve(self.other, self.any_prompt())[1])
            case 2:
                prompt = self.any_prompt()
                self.other.discard([self.chain(prompt).key(rng.randrange(len(prompt) // BLOCK))])
            case 3:
                _core.server_clear(str(self.run / "kvloft.sock"))
            case 4:
                self.lose_server(num_takes=rng.choice((0, 1, 300)))

    def lose_server(self, num_takes: int) -> None:
        assert self.server is not None
        self.server.close(60 * PACE)
        self.server = None  # the socket is free only after the server has exited
        for _ in range(num_takes):
            self.index.replay(self.announcer.take())
        assert num_takes < 300 or not self.index.tiers[HOST] | self.index.tiers[DISK]
        self.serve()
        deadline = time.monotonic() + 60 * PACE
        for session in (self.store, self.other):
            while not session.renew():
                assert time.monotonic() < deadline
                time.sleep(0.001)
        self.map_arena()
