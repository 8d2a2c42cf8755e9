"""The store as a dict: same protocol as ``kvloft._core.Session``, obviously right, and as unkind as allowed.

Given a random generator it evicts, refuses and delays whenever the contract lets a store do so. Frames are real shared
memory, so that real workers can use them; the disk is a copy of the frame that takes polls to come back.
It must not know vLLM.
"""

import fcntl
import importlib.util
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvloft import _core

_spec = importlib.util.spec_from_file_location("chunk_batch", Path(__file__).parents[1] / "model" / "chunk_batch.py")
assert _spec is not None
assert _spec.loader is not None
model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(model)


@dataclass(eq=False)
class Entry:
    """One chunk: in host memory (``frame``), on disk (``saved``), or both; ``reads_left`` polls until a disk read is done."""

    key: bytes
    parent: bytes | None
    frame: int | None = None
    saved: bytes | None = None
    visible: bool = False
    pins: int = 0
    reads_left: int = 0
    dead: bool = False


@dataclass(eq=False)
class ModelLease:
    """A pin on every chunk of one prefix."""

    store: "ModelStore"
    entries: list[tuple[Entry, str]]
    released: bool = False

    def poll(self) -> tuple[int, int]:
        ready, pending = 0, 0
        for entry, _ in self.entries:
            if entry.dead and entry.reads_left:  # forgotten while it was read: nothing from here on will come
                break
            if entry.reads_left:
                entry.reads_left -= 1
                if not entry.reads_left:
                    self.store.finish_read(entry)
            if entry.frame is None or entry.reads_left or pending:
                pending += 1
            else:
                ready += 1
        return ready, pending

    def batch(self, tables: Sequence[Sequence[int]], begin: int, end: int) -> tuple[Any, dict[str, int]]:
        chunks, by_tier = model.chunks_to_load(self.rows(), tables[0], begin, end)
        return _core.ChunkBatch(*chunks.columns()), by_tier

    def rows(self) -> list[tuple[int, bytes, str]]:
        rows: list[tuple[int, bytes, str]] = []
        for entry, tier in self.entries:
            if entry.frame is None or entry.reads_left:
                break
            rows.append((entry.frame, entry.key, tier))
        return rows

    def release(self) -> None:
        if not self.released:
            self.released = True
            for entry, _ in self.entries:
                self.store.unpin(entry)


