"""Types of the Rust extension, which raises the errors in `kvloft.errors`. Sizes are in bytes."""

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
    """Return the 32-byte digest of (name, value) pairs in any order. Names must be unique."""

def root_key(namespace: bytes, adapter: tuple[str, str] | None, cache_salt: str | None) -> bytes:
    """Return the 32-byte key of the empty prefix. ``adapter``: a LoRA's (name, path or id)."""

def first_of_each(keys: list[Any], values: list[Any]) -> list[tuple[Any, Any]]:
    """Return (key, value[0]) for each value that is neither None nor empty, in order."""

@final
class KeyChain:
    """The keys of a request's prefix, one per block; extended as tokens are appended.

    With a ``lookahead`` of n, a key also covers the n positions after its block.
    """

    def __new__(cls, root: bytes, *, block_tokens: int, lookahead: int = 0) -> KeyChain: ...
    @property
    def num_tokens(self) -> int:
        """Number of positions appended so far."""
    @property
    def num_blocks(self) -> int:
        """Number of blocks that have a key: all positions that the key covers were appended."""
    def add_item(self, identifier: str, start: int, num_tokens: int) -> None:
        """Declare a multimodal item before its positions are appended. Idempotent."""
    def append_tokens(
        self, token_ids: Sequence[int], start: int = 0, stop: int | None = None, /
    ) -> None:
        """Append ``token_ids[start:stop]``; a list is read in place."""
    def append_embeds(self, rows: Any, *, dtype: str, width: int) -> None:
        """Append ``rows``, a C-contiguous buffer of n x ``width`` elements of ``dtype``."""
    def key(self, block: int, group: int | None = None) -> bytes:
        """Return a block's key, or the key of its chunk in KV cache group ``group``."""

@final
class Arena:
    """Frames in shared memory, mapped by a worker that can run in a separate process."""

    @staticmethod
    def open(path: str, *, size_bytes: int) -> Arena: ...
    @staticmethod
    def private(size_bytes: int) -> Arena:
        """Map memory that is not shared with other processes."""
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def id(self) -> int:
        """Identifier of the memory. Unlike a path, it is not reused while the memory exists."""
    def seal(self, part: dict[str, Any]) -> int:
        """Tag the payload of ``part``, write its trailer, and return the tag.

        ``part``: offset, part_bytes, key, layout, page_bytes, num_blocks, rank. The payload
        consists of the pages of each block, back to back.
        """
    def check(self, part: dict[str, Any]) -> str | None:
        """Return None if ``part`` is intact, or 'unsealed', 'key', 'layout', 'shape' or 'tag'."""

def prefer_numa_node(address: int, num_bytes: int, node: int) -> bool:
    """Place pages that are not in memory yet on a NUMA node. Return False if that fails."""

@final
class ChunkBatch:
    """Immutable columns of chunks, compared by value; see ``kvloft.seam.batch``.

    Reading columns is faster than iterating over thousands of chunks.
    """

    def __new__(
        cls, parts: Sequence[tuple[int, bytes, bytes, bytes]], tickets: bytes
    ) -> ChunkBatch:
        """Create a batch from `columns`. Raises ConfigError if they are inconsistent."""
    @staticmethod
    def concat(batches: Sequence[Any]) -> ChunkBatch:
        """Return all chunks in the first batch's group. Blocks per chunk must be equal."""
    def by_group(self) -> list[tuple[int, ChunkBatch]]:
        """Return one (group, batch) per KV cache group."""
    def by_size(self) -> list[tuple[int, int, ChunkBatch]]:
        """Return one (group, size class, batch) per KV cache group and size class of frames."""
    def columns(self) -> tuple[list[tuple[int, bytes, bytes, bytes]], bytes]:
        """Return (group, frames (u32), keys, blocks (i32)) for each group, and tickets (u64).

        A group's chunks have the same number of blocks; -1 is a block that is not copied.
        """
    def tickets(self) -> list[Ticket]: ...
    def block_ids(self) -> list[BlockId]:
        """Return all blocks that are copied."""
    def by_frame(self) -> ChunkBatch:
        """Sort each group's chunks by frame, so that adjacent frames are copied together."""
    def check(self, *, num_frames: int, num_blocks: int, blocks_per_chunk: int) -> None:
        """Raise ConfigError if a copy would exceed the arena, its frame or the paged KV."""
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[ChunkCopy]: ...
    @overload
    def __getitem__(self, index: int, /) -> ChunkCopy: ...
    @overload
    def __getitem__(self, index: slice, /) -> ChunkBatch: ...

