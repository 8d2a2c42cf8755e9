"""A dict-based model of the store and of the key chain in `kvloft.seam`, for tests of the scheduler
side.

The model follows the rules in `_core.pyi` and checks in every call that the caller also follows
them. If the rules permit a choice, the model makes the worst choice for the caller (a commit after
`clear` is lost, and a frame is reused as soon as possible). This module must not import kvloft.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunk_batch import Chunks, InFlight, Session, chunks_to_load

Content = tuple[Any, ...]
"""A position's content: ``("token", id)`` or ``("row", bytes, dtype)``, and its items."""


class KeyBook:
    """Makes chains and records the prefix of every key."""

    def __init__(self, block_tokens: int, lookahead: int = 0) -> None:
        self.block_tokens, self.lookahead = block_tokens, lookahead
        self.prefix_of: dict[bytes, tuple[Content, ...]] = {}
        """The root followed by one entry per position up to the end of the block."""

    def new_chain(self, view: Any, lookahead: int | None = None) -> "ModelChain":
        root = ("root", view.adapter, view.cache_salt)
        return ModelChain(self, root, self.lookahead if lookahead is None else lookahead)


class ModelChain:
    """The keys of a prefix, one per block.

    Each key is a hash of the previous key (or the root) and of the block's content.
    """

    def __init__(self, book: KeyBook, root: Content, lookahead: int) -> None:
        self._book = book
        self.root, self._lookahead = root, lookahead
        self.positions: list[Content] = []
        self._items: list[tuple[str, int, int]] = []
        self._keys: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_blocks(self) -> int:
        return len(self._keys)

    def add_item(self, identifier: str, start: int, num_tokens: int) -> None:
        assert start >= len(self.positions), "an item must be declared before its positions"
        self._items.append((identifier, start, num_tokens))

    def append_tokens(
        self, token_ids: Sequence[int], start: int = 0, stop: int | None = None, /
    ) -> None:
        for token in token_ids[start:stop]:
            self._append(("token", token))

    def append_embeds(self, rows: Any, *, dtype: str, width: int) -> None:
        for row in rows:
            self._append(("row", row, dtype, width))

    def _append(self, content: Content) -> None:
        at = len(self.positions)
        self.positions.append(content + tuple(item_content(self._items, at)))
        end = len(self.positions) - self._lookahead
        if end > 0 and end % self._book.block_tokens == 0:
            block = self.positions[end - self._book.block_tokens :]
            parent = self._keys[-1] if self._keys else repr(self.root).encode()
            key = hashlib.sha256(parent + repr(block).encode()).digest()
            self._keys.append(key)
            self._book.prefix_of[key] = (self.root, *self.positions[:end])

    def key(self, block: int) -> bytes:
        return self._keys[block]


def item_content(items: Iterable[tuple[str, int, int]], at: int) -> Iterable[Content]:
    """Return the contribution of multimodal items at position ``at``."""
    return ((name, at - start) for name, start, count in items if start <= at < start + count)


@dataclass(eq=False)
class Entry:
    """A chunk.

    ``state`` is reserved (being written), ready, reading (from disk), disk (evicted from host
    memory) or failed (a failed read).
    """

    key: bytes
    parent: bytes | None
    state: str
    frame: int | None = None
    disk: Any = None
    pins: int = 0
    used: int = 0
    gone: bool = False
    """True if the chunk was removed.

    The frame is freed with the last pin, or when the ticket or read completes.
    """


class Lease:
    """The pins on a prefix. Entries after the first failed read are ignored."""

    def __init__(self, store: "ModelStore", entries: list[Entry]) -> None:
        self._store = store
        self._entries = entries
        self._tiers = ["disk" if entry.state == "reading" else "host" for entry in entries]
        self.released = False
        for entry in entries:
            entry.pins += 1
        store.open_leases.add(self)

    def poll(self) -> tuple[int, int]:
        assert not self.released
        ready, pending, broken = 0, 0, False
        for entry in self._entries:
            broken = broken or entry.state == "failed"
            if broken:
                continue
            if entry.state == "ready" and not pending:
                ready += 1
            else:
                pending += 1
        return ready, pending

    def batch(
        self, tables: Sequence[Sequence[int]], begin: int, end: int
    ) -> tuple[Chunks, dict[str, int]]:
        return chunks_to_load(self.rows(), tables[0], begin, end)

    def rows(self) -> list[tuple[int, bytes, str]]:
        assert not self.released
        rows: list[tuple[int, bytes, str]] = []
        for entry, tier in zip(self._entries, self._tiers, strict=True):
            if entry.state != "ready":
                break
            assert entry.frame is not None
            rows.append((entry.frame, entry.key, tier))
        return rows

    def release(self) -> None:
        if self.released:
            return
        self.released = True
        self._store.open_leases.discard(self)
        for entry in self._entries:
            entry.pins -= 1
            self._store.free_if_done(entry)


