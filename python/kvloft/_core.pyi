"""Types of the Rust extension. Conversions only: behavior is documented in rust/core. Raises the
exceptions of `kvloft.errors`.

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
    """Return (key, value[0]) for each value that is neither None nor empty, in order; ConfigError
    if the lists differ in length.
    """

@final
class KeyChain:
    """Keys of one request's prefix, one per block, extended as tokens arrive.

    Content is appended position by position; a block's key is computed when its last position
    arrives. A chunk's key is the key of its last block. With a ``lookahead`` of n (at most a
    block), each key also covers the n positions after its block.
    """

    def __new__(cls, root: bytes, *, block_tokens: int, lookahead: int = 0) -> KeyChain: ...
    @property
    def num_tokens(self) -> int:
        """Positions appended so far."""
    @property
    def num_blocks(self) -> int:
        """Number of full blocks so far, each with a key: all positions that it covers were
        appended.
        """
    def add_item(self, identifier: str, start: int, num_tokens: int) -> None:
        """Declare a multimodal item on positions [start, start + num_tokens) before they are
        appended; a repetition has no effect.
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
        """Return the key of the prefix that ends with full block ``block``, or of the chunk that KV
        cache group ``group`` keeps of it. ConfigError if there is no such block.
        """

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
        """Identifies the memory: paths are reused, this number is not while the memory exists."""
    def seal(self, part: dict[str, Any]) -> int:
        """Tag the payload of ``part`` and write the trailer at the part's end; returns the tag.

        ``part``: offset in the arena, part_bytes, key, layout, page_bytes, num_blocks, rank. The
        payload is, for each of num_blocks blocks, pages of page_bytes each, back to back. Raises
        ConfigError for a place outside the arena.
        """
    def check(self, part: dict[str, Any]) -> str | None:
        """Return None if trailer and tag match; else one of 'unsealed', 'key', 'layout', 'shape',
        'tag'. ``part`` as in `seal`.
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

    A long prompt has thousands, and a forward pass or the first byte of a load waits for them: to
    read all of them, use the columns.
    """

    def __new__(
        cls, parts: Sequence[tuple[int, bytes, bytes, bytes]], tickets: bytes
    ) -> ChunkBatch:
        """Out of `columns`. Raises ConfigError where they do not fit together."""
    @staticmethod
    def concat(batches: Sequence[Any]) -> ChunkBatch:
        """Join all chunks of ``batches`` as chunks of one group. They must have the same number of
        blocks per chunk, and all tickets or none.
        """
    def by_group(self) -> list[tuple[int, ChunkBatch]]:
        """A batch for each KV cache group."""
    def by_size(self) -> list[tuple[int, int, ChunkBatch]]:
        """A batch for each KV cache group and size class of frames."""
    def columns(self) -> tuple[list[tuple[int, bytes, bytes, bytes]], bytes]:
        """Return, in little endian, (number, frames (u32), keys (32 bytes), blocks (i32)) per
        group, and the tickets (u64, or none).

        A group's chunks have the same number of blocks; -1 marks a block that is not copied.
        """
    def tickets(self) -> list[Ticket]: ...
    def block_ids(self) -> list[BlockId]:
        """Blocks that are copied, of all chunks."""
    def by_frame(self) -> ChunkBatch:
        """Sort chunks by frame, so that neighbors in the arena become one copy."""
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
    """Pins the host part of prefixes; chunks after it are being read from disk. Dropping it
    unpins.
    """

    def poll(self) -> tuple[int, int]:
        """Return (units ready to load, units still being read from disk). Never blocks on I/O.

        With several KV cache groups, or one that keeps a part of a prefix, a hit is all or nothing:
        (0, 0) if a chunk cannot be read.
        """
    def batch(
        self, tables: Sequence[Sequence[int]], begin: int, end: int
    ) -> tuple[ChunkBatch, dict[str, int]]:
        """Pair the chunks of units [begin, end) with blocks of ``tables``, one per KV cache group.

        Returns the chunks, and units by tier ('host' or 'disk': where a chunk was when the lease
        was taken). Returns nothing unless all chunks are ready; with a single full-attention group,
        the ready ones.
        """
    def release(self) -> None: ...