@final
class ReadLease:
    """Pins chunks in host memory while the chunks after them are read from disk."""

    def poll(self) -> tuple[int, int]:
        """Return (units ready to load, units being read). Never blocks on I/O.

        Returns (0, 0) if a chunk of an all-or-nothing hit is unavailable.
        """
    def batch(
        self, tables: Sequence[Sequence[int]], begin: int, end: int
    ) -> tuple[ChunkBatch, dict[str, int]]:
        """Pair the chunks of units [begin, end) with blocks of ``tables``, one per KV cache group.

        Returns the chunks, and the number of units by tier at the lease ('host' or 'disk'). All or
        nothing, except with one full-attention group.
        """
    def release(self) -> None: ...

@final
class Session:
    """A store (host arena, disk tier, index), with one engine's loads and saves in flight."""

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
        """``frame_bytes``: a frame size, a size per size class, or pairs of a frame size and the
        uncompressed size of its chunks. ``limits``: see `kvloft.limits`.

        ``groups``: (number in keys, kind, block tokens, blocks per unit, kept blocks, reach, size
        class, size class of compressed chunks) of each KV cache group; see `kvloft.seam.shape`.
        None: one full-attention group.
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
        """Use the store of the server at ``socket``. A call that exceeds ``timeout_s`` is a miss.

        Without a server, every lookup is a miss, and the session reconnects in the background.
        Raises ConfigError if the server belongs to another user.
        """
    @property
    def arena_path(self) -> str:
        """Path that other processes of this user can open; empty without a store."""
    @property
    def arena_id(self) -> int:
        """The `Arena.id` of the arena; 0 without a store."""
    @property
    def lifeline(self) -> tuple[str, int] | None:
        """Path and inode of the pipe that workers keep open; None without a server.

        Open it before mapping the arena: the server reuses frames once every process has closed it.
        """
    @property
    def frame_sizes(self) -> list[int]:
        """Frame sizes by size class."""
    @property
    def arena_sizes(self) -> tuple[int, int]:
        """Sizes of the arena and of a slab; 0 without a store."""
    @property
    def is_save_late(self) -> bool:
        """True if the last reservation timed out, so that it can be retried immediately."""
    def renew(self) -> bool:
        """Switch to a new store if the old store is gone. Return True if the session switched.

        The new store has none of the old chunks. The arena only changes in this call, so that no
        plan names frames of two arenas.
        """
    @property
    def num_in_flight(self) -> int:
        """Number of reservations that at least one rank has not reported."""
    def lookup(self, chain: KeyChain) -> tuple[int, int]:
        """Count the leading units in every full-attention group: in host memory, in any tier."""
    def deepest_hit(self, chain: KeyChain, host_units: int, stored_units: int) -> tuple[int, int]:
        """Return the deepest hits within these limits, in units: in host memory, in any tier."""
    def acquire(self, chain: KeyChain, num_units: int = ...) -> ReadLease:
        """Pin the chunks that a prefix of ``num_units`` needs; start reading the others."""
    def reserve(
        self, rows: Sequence[tuple[KeyChain, Sequence[int], int, int, int, Sequence[Sequence[int]]]]
    ) -> tuple[list[ChunkBatch | None], list[int]]:
        """Reserve frames for (chain, token_ids, num_tokens, start, stop, tables) rows.

        Covers units [start, stop) in every group without states. Returns, for each row, the chunks
        or None, and the number of units without a frame. On error, no frame is reserved.

        First extends each chain by ``token_ids[:num_tokens]``. Skips chunks that are stored, are
        being saved, or have a null block. Full-attention groups stop at the first chunk without a
        frame or a parent. Reservations are in flight until they are settled or aborted.
        """
    def reserve_states(
        self, rows: Sequence[tuple[KeyChain, int, int, int]]
    ) -> list[ChunkBatch | None]:
        """Reserve a frame for the state of each (chain, group, unit, block), or return None.

        On error, no frame is reserved. If the prefix continues, it and the state are kept longer.
        """
    def settle(
        self, saved: Sequence[int], failed: Sequence[int] = ..., misfits: Sequence[int] = ...
    ) -> tuple[int, int]:
        """Settle tickets of one rank. Return (number of chunks now visible, number that failed).

        A chunk becomes visible with the last rank's report if no rank failed. ``misfits``: tickets
        in ``failed`` whose chunks did not fit a frame for compressed chunks. The next reservation
        of such a chunk gets a larger frame.
        """
    def abort(self, tickets: Sequence[int] | None = None) -> None:
        """Release reserved frames that no rank will report; None for all."""
    def being_read(self, blocks: Sequence[int] | None = None) -> list[BlockId]:
        """Return the ``blocks`` that a save in flight may still read; None for all blocks."""
    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove damaged chunks and their descendants from every tier. Return their number."""
    def clear(self) -> None:
        """Remove all chunks and pending saves. Pinned and reserved frames are freed later."""
    def stats(self) -> dict[str, int]:
        """Return counters and gauges; rust/core/src/store/stats.rs defines the names."""
    def limit_memory(self, limit_bytes: int) -> None:
        """Save only to the first ``limit_bytes`` of the arena, which workers can copy to."""
    def take_events(self) -> list[tuple[str, bool]]:
        """Return (line, is_problem) for each new log line."""
    def watch(self, capacity: int) -> None:
        """Record changes of at most ``capacity`` keys, for one caller of `changes`."""
    def changes(self, asked: Sequence[bytes], limit: int) -> tuple[list[tuple[bytes, int]], bool]:
        """Return ([(key, where)], lost) for ``asked`` and up to ``limit`` changed chunks.

        ``where`` is a sum of 1 (host memory), 2 (disk) and 4 (being read). A save or read without a
        result is also reported, unless the chunk is on disk. ``lost``: earlier reports may be
        outdated. After one second without a response from the server, all of ``asked`` are
        reported as removed. That report and the next response set ``lost``.
        """
    def flush(self, timeout_s: float) -> bool:
        """Write all visible chunks to disk. Return False at the timeout."""
    def close(self, timeout_s: float = 30.0) -> None: ...