@dataclass
class ModelStore(Session):
    """A store with host frames, an optional disk, and prefix-aware LRU eviction.

    ``arena[frame]`` contains the data that workers wrote. ``tick`` completes disk reads.
    ``drop_next`` is the number of reservations that get no frame. If ``is_save_late`` is True, the
    reason is a late response from the server.
    """

    num_frames: int
    with_disk: bool = False
    drop_next: int = 0
    is_save_late: bool = False
    num_ranks: int = 1
    arena: dict[int, Any] = field(default_factory=dict)
    check_visible: Callable[[bytes, Any], None] | None = None
    """Called with (key, content) of each chunk that becomes visible in host memory or on disk."""

    def __post_init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.free = list(range(self.num_frames))
        self.tickets: dict[int, Entry] = {}
        self.in_flight = InFlight(self.num_ranks)
        self.open_leases: set[Lease] = set()
        self.reading: list[Entry] = []
        self._hidden: set[int] = set()
        self._next_ticket = 0
        self._clock = 0

    def _present(self, chain: ModelChain, in_host: bool) -> list[Entry]:
        """Return the leading chunks that are present."""
        found: list[Entry] = []
        for unit in range(chain.num_blocks):
            entry = self.entries.get(chain.key(unit))
            if entry is None or not self._visible(entry, in_host):
                break
            found.append(entry)
        return found

    @staticmethod
    def _visible(entry: Entry | None, in_host: bool) -> bool:
        return entry is not None and (
            entry.state == "ready" or (not in_host and entry.disk is not None)
        )

    # -- Session protocol
    # -----------------------------------------------------------------------------------------

    def lookup(self, chain: ModelChain) -> tuple[int, int]:
        host, both = (len(self._present(chain, in_host)) for in_host in (True, False))
        return host, both

    def acquire(self, chain: ModelChain, num_units: int = 1 << 32) -> Lease:
        self._clock += 1
        entries: list[Entry] = []
        for entry in self._present(chain, in_host=False)[:num_units]:
            entry.used = self._clock
            # the pin prevents evictions for the next chunk from taking this chunk's frame
            entry.pins += 1
            entries.append(entry)
            if entry.frame is None:
                frame = self._take_frame()
                if frame is None:
                    entry.pins -= 1
                    entries.pop()
                    break
                entry.frame, entry.state = frame, "reading"
                self.reading.append(entry)
        lease = Lease(self, entries)
        for entry in entries:
            entry.pins -= 1
        return lease

    def reserve_rows(
        self, chain: ModelChain, start: int, stop: int
    ) -> tuple[list[tuple[int, int, bytes, int]], int]:
        assert 0 <= start <= stop <= chain.num_blocks, "reserved beyond the chain"
        rows: list[tuple[int, int, bytes, int]] = []
        for unit in range(start, stop):
            key, parent = chain.key(unit), chain.key(unit - 1) if unit else None
            entry = self.entries.get(key)
            if entry is not None and entry.frame is not None:
                continue
            row = self._reserve_one(entry, key, parent)
            if row is None:
                return rows, stop - unit
            rows.append((*row, unit))
        return rows, 0

    def _reserve_one(
        self, old: Entry | None, key: bytes, parent: bytes | None
    ) -> tuple[int, int, bytes] | None:
        above = self.entries.get(parent) if parent is not None else None
        if parent is not None and (above is None or above.state not in ("ready", "reserved")):
            return None
        if self.drop_next:
            self.drop_next -= 1
            return None
        if above is not None:
            above.pins += 1
        frame = self._take_frame()
        if above is not None:
            above.pins -= 1
        if frame is None:
            return None
        self._clock += 1
        entry = Entry(key, parent, "reserved", frame, used=self._clock)
        if old is not None:
            entry.disk = old.disk
            old.gone = True
        self.entries[key] = entry
        ticket = self._next_ticket
        self._next_ticket += 1
        self.tickets[ticket] = entry
        self.arena[frame] = None
        return ticket, frame, key

    def commit_tickets(self, tickets: Sequence[int]) -> int:
        num_visible = 0
        for ticket in tickets:
            entry = self.tickets.pop(ticket)
            above = self.entries.get(entry.parent) if entry.parent is not None else None
            if entry.gone or (
                entry.parent is not None and (above is None or above.state != "ready")
            ):
                self._forget(entry)
                self.free_if_done(entry, force=True)
                continue
            entry.state = "ready"
            num_visible += 1
            assert entry.frame is not None
            content = self.arena[entry.frame]
            if self.check_visible is not None:
                self.check_visible(entry.key, content)
            if self.with_disk:
                entry.disk = content
        return num_visible

    def abort_tickets(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            entry = self.tickets.pop(ticket)
            self._forget(entry)
            self.free_if_done(entry, force=True)

    def discard(self, keys: Sequence[bytes]) -> int:
        dropped = 0
        for key in keys:
            entry = self.entries.get(key)
            if entry is None or entry.state == "reserved":
                continue
            dropped += 1
            self._forget(entry)
            for child in [e for e in self.entries.values() if e.parent == key]:
                if child.state == "reserved":
                    continue  # its commit fails, because its parent is missing
                dropped += self.discard([child.key])
        return dropped

    def forget_everything(self) -> None:
        for entry in list(self.entries.values()):
            self._forget(entry)

    def limit_memory(self, limit_bytes: int) -> None:
        self.frame_limit = limit_bytes // 4096

    def stats(self) -> dict[str, int]:
        reserved = len(self.tickets)
        return {
            "frames": self.num_frames,
            "free": len(self.free),
            "reserved": reserved,
            "leases": len(self.open_leases),
        }

    # -- frames
    # -----------------------------------------------------------------------------------------

    def _forget(self, entry: Entry) -> None:
        entry.gone = True
        if self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        if entry.frame is not None:
            self._hidden.add(entry.frame)
        self.free_if_done(entry)

    def free_if_done(self, entry: Entry, force: bool = False) -> None:
        """Release the frame of a removed entry that is not pinned, being written or being read."""
        busy = entry.pins or (entry.state == "reserved" and not force) or entry.state == "reading"
        if entry.gone and entry.frame is not None and not busy:
            self._hidden.discard(entry.frame)
            self.arena[entry.frame] = None
            self.free.append(entry.frame)
            entry.frame = None

    def _take_frame(self) -> int | None:
        if not self.free:
            parents = {e.parent for e in self.entries.values() if e.frame is not None}
            leaves = [
                e
                for e in self.entries.values()
                if e.state == "ready" and not e.pins and e.key not in parents
            ]
            if not leaves:
                return None
            self.evict(min(leaves, key=lambda e: e.used))
        return self.free.pop(0)

    def evict(self, entry: Entry) -> None:
        """Evict a leaf. With a disk, the chunk remains on disk."""
        assert entry.pins == 0, "I4: a pinned frame is not evicted"
        assert entry.frame is not None
        self.arena[entry.frame] = None
        self.free.append(entry.frame)
        entry.frame, entry.state = None, "disk"
        if entry.disk is None:
            del self.entries[entry.key]

    def tick(self, num_reads: int, *, fail: bool = False) -> None:
        """Complete ``num_reads`` disk reads, successfully or not."""
        for _ in range(min(num_reads, len(self.reading))):
            entry = self.reading.pop(0)
            assert entry.frame is not None
            if fail:
                entry.state, entry.gone = "failed", True
                self._hidden.add(entry.frame)
                if self.entries.get(entry.key) is entry:
                    del self.entries[entry.key]
                    for child in [
                        e
                        for e in self.entries.values()
                        if e.parent == entry.key and e.state != "reserved"
                    ]:
                        self.discard([child.key])
                self.free_if_done(entry)
            else:
                self.arena[entry.frame] = entry.disk
                entry.state = "ready"
                self.free_if_done(entry)

    def check(self) -> None:
        """Check I8, and that presence is monotone: every ready chunk has a parent with a frame."""
        used = [e.frame for e in self.entries.values() if e.frame is not None]
        assert len(set(used)) == len(used), "one frame, two chunks"
        hidden = self._hidden - set(used)
        assert len(used) + len(hidden) + len(self.free) == self.num_frames, "I8"
        for entry in self.entries.values():
            if entry.state == "ready" and entry.parent is not None:
                above = self.entries.get(entry.parent)
                assert above is not None
                assert above.frame is not None
