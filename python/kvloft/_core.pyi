"""Types of the Rust extension. Conversions only: behavior is documented in rust/core. Errors are
those of `kvloft.errors`.

Sizes are bytes, counts are tokens or blocks as named. Every key is 32 bytes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, final, overload

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, Ticket

_Limits = tuple[int | float | None, int | float | None, int | None]
_TenantLimits = tuple[_Limits, _Limits, Sequence[tuple[str, _Limits]]]

KEY_SCHEMA: Final[int]
TRAILER_BYTES: Final[int]
VERSION: Final[str]
REVISION: Final[str]

def namespace_digest(fields: Sequence[tuple[str, str]]) -> bytes:
    """32-byte fingerprint of (name, value) pairs; order does not matter, names must be unique."""

def root_key(namespace: bytes, adapter: tuple[str, str] | None, cache_salt: str | None) -> bytes:
    """The 32-byte key of the empty prefix. ``adapter`` is (name, path-or-id) of a LoRA."""

def first_of_each(keys: list[Any], values: list[Any]) -> list[tuple[Any, Any]]:
    """(key, value[0]) of those whose value is neither None nor empty, in their order;
    ``ConfigError`` for lists of two lengths.
    """

@final
class KeyChain:
    """Keys of one request's prefix, one per block, extended as tokens arrive.

    Content is appended position by position; a block's key is computed when its last position
    arrives. A chunk's key is the key of its last block. With a ``lookahead`` of n (at most a block)
    each key stands for the n positions behind its block, too.
    """

    def __new__(cls, root: bytes, *, block_tokens: int, lookahead: int = 0) -> KeyChain: ...
    @property
    def num_tokens(self) -> int:
        """Positions appended so far."""
    @property
    def num_blocks(self) -> int:
        """Full blocks so far, each with a key: all positions that it stands for were appended."""
    def add_item(self, identifier: str, start: int, num_tokens: int) -> None:
        """Declare a multimodal item on positions [start, start + num_tokens), before they are
        appended (again: no effect).
        """
    def append_tokens(
        self, token_ids: Sequence[int], start: int = 0, stop: int | None = None, /
    ) -> None:
        """Append ``token_ids[start:stop]`` (a list is read in place). Bounds outside it and bad ids
        raise ConfigError.
        """
    def append_embeds(self, rows: Any, *, dtype: str, width: int) -> None:
        """Append embedding rows: a C-contiguous buffer of n x width elements of ``dtype``, raw
        bytes.
        """
    def key(self, block: int, group: int | None = None) -> bytes:
        """Of the prefix that ends with full block ``block``, or of what KV cache group number
        ``group`` keeps of it. ConfigError if there is no such block."""

@final
class Arena:
    """Frames in shared memory, as a worker (maybe in another process) maps them."""

    @staticmethod
    def open(path: str, *, size_bytes: int) -> Arena: ...
    @staticmethod
    def private(size_bytes: int) -> Arena:
        """Memory that no other process maps."""
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def id(self) -> int:
        """Which memory it is: paths are used again, this is not while the memory is there."""
    def seal(self, part: dict[str, Any]) -> int:
        """Tag the payload of ``part`` and write the trailer at the part's end; returns the tag.

        ``part``: offset in the arena, part_bytes, key, layout, page_bytes, num_blocks, rank. The
        payload is, for each of num_blocks blocks, pages of page_bytes each, back to back. Raises
        ConfigError for a place outside the arena.
        """
    def check(self, part: dict[str, Any]) -> str | None:
        """None if trailer and tag match; else one of 'unsealed', 'key', 'layout', 'shape', 'tag'.
        ``part`` as in `seal`.
        """

def prefer_numa_node(address: int, num_bytes: int, node: int) -> bool:
    """Place whole pages of this process that are not in memory yet on a NUMA node.

    Returns False if they were placed before, by any process that shares them, or if the system
    refuses.
    """

@final
class ChunkBatch:
    """Chunks to copy, as columns; see ``kvloft.seam.batch``. Immutable, compared by value, pickled
    as its columns.

    A long prompt has thousands, and a forward or the first byte of a load waits for them: to read
    all of them, take the columns.
    """

    def __new__(
        cls, parts: Sequence[tuple[int, bytes, bytes, bytes]], tickets: bytes
    ) -> ChunkBatch:
        """Out of `columns`. Raises ConfigError where they do not fit together."""
    @staticmethod
    def concat(batches: Sequence[Any]) -> ChunkBatch:
        """All chunks of ``batches`` as those of one group. They have as many blocks a chunk, and
        all tickets or none.
        """
    def by_group(self) -> list[tuple[int, ChunkBatch]]:
        """A batch for each KV cache group."""
    def by_size(self) -> list[tuple[int, int, ChunkBatch]]:
        """A batch for each KV cache group and size class of frames."""
    def columns(self) -> tuple[list[tuple[int, bytes, bytes, bytes]], bytes]:
        """Of each group (its number, frames (u32), keys (32 bytes), blocks (i32)), and tickets
        (u64, or none), little endian.

        A group's chunks have the same number of blocks; -1 stands for one that is not copied.
        """
    def tickets(self) -> list[Ticket]: ...
    def block_ids(self) -> list[BlockId]:
        """Blocks that are copied, of all chunks."""
    def by_frame(self) -> ChunkBatch:
        """In the order of frames, so that neighbours, in whichever order a store gave them out, are
        one copy.
        """
    def check(self, *, num_frames: int, num_blocks: int, blocks_per_chunk: int) -> None:
        """Raises ConfigError if a copy would reach outside the arena, its frame or the paged KV."""
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[ChunkCopy]: ...
    @overload
    def __getitem__(self, index: int, /) -> ChunkCopy: ...
    @overload
    def __getitem__(self, index: slice, /) -> ChunkBatch: ...

@final
class ReadLease:
    """Pins on the host part of prefixes; disk chunks behind it are being read in. Dropping it
    unpins.
    """

    def poll(self) -> tuple[int, int]:
        """Return (units ready to load, units still being read from disk). Never blocks on I/O.

        With several KV cache groups, or one that keeps a part of a prefix, a hit is whole or
        nothing: (0, 0) if a chunk will not come.
        """
    def batch(
        self, tables: Sequence[Sequence[int]], begin: int, end: int
    ) -> tuple[ChunkBatch, dict[str, int]]:
        """Pair the chunks of units [begin, end) with blocks of ``tables``, one per KV cache group.

        Returns the chunks, and units by tier ('host' or 'disk': where a chunk was when the lease
        was taken). Nothing unless all is there; with one group of full attention, as much as is
        there.
        """
    def release(self) -> None: ...

@final
class Session:
    """A store (host arena, optional disk tier, index), and what one engine has in flight in it."""

    def __new__(
        cls,
        *,
        frame_bytes: int | Sequence[int],
        host_bytes: int,
        namespace: bytes,
        num_ranks: int = 1,
        groups: Sequence[tuple[int | None, str, int, int, int, int, int, int | None]] | None = None,
        eviction: str = "adaptive",
        disk_path: str | None = None,
        disk_bytes: int = 0,
        disk_threads: int = 2,
        description: str = "",
        limits: _TenantLimits | None = None,
    ) -> Session:
        """``frame_bytes``: the size of frames, or one size for each size class.

        ``groups``: of each KV cache group its number in the keys (None: the prefix's own keys),
        kind, tokens per block, blocks per unit, how many of those are kept, reach in tokens, size
        class, and that of frames for compressed chunks (see `kvloft.seam.shape`). None: one group
        of full attention with one block per unit.

        ``limits``: of each salt, of what has no salt, and of single salts; see `kvloft.limits`.
        Salts are hashed at once."""
    @staticmethod
    def connect(
        socket: str,
        *,
        frame_bytes: int | Sequence[int],
        namespace: bytes,
        timeout_s: float,
        num_ranks: int = 1,
        groups: Sequence[tuple[int | None, str, int, int, int, int, int, int | None]] | None = None,
        description: str = "",
    ) -> Session:
        """The store of the server that listens at ``socket``. Each call waits ``timeout_s`` at
        most, and is a miss then.

        While no server answers, or it refuses this engine, everything is a miss, and it is tried
        again in the background. Raises ConfigError for a socket of another user's process.
        """
    @property
    def arena_path(self) -> str:
        """Path another process of this user may open: /proc/PID/fd/N of a memfd; empty while there
        is no store.
        """
    @property
    def arena_id(self) -> int:
        """As `Arena.id`; 0 while there is no store."""
    @property
    def lifeline(self) -> tuple[str, int] | None:
        """Path and inode of a pipe that each worker opens for writing before it maps the arena, and
        holds as long.

        A server keeps an engine's frames reserved until every process has closed it. None for an
        engine's own store, or while there is none.
        """
    @property
    def frame_sizes(self) -> list[int]:
        """Bytes of frames, by size class."""
    @property
    def arena_sizes(self) -> tuple[int, int]:
        """Bytes of the arena, and of its slabs; 0 while there is no store."""
    @property
    def is_save_late(self) -> bool:
        """Whether the last reservation got no answer of the server in time: what it dropped can be
        tried again at once.
        """
    def renew(self) -> bool:
        """Use the store that took the place of one that is gone: whether there is one. Nothing of
        the old one is there then.

        Only here does the arena change, so that no plan has frames of two.
        """
    @property
    def num_in_flight(self) -> int:
        """Reservations that some rank has not reported."""
    def lookup(self, chain: KeyChain) -> tuple[int, int]:
        """Return the leading units that every full-attention group has, in host memory and in any
        tier. No side effect.

        No hit is deeper. Without such a group, these are all that have keys.
        """
    def deepest_hit(self, chain: KeyChain, host_units: int, stored_units: int) -> tuple[int, int]:
        """Return the deepest hits of at most that many units, which `lookup` found, in host memory
        and in any tier: boundaries at which every group has the chunks that it needs. No side
        effect."""
    def acquire(self, chain: KeyChain, num_units: int = ...) -> ReadLease:
        """Pin the chunks that a prefix of ``num_units`` needs, and start reading those that are on
        disk into host memory.
        """
    def reserve(
        self, rows: Sequence[tuple[KeyChain, Sequence[int], int, int, int, Sequence[Sequence[int]]]]
    ) -> tuple[list[ChunkBatch | None], list[int]]:
        """Reserve frames for rows of (chain, token_ids, num_tokens, start, stop, tables): the
        chunks of units [start, stop) in every group but Mamba ones; all or nothing. Returns each
        row's chunks (None: none), and how many units got no frame.

        Each chain is first extended by what it lacks of ``token_ids[:num_tokens]``. Chunks that are
        stored or being saved are skipped, and chunks with a null block. A full-attention group
        stops at the first chunk without a frame or a parent. The reservations are in flight until
        they are settled or aborted. Raises ConfigError if a chain has fewer units than its row.
        """
    def reserve_states(
        self, rows: Sequence[tuple[KeyChain, int, int, int]]
    ) -> list[ChunkBatch | None]:
        """Reserve a frame for each (chain, group, unit, block): the group's state at the end of the
        unit, which the block will hold. All or nothing on an error. None stands for no chunk.

        If the prefix continues, it and the state are kept longer.
        """
    def settle(
        self, saved: Sequence[int], failed: Sequence[int] = ..., misfits: Sequence[int] = ...
    ) -> tuple[int, int]:
        """Take in one rank's report. With the last rank's, a chunk becomes visible if no rank
        failed it (and its parent is there), or its frame is given back. Returns (chunks that became
        visible, chunks that some rank failed).

        ``misfits``: those of ``failed`` that did not fit a frame for compressed chunks. They get a
        larger frame the next time.
        """
    def abort(self, tickets: Sequence[int] | None = None) -> None:
        """Give reserved frames back that no rank will report; None: all of them."""
    def being_read(self, blocks: Sequence[int] | None = None) -> list[BlockId]:
        """Those of ``blocks`` that a save in flight may still read; None: every such block."""
    def discard(self, keys: Sequence[bytes]) -> int:
        """Forget chunks (and what hangs on them) in every tier: failed verification. Pinned ones
        vanish from lookup at once and are freed with their last pin. Returns how many were
        dropped."""
    def clear(self) -> None:
        """Remove all chunks from every tier, also saves in flight; pinned or reserved frames are
        freed when their owner ends.
        """
    def stats(self) -> dict[str, int]:
        """Counters and gauges; see rust/core/src/store/stats.rs for the names."""
    def limit_memory(self, limit_bytes: int) -> None:
        """Saves take frames in the first ``limit_bytes`` of the arena only from now on: workers
        cannot copy to the others yet.
        """
    def take_events(self) -> list[tuple[str, bool]]:
        """Return new log lines, each with whether it reports a problem."""
    def watch(self, capacity: int) -> None:
        """Record added and removed chunks from now on, at most ``capacity`` keys, for one caller of
        `changes`.
        """
    def changes(self, asked: Sequence[bytes], limit: int) -> tuple[list[tuple[bytes, int]], bool]:
        """([(key, where it is now)], lost): the chunks ``asked`` for, then up to ``limit`` that
        came or went, oldest first.

        Where: 1 in host + 2 on disk + 4 coming to host; a save or read without a result is
        reported, too, unless the chunk is on disk. ``lost``: keys were dropped before, so whatever
        is not among the rows may have changed. A server that does not answer says nothing; after a
        second, or when it is gone, nothing is anywhere, and ``lost`` is said once: then, and with
        its next answer.
        """
    def flush(self, timeout_s: float) -> bool:
        """Wait until every visible host chunk that will go to disk is there; False at the
        deadline.
        """
    def close(self, timeout_s: float = 30.0) -> None: ...

@final
class Server:
    """A store that engines of this user share; it listens at ``socket`` from its making on, and
    only they are let in.

    Memory is taken for the first engine, and the disk directory at once, or later if it is not
    available: see ``disk_trouble``. Each namespace has chunks, slabs of the memory and a folder of
    its own on disk; those with engines share the memory equally, but for ``shares``: percent by how
    a namespace's name in hex begins. ``numa``: the NUMA node of each shard's part of a chunk, or
    one for all. ``settings``: text for operators, returned by `server_status`. Raises BusyError
    where another server has the socket, ConfigError where its directory is not private, the shares
    are wrong or ``disk_path`` can never be used.
    """

    def __new__(
        cls,
        socket: str,
        *,
        host_bytes: int,
        eviction: str = "adaptive",
        disk_path: str | None = None,
        disk_bytes: int = 0,
        disk_threads: int = 2,
        max_connections: int = 64,
        shares: list[tuple[str, int]] | None = None,
        numa: list[int] | None = None,
        limits: _TenantLimits | None = None,
        settings: dict[str, str] | None = None,
    ) -> Server: ...
    def status(self) -> dict[str, Any]:
        """As `server_status`."""
    def disk_trouble(self) -> str | None:
        """Why the disk directory is not this server's for now, such as another owner; None where it
        is, or there is none.
        """
    def take_events(self) -> list[str]:
        """Return new log lines."""
    def close(self, timeout_s: float = 30.0) -> None:
        """End every connection, write to disk what should be there until the timeout, give the disk
        directory up.
        """

def server_status(socket: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """What the server at ``socket`` does now: host_bytes, slab_bytes (both 0 before the first
    engine), stats (its counters and gauges by name; those of the disk's room once it was looked
    at), settings (what it was started with, as text by name) and namespaces: each namespace (32
    bytes), description, frame_sizes, slabs (how many it has), stats (of its store, with
    share_percent where that is set), tenants (salts that have most: each tag, None for what has no
    salt, host_bytes and disk_bytes, max_host_bytes and max_disk_bytes, ttl_s) and engines (each
    pid, connected_ms, reservations, leases).

    Raises LateError if the server does not answer in time, StoreError if there is no server, and
    ConfigError if it refuses.
    """

def server_forget(socket: str, *, namespace: str = "", timeout_s: float = 30.0) -> int:
    """Have the server at ``socket`` forget a namespace in every tier, for all its engines; returns
    how many chunks.

    It is the one whose name in hex begins with ``namespace``, open or on disk only; that may be
    empty where there is one. Raises as `server_status`, and ConfigError, with the names that there
    are, if not exactly one begins so, or if the disk does not say.
    """

def server_evict(
    socket: str,
    *,
    namespace: str = "",
    salt: str | None = None,
    host_only: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Evict the chunks of this cache salt, or all chunks, from the server at ``socket``: from every
    tier, or in host memory only.

    In the namespaces whose names in hex begin with ``namespace``; those that are on disk without an
    engine are among them, where a salt is given. Returns how many namespaces were looked at,
    chunks, host_bytes and disk_bytes that went, chunks in_use, and whether that is complete: if
    not, something may be found yet, or after a restart. The salt itself does not reach the server.
    Raises as `server_status`, and ConfigError if no namespace is meant.
    """

def disk_inspect(path: str) -> list[dict[str, Any]]:
    """One dict per namespace directory under ``path``, most recently used first: namespace (16 hex
    digits), description, chunks, slots, frame_sizes, bytes, oldest and newest (Unix seconds or
    None), problem (a sentence part or None).

    Takes no lock, so an engine may own the directory. ConfigError where ``path`` is not a disk
    directory.
    """

@final
class DiskVerify:
    """Walks every chunk of one disk directory, checking key and checksum; a step at a time, for
    progress.

    Owns the directory meanwhile: BusyError while an engine does. ConfigError where ``path`` is not
    a disk directory.
    """

    def __new__(cls, path: str) -> DiskVerify: ...
    @property
    def num_chunks(self) -> int: ...
    def step(self, max_chunks: int) -> list[dict[str, Any]]:
        """Check up to max_chunks more; returns the damage found ({namespace, slot, frame_bytes,
        key in hex, problem, is_other_format}; slot, frame_bytes and key are None where the damage
        is of none). A slot is numbered among those of its size. A namespace of another format is
        not damaged: it was not checked.

        The first call also returns what opening found (superblocks, records), so call it at least
        once.
        """
    @property
    def num_checked(self) -> int: ...