@dataclass(eq=False)
class ModelStore(model.Session):  # type: ignore[name-defined,misc]
    """See ``kvloft._core.Session``. With ``unkind`` it makes trouble from that generator."""

    frame_bytes: int
    host_bytes: int
    namespace: bytes = b""
    num_ranks: int = 1
    groups: Any = None
    eviction: str = "adaptive"
    disk_path: str | None = None
    disk_bytes: int = 0
    disk_threads: int = 2
    description: str = ""
    limits: Any = None
    unkind: random.Random | None = None
    has_disk: bool = False
    entries: dict[bytes, Entry] = field(default_factory=dict)
    tickets: dict[int, Entry] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=lambda: {"host_evictions": 0, "disk_verify_failures": 0})

    def __post_init__(self) -> None:
        self.num_frames = max(1, self.host_bytes // self.frame_bytes)
        self._fd = os.memfd_create("model-store", os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self.num_frames * self.frame_bytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # as Arena.open demands
        self.arena_path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.arena_id, self.lifeline, self.is_save_late = os.fstat(self._fd).st_ino, None, False
        self._bytes = map_frames(self.arena_path, self.frame_bytes, self.num_frames)
        self._free = list(range(self.num_frames))
        self._next_ticket = 0
        self.in_flight = model.InFlight(self.num_ranks)

    def renew(self) -> bool:
        return False

    # -- questions ------------------------------------------------------------------------------------------------

    def lookup(self, chain: Any) -> tuple[int, int]:
        self._mischief()
        host, total, in_host = 0, 0, True
        for entry in self._prefix(chain):
            in_host = in_host and entry.frame is not None and not entry.reads_left
            host += in_host
            total += 1
        return host, total

    def _prefix(self, chain: Any) -> Iterator[Entry]:
        for unit in range(chain.num_blocks):
            entry = self.entries.get(chain.key(unit))
            if not entry or not entry.visible:
                return
            yield entry

    def acquire(self, chain: Any, num_units: int) -> ModelLease:
        rows: list[tuple[Entry, str]] = []
        for entry in islice(self._prefix(chain), num_units):
            tier = "disk" if entry.frame is None or entry.reads_left else "host"
            entry.pins += 1
            if entry.frame is None:
                entry.frame = self._take_frame()
                if entry.frame is None:
                    entry.pins -= 1
                    break
                entry.reads_left = self.unkind.randint(1, 4) if self.unkind else 1
            rows.append((entry, tier))
        return ModelLease(self, rows)

    # -- saves ----------------------------------------------------------------------------------------------------

    def reserve(self, rows: Any) -> tuple[list[Any], list[int]]:
        reserved, dropped = super().reserve(rows)
        return [chunks and _core.ChunkBatch(*chunks.columns()) for chunks in reserved], dropped

    def reserve_rows(self, chain: Any, start: int, stop: int) -> tuple[list[tuple[int, int, bytes, int]], int]:
        self._mischief()
        rows: list[tuple[int, int, bytes, int]] = []
        for unit in range(start, stop):
            key, parent = chain.key(unit), chain.key(unit - 1) if unit else None
            if key in self.entries:
                continue
            frame = self._take_frame() if parent is None or parent in self.entries else None
            if frame is None:
                return rows, stop - unit
            entry = self.entries[key] = Entry(key, parent, frame)
            self._next_ticket += 1
            self.tickets[self._next_ticket] = entry
            rows.append((self._next_ticket, frame, key, unit))
        return rows, 0

    def commit_tickets(self, tickets: Sequence[int]) -> int:
        done = 0
        for ticket in tickets:
            entry = self.tickets.pop(ticket)
            parent = self.entries.get(entry.parent) if entry.parent is not None else None
            if entry.dead or (entry.parent is not None and (parent is None or not parent.visible)):
                self._kill(entry)
                continue
            entry.visible = True
            done += 1
            if self.has_disk:
                assert entry.frame is not None
                entry.saved = self._bytes[entry.frame].tobytes()
        return done

    def abort_tickets(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            self._kill(self.tickets.pop(ticket))

    # -- ends -----------------------------------------------------------------------------------------------------

    def discard(self, keys: Sequence[bytes]) -> int:
        before = len(self.entries)
        for key in keys:
            if entry := self.entries.get(key):
                self._kill(entry)
        return before - len(self.entries)

    def forget_everything(self) -> None:
        for entry in list(self.entries.values()):
            self._kill(entry)

    def _kill(self, entry: Entry) -> None:
        """Forget a chunk and what hangs on it; its frame is free when its last owner ends."""
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
            for child in [e for e in self.entries.values() if e.parent == entry.key]:
                self._kill(child)
        entry.dead, entry.visible, entry.saved = True, False, None
        self._free_if_unused(entry)

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        assert entry.pins >= 0
        if not entry.pins and entry.reads_left and entry.frame is not None:  # the read is not waited for any more
            self._free.append(entry.frame)
            entry.frame, entry.reads_left = None, 0
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: Entry) -> None:
        if entry.dead and not entry.pins and entry.frame is not None and entry not in self.tickets.values():
            self._free.append(entry.frame)
            entry.frame = None

    def finish_read(self, entry: Entry) -> None:
        assert entry.frame is not None
        assert entry.saved is not None
        self._bytes[entry.frame] = np.frombuffer(entry.saved, dtype=np.uint8)

    def _take_frame(self) -> int | None:
        if self.unkind and self.unkind.random() < 0.03:
            return None
        if not self._free:
            self._evict()
        return self._free.pop(self.unkind.randrange(len(self._free)) if self.unkind else -1) if self._free else None

    def _evict(self) -> None:
        idle = [e for e in self.entries.values() if e.visible and not e.pins and e.frame is not None]
        leaves = [e for e in idle if not self._has_child(e)]
        if leaves:
            entry = self.unkind.choice(leaves) if self.unkind else leaves[0]
            assert entry.frame is not None
            self.counts["host_evictions"] += 1
            self._free.append(entry.frame)
            entry.frame = None
            if entry.saved is None:
                del self.entries[entry.key]
                entry.dead = True

    def _has_child(self, entry: Entry) -> bool:
        return any(e.parent == entry.key and (e.frame is not None or entry.saved is None) for e in self.entries.values())

    def _mischief(self) -> None:
        if self.unkind and self.unkind.random() < 0.05:
            self._evict()

    # -- the rest -------------------------------------------------------------------------------------------------

    def take_events(self) -> list[str]:
        return []

    def limit_frames(self, num_frames: int) -> None:
        raise AssertionError("workers here can copy to every frame")

    def stats(self) -> dict[str, int]:
        values = self.entries.values()
        visible = sum(e.visible and e.frame is not None for e in values)
        return self.counts | {
            "frames_total": self.num_frames, "frames_free": len(self._free), "frames_visible": visible,
            "frames_reserved": self.num_frames - len(self._free) - visible, "pins": sum(e.pins for e in values),
            "disk_used": sum(e.saved is not None for e in values),
        }  # fmt: skip

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, timeout_s: float = 30.0) -> None:
        assert not self.tickets, "reservations outlive their owner"


def map_frames(path: str, frame_bytes: int, num_frames: int) -> NDArray[np.uint8]:
    """The arena at ``path`` as an array of frames."""
    fd = os.open(path, os.O_RDWR)
    try:
        mapped = mmap.mmap(fd, frame_bytes * num_frames)
    finally:
        os.close(fd)
    return np.frombuffer(mapped, dtype=np.uint8).reshape(num_frames, frame_bytes)