@final
class Server:
    """A store that engines of this user share. Listens at ``socket`` until it is closed.

    Memory is allocated for the first engine. The disk directory is opened immediately, or as soon
    as it is available (`disk_trouble`). Namespaces with engines share memory equally, except for
    ``shares``: percent by first hex digits of a namespace. ``numa``: a node per shard, or one node.
    Raises BusyError if another server has the socket, and ConfigError if its directory is not
    private, or shares or ``disk_path`` can never work.
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
        """Return the server's state; see `server_status`."""
    def disk_trouble(self) -> str | None:
        """Return why the server cannot use its disk directory; None if it can or has none."""
    def take_events(self) -> list[str]:
        """Return new log lines."""
    def close(self, timeout_s: float = 30.0) -> None:
        """Close every connection, and write remaining chunks to disk until the timeout."""

def available_bytes() -> int | None:
    """Return the bytes of memory that this machine or container has left; None if unknown."""

def server_status(socket: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return the server's state: host_bytes, slab_bytes, stats, settings, namespaces, refusals
    (namespace, count and reason of rejected engines) and disk_trouble (None if the disk is in use).

    Each namespace has namespace (32 bytes), description, frame_sizes, slabs, stats, tenants (tag or
    None, host_bytes, disk_bytes, max_host_bytes, max_disk_bytes, ttl_s; largest first) and engines
    (pid, connected_ms, reservations, leases). Raises LateError at the timeout, StoreError without a
    server, DeniedError without access to its socket, and ConfigError if the server rejects the
    request.
    """

def server_clear(socket: str, *, namespace: str = "", timeout_s: float = 30.0) -> int:
    """Remove every chunk of a namespace from every tier, and return the number of chunks.

    ``namespace``: its first hex digits; may be empty if the server has only one namespace. Raises
    like `server_status`, and ConfigError, with all names, unless exactly one namespace matches.
    """

def server_evict(
    socket: str,
    *,
    namespace: str = "",
    salt: str | None = None,
    host_only: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Evict the chunks of a cache salt, or all chunks, from every tier or only from host memory.

    ``namespace``: first hex digits of the namespaces to search; with a salt, this includes closed
    namespaces. Returns namespaces, chunks, host_bytes, disk_bytes, in_use and complete (False:
    chunks may remain). The salt is hashed in this process. Raises like `server_status`, and
    ConfigError if no namespace matches.
    """

def disk_inspect(path: str) -> list[dict[str, Any]]:
    """Return a dict for each namespace directory, most recently used first. Takes no lock.

    Keys: namespace (16 hex digits), description, chunks, slots, frame_sizes, bytes, oldest and
    newest (Unix seconds), problem. Raises ConfigError if ``path`` is not a disk directory.
    """

@final
class DiskVerify:
    """Checks the key and checksum of every chunk in a disk directory, in steps.

    Raises BusyError while an engine uses it, and ConfigError if it is not a disk directory.
    """

    def __new__(cls, path: str) -> DiskVerify: ...
    @property
    def num_chunks(self) -> int: ...
    def step(self, max_chunks: int) -> list[dict[str, Any]]:
        """Check up to ``max_chunks`` more chunks and return the damage. Call it at least once.

        Keys: namespace, slot (among slots of its size), frame_bytes, key (hex), problem and
        is_other_format. Values are None if a whole file is damaged. Other formats are not checked.
        """
    @property
    def num_checked(self) -> int: ...