@final
class Session:
    """A store (host arena, optional disk tier, index) with one engine's loads and saves in
    flight.
    """

    def __new__(
        cls,
        *,
        frame_bytes: int | Sequence[int] | Sequence[tuple[int, int]],
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
        """``frame_bytes``: the frame size, or one per size class, or pairs that add the bytes that a
        chunk of the class takes uncompressed.

        ``groups``: for each KV cache group, its number in the keys (None: the keys of the prefix),
        kind, tokens per block, blocks per unit, blocks kept of a unit, reach in tokens, size class,
        and size class of compressed chunks (see `kvloft.seam.shape`). None: one group of full
        attention with one block per unit.

        ``limits``: for each salt, for requests without a salt, and for single salts; see
        `kvloft.limits`. Salts are hashed at once.
        """
    @staticmethod
    def connect(
        socket: str,
        *,
        frame_bytes: int | Sequence[int] | Sequence[tuple[int, int]],
        namespace: bytes,
        timeout_s: float,
        num_ranks: int = 1,
        groups: Sequence[tuple[int | None, str, int, int, int, int, int, int | None]] | None = None,
        description: str = "",
    ) -> Session:
        """The store of the server that listens at ``socket``. Each call waits at most
        ``timeout_s``; then it is a miss.

        While no server answers, or the server refuses this engine, everything is a miss, and the
        connection is retried in the background. Raises ConfigError for a socket of another user's
        process.
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
        keeps open as long.

        A server keeps an engine's frames reserved until every process has closed it. None for an
        embedded store, or while there is no store.
        """
    @property
    def frame_sizes(self) -> list[int]:
        """Bytes of frames, by size class."""
    @property
    def arena_sizes(self) -> tuple[int, int]:
        """Bytes of the arena and of its slabs; 0 while there is no store."""
    @property
    def is_save_late(self) -> bool:
        """True if the server did not answer the last reservation in time: dropped chunks can be
        retried at once.
        """
    def renew(self) -> bool:
        """Switch to a new store if the old one is gone; returns True if there is a new one. The new
        store has no chunks of the old one.

        The arena changes only here, so that no plan has frames of two arenas.
        """
    @property
    def num_in_flight(self) -> int:
        """Reservations that some rank has not reported."""
    def lookup(self, chain: KeyChain) -> tuple[int, int]:
        """Return the leading units that every full-attention group has, in host memory and in any
        tier. No side effect.

        No hit is deeper. Without such a group, these are all units with keys.
        """
    def deepest_hit(self, chain: KeyChain, host_units: int, stored_units: int) -> tuple[int, int]:
        """Return the deepest hits of at most the number of units that `lookup` found, in host
        memory and in any tier: boundaries at which every group has the chunks that it needs. No
        side effect.
        """
    def acquire(self, chain: KeyChain, num_units: int = ...) -> ReadLease:
        """Pin the chunks that a prefix of ``num_units`` needs, and start reading chunks from disk
        into host memory.
        """
    def reserve(
        self, rows: Sequence[tuple[KeyChain, Sequence[int], int, int, int, Sequence[Sequence[int]]]]
    ) -> tuple[list[ChunkBatch | None], list[int]]:
        """Reserve frames for rows of (chain, token_ids, num_tokens, start, stop, tables): the
        chunks of units [start, stop) in every group but Mamba ones; all or nothing. Returns each
        row's chunks (None if there are none) and the number of units without a frame.

        Each chain is first extended to ``token_ids[:num_tokens]``. Chunks that are stored or being
        saved are skipped, and chunks with a null block. A full-attention group stops at the first
        chunk without a frame or a parent. The reservations are in flight until they are settled or
        aborted. Raises ConfigError if a chain has fewer units than its row.
        """
    def reserve_states(
        self, rows: Sequence[tuple[KeyChain, int, int, int]]
    ) -> list[ChunkBatch | None]:
        """Reserve a frame for each (chain, group, unit, block): the group's state at the end of the
        unit, which the block will hold. All or nothing on an error. None means no chunk.

        If the prefix was reused, it and the state are kept longer.
        """
    def settle(
        self, saved: Sequence[int], failed: Sequence[int] = ..., misfits: Sequence[int] = ...
    ) -> tuple[int, int]:
        """Process one rank's report. With the last rank's report, a chunk becomes visible if it
        failed on no rank and its parent is visible; otherwise its frame is released. Returns
        (chunks that became visible, chunks that some rank failed).

        ``misfits``: tickets in ``failed`` whose chunk did not fit a frame for compressed chunks.
        They get a larger frame the next time.
        """
    def abort(self, tickets: Sequence[int] | None = None) -> None:
        """Release reserved frames that no rank will report; None for all."""
    def being_read(self, blocks: Sequence[int] | None = None) -> list[BlockId]:
        """Return the ``blocks`` that a save in flight may still read; None for every such block."""
    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove chunks that failed verification, and their descendants, from every tier. Lookups
        no longer find pinned chunks; their frames are freed with the last pin. Returns the number
        of removed chunks.
        """
    def clear(self) -> None:
        """Remove all chunks and saves in flight from every tier; pinned or reserved frames are
        freed when their owner ends.
        """
    def stats(self) -> dict[str, int]:
        """Counters and gauges; see rust/core/src/store/stats.rs for the names."""
    def limit_memory(self, limit_bytes: int) -> None:
        """From now on, saves use only frames in the first ``limit_bytes`` of the arena: workers
        cannot copy to the others yet.
        """
    def take_events(self) -> list[tuple[str, bool]]:
        """Return new log lines, each with whether it reports a problem."""
    def watch(self, capacity: int) -> None:
        """Record added and removed chunks from now on, at most ``capacity`` keys, for one caller of
        `changes`.
        """
    def changes(self, asked: Sequence[bytes], limit: int) -> tuple[list[tuple[bytes, int]], bool]:
        """Return ([(key, tiers)], lost): the chunks in ``asked``, then up to ``limit`` changed
        chunks, oldest first.

        Tiers: 1 host + 2 disk + 4 being filled in host memory; a failed save or read is reported,
        too, unless the chunk is on disk. ``lost``: keys were dropped, so any chunk that is not in
        the rows may have changed. Without an answer of the server there are no rows. After a
        second, or if the server is gone, all chunks count as removed, and ``lost`` is set then and
        with the next answer.
        """
    def flush(self, timeout_s: float) -> bool:
        """Wait until every visible chunk in host memory is on disk or dropped; False at the
        deadline.
        """
    def close(self, timeout_s: float = 30.0) -> None: ...

@final
class Server:
    """A store that engines of this user share; it listens at ``socket`` and accepts no other user.

    Memory is allocated for the first engine. The disk directory is opened at once, or later if it
    is unavailable: see ``disk_trouble``. Each namespace has its own chunks, slabs and folder on
    disk. Namespaces with engines share the memory equally, except for ``shares``: percent by prefix
    of the namespace's name in hex. ``numa``: the NUMA node of each shard of a chunk, or one node
    for all. ``settings``: text for operators, returned by `server_status`. Raises BusyError if
    another server has the socket, and ConfigError if its directory is not private, the shares are
    wrong or ``disk_path`` can never be used.
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
        """Return why the server cannot use its disk directory now, such as another owner; None if
        it can, or has none.
        """
    def take_events(self) -> list[str]:
        """Return new log lines."""
    def close(self, timeout_s: float = 30.0) -> None:
        """Close every connection, write remaining chunks to disk until the timeout, and release the
        disk directory.
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

def server_clear(socket: str, *, namespace: str = "", timeout_s: float = 30.0) -> int:
    """Clear a namespace of the server at ``socket`` in every tier, for all its engines; returns the
    number of chunks.

    ``namespace`` is a prefix of its name in hex; it can be empty if there is only one. The
    namespace can be open or on disk only. Raises as `server_status`, and ConfigError, with the
    existing names, if not exactly one matches or the disk does not answer.
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

    Applies to the namespaces whose names in hex begin with ``namespace``; with a salt, also to
    those on disk without an engine. Returns the number of namespaces, the removed chunks,
    host_bytes and disk_bytes, the chunks in_use, and whether the removal is complete: if not, some
    chunks may still be found, also after a restart. The salt itself does not reach the server.
    Raises as `server_status`, and ConfigError if no namespace matches.
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
        """Check up to max_chunks more; returns the damage found ({namespace, slot, frame_bytes, key
        in hex, problem, is_other_format}; slot, frame_bytes and key are None if the damage concerns
        none). Slots of each size are numbered separately. A namespace of another format is not
        damaged: it was not checked.

        The first call also returns what opening found (superblocks, records), so call it at least
        once.
        """
    @property
    def num_checked(self) -> int: ...
