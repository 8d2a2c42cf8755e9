"""Property test: compares the store, after events and restarts in any order, with the dictionary in
`tests/model/store.py`.

The test runs with and without a disk. With ample space, the results are equal. With little space,
the store never finds more chunks than the model.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from batches import frames, reserve
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvloft import _core

LONG_S = 60.0 * float(os.environ.get("TEST_PACE", "1"))

_spec = importlib.util.spec_from_file_location(
    "store_model", Path(__file__).parents[1] / "model" / "store.py"
)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["store_model"] = _module
_spec.loader.exec_module(_module)

FRAME = 4096
NAMESPACE = b"m" * 32
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)


def chain_of(prompt: tuple[int, ...]) -> _core.KeyChain:
    chain = _core.KeyChain(_core.root_key(NAMESPACE, None, None), block_tokens=1)
    chain.append_tokens(list(prompt))
    return chain


def spec(key: bytes) -> dict[str, Any]:
    return {
        "offset": 0,
        "part_bytes": FRAME,
        "key": key,
        "layout": b"l" * 32,
        "page_bytes": [64, 32],
        "num_blocks": 1,
        "rank": 0,
    }


class StoreMachine(RuleBasedStateMachine):
    """Runs a store, and a model that contains all chunks that were committed and not removed."""

    tickets: Bundle[int] = Bundle("tickets")
    leases: Bundle[Any] = Bundle("leases")

    @initialize(
        num_frames=st.sampled_from([1, 3, 8, 400]),
        num_slots=st.sampled_from([0, 4, 300]),
        eviction=st.sampled_from(["adaptive", "lru"]),
        threads=st.integers(1, 3),
    )
    def open(self, num_frames: int, num_slots: int, eviction: str, threads: int) -> None:
        self.path = tempfile.mkdtemp(prefix="kvloft-machine-") if num_slots else None
        self.settings: dict[str, Any] = {
            "frame_bytes": FRAME,
            "host_bytes": num_frames * FRAME,
            "namespace": NAMESPACE,
            "eviction": eviction,
            "disk_path": self.path,
            "disk_bytes": (num_slots + 16) * FRAME,
            "disk_threads": threads,
        }
        self.roomy = num_frames == 400
        self.model = _module.StoreModel()
        self.held: list[Any] = []
        self._start()

    def _start(self) -> None:
        self.store = _core.Session(**self.settings)
        self.arena = _core.Arena.open(self.store.arena_path, size_bytes=self.store.arena_sizes[0])

    @rule(target=tickets, prompt=prompts, start=st.integers(0, 3), stop=st.integers(0, 7))
    def reserve(self, prompt: tuple[int, ...], start: int, stop: int) -> Any:
        start = min(start, len(prompt))
        stop = min(max(stop, start), len(prompt))
        chain = chain_of(prompt)
        rows, dropped = reserve(self.store, chain, start, stop)
        assert len(rows) + dropped <= stop - start
        for ticket, frame, key, unit in rows:
            end = unit + 1
            assert key == chain.key(unit)
            if self.roomy:
                self.model.reserve(ticket, prompt[:end])
            else:
                self.model.state.setdefault(prompt[:end], "reserved")
                self.model.tickets[ticket] = prompt[:end]
            self.arena.seal(spec(key) | {"offset": frame * FRAME})
        return multiple(*(row[0] for row in rows))

    @rule(taken=st.lists(consumes(tickets), min_size=1, max_size=4))
    def commit(self, taken: list[int]) -> None:
        visible = self.store.settle(taken)[0]
        expected = self.model.commit(taken)
        if self.roomy:
            assert visible == expected

    @rule(ticket=consumes(tickets))
    def abort(self, ticket: int) -> None:
        self.store.abort([ticket])
        if self.roomy:
            self.model.abort(ticket)

    @rule(target=leases, prompt=prompts, wait=st.booleans())
    def acquire(self, prompt: tuple[int, ...], wait: bool) -> Any:
        lease = self.store.acquire(chain_of(prompt))
        self.held.append((lease, prompt))
        if wait:
            self._settle(lease)
            if self.roomy:
                assert lease.poll() == (self.model.lookup(prompt), 0)
        return (lease, prompt)

    def _settle(self, lease: _core.ReadLease) -> None:
        deadline = time.monotonic() + LONG_S
        while lease.poll()[1]:
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    @rule(lease=consumes(leases))
    def release(self, lease: Any) -> None:
        lease[0].release()
        self.held = [other for other in self.held if other is not lease]

    @rule(prompt=prompts)
    def discard(self, prompt: tuple[int, ...]) -> None:
        gone = self.store.discard([chain_of(prompt).key(len(prompt) - 1)])
        expected = self.model.forget(prompt)
        if self.roomy:
            assert gone == expected

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()

    @precondition(lambda self: self.path is not None)
    @rule(flush=st.booleans())
    def reopen(self, flush: bool) -> None:
        """Reopen the store.

        Leases can outlive the old store. Tickets of the old store are invalid in the new store.
        """
        if flush:
            assert self.store.flush(LONG_S)
        before = self.store.stats()["disk_used"]
        self.store.close(LONG_S if flush else 0)
        for lease, _ in self.held:
            lease.release()
        self.held.clear()
        self._start()
        stats = self.store.stats()
        assert stats["disk_verify_failures"] == 0
        if flush:
            assert stats["disk_recovered"] == stats["disk_used"] == before
        self.roomy = False
        # Reserved chunks are lost. The new store assigns the same tickets again, so tickets of the
        # old store must not be used.
        self.model.state = {
            prefix: state for prefix, state in self.model.state.items() if state != "reserved"
        }
        self.retired = True

    @invariant()
    def nothing_wrong_is_found(self) -> None:
        if not hasattr(self, "store"):
            return
        stats = self.store.stats()
        assert (
            stats["frames_reserved"] + stats["frames_visible"] + stats["frames_free"]
            == stats["frames_total"]
        )  # I8
        for prefix in list(self.model.state) or [(0, 1, 0)]:
            host, stored = self.store.lookup(chain_of(prefix))
            assert host <= stored <= len(prefix)
            assert all(prefix[:end] in self.model.state for end in range(1, stored + 1))  # I1, I3
            if self.roomy:
                assert (host, stored) == (self.model.lookup(prefix),) * 2

    @invariant()
    def leased_frames_are_what_they_say(self) -> None:
        for lease, prompt in getattr(self, "held", []):
            chain = chain_of(prompt)
            for frame, key, unit in frames(lease):
                assert key == chain.key(unit)
                assert self.arena.check(spec(key) | {"offset": frame * FRAME}) is None  # I1, I4

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for lease, _ in self.held:
            lease.release()
        self.store.flush(LONG_S)
        deadline = time.monotonic() + LONG_S
        while self.store.stats()["reads_pending"] and time.monotonic() < deadline:
            time.sleep(0.001)
        self.store.clear()
        stats = self.store.stats()
        assert (stats["pins"], stats["read_leases"], stats["entries"], stats["disk_used"]) == (
            0,
            0,
            0,
            0,
        )  # I5
        self.store.abort()  # aborting a parent also drops a chunk that waits for it
        stats = self.store.stats()
        assert (stats["frames_visible"], stats["frames_reserved"]) == (0, 0)
        self.store.close()
        if self.path is not None:
            shutil.rmtree(self.path)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=settings().max_examples // 2, stateful_step_count=40
)
