"""Types of the Rust extension. Failed calls raise exceptions from `kvloft.errors`. Sizes are in
bytes.
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
    """Return an order-independent 32-byte digest of (name, value) pairs. Names must be unique."""

def root_key(namespace: bytes, adapter: tuple[str, str] | None, cache_salt: str | None) -> bytes:
    """Return the 32-byte key of the empty prefix. ``adapter`` is the (name, path or id) of a LoRA
    adapter.
    """

def first_of_each(keys: list[Any], values: list[Any]) -> list[tuple[Any, Any]]:
    """Return (key, value[0]) for each value that is neither None nor empty, in order."""

@final
class KeyChain:
    """The keys of a request's prefix, one per block. Appending tokens extends the chain.

    With a ``lookahead`` of n, a key also covers the n positions after its block.
    """

    def __new__(cls, root: bytes, *, block_tokens: int, lookahead: int = 0) -> KeyChain: ...
    @property
    def num_tokens(self) -> int:
        """Number of positions appended so far."""
    @property
    def num_blocks(self) -> int:
        """Number of blocks that have a key. A key exists once all of its positions are appended."""
    def add_item(self, identifier: str, start: int, num_tokens: int) -> None:
        """Declare a multimodal item before its positions are appended. Idempotent."""
    def append_tokens(
        self, token_ids: Sequence[int], start: int = 0, stop: int | None = None, /
    ) -> None:
        """Append ``token_ids[start:stop]``. A list is read in place, without copying it."""
    def append_embeds(self, rows: Any, *, dtype: str, width: int) -> None:
        """Append ``rows``, a C-contiguous buffer of n x ``width`` elements of type ``dtype``."""
    def key(self, block: int, group: int | None = None) -> bytes:
        """Return a block's key or, with ``group``, the key of its chunk in that KV cache group."""

@final
class Arena:
    """Frames in shared memory, mapped into a worker, which can run in a separate process."""

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
        """Identifier of the memory. Unlike a path, the identifier is not reused while the memory
        exists.
        """
    def seal(self, part: dict[str, Any]) -> int:
        """Compute the tag of ``part``, write the trailer, and return the tag.

        ``part`` has the keys offset, part_bytes, key, layout, page_bytes, num_blocks and rank. The
        payload consists of the contiguous pages of each block.
        """
    def check(self, part: dict[str, Any]) -> str | None:
        """Return the problem ('unsealed', 'key', 'layout', 'shape' or 'tag'), or None if the part
        is intact.
        """

def prefer_numa_node(address: int, num_bytes: int, node: int) -> bool:
    """Place unallocated pages on NUMA node ``node``. Return False if they already have a NUMA
    policy or the kernel rejects the placement.
    """

@final
class ChunkBatch:
    """An immutable batch of chunks, stored in columns and compared by value.

    Reading columns is faster than iterating over thousands of chunks (see ``kvloft.seam.batch``).
    """

    def __new__(
        cls, parts: Sequence[tuple[int, bytes, bytes, bytes]], tickets: bytes
    ) -> ChunkBatch:
        """Create a batch from the result of `columns`. Raises ConfigError for invalid columns."""
    @staticmethod
    def concat(batches: Sequence[Any]) -> ChunkBatch:
        """Return a single batch with all chunks, assigned to the first batch's group. All chunks
        must have the same number of blocks.
        """
    def by_group(self) -> list[tuple[int, ChunkBatch]]:
        """Return a (group, batch) pair for each KV cache group."""
    def by_size(self) -> list[tuple[int, int, ChunkBatch]]:
        """Return (group, size class, batch) for each KV cache group and frame size class."""
    def columns(self) -> tuple[list[tuple[int, bytes, bytes, bytes]], bytes]:
        """Return (group, frames (u32), keys, blocks (i32)) for each group, and the tickets (u64).

        All chunks in a group have the same number of blocks. Blocks with id -1 are not copied.
        """
    def tickets(self) -> list[Ticket]: ...
    def block_ids(self) -> list[BlockId]:
        """Return the ids of all blocks that the batch copies."""
    def by_frame(self) -> ChunkBatch:
        """Return the batch with each group sorted by frame, so that adjacent frames are copied
        together.
        """
    def check(self, *, num_frames: int, num_blocks: int, blocks_per_chunk: int) -> None:
        """Raise ConfigError if a copy would exceed the arena, its frame or the paged KV cache."""
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[ChunkCopy]: ...
    @overload
    def __getitem__(self, index: int, /) -> ChunkCopy: ...
    @overload
    def __getitem__(self, index: slice, /) -> ChunkBatch: ...

@final
class ReadLease:
    """Pins chunks in host memory while later chunks are read from disk."""

    def poll(self) -> tuple[int, int]:
        """Return the number of units that are ready to load and the number that are still being
        read. Never blocks on I/O. Returns (0, 0) if a chunk of an all-or-nothing hit is
        unavailable.
        """
    def batch(
        self, tables: Sequence[Sequence[int]], begin: int, end: int
    ) -> tuple[ChunkBatch, dict[str, int]]:
        """Pair the chunks of units [begin, end) with blocks from ``tables`` (one table per KV cache
        group).

        Returns the chunks, and the number of units that each tier ('host' or 'disk') held when the
        lease was acquired. Returns all chunks or none, except with a single full-attention group.
        """
    def release(self) -> None: ...

@final
class Session:
    """A store (host arena, disk tier and index), and an engine's in-flight loads and saves."""

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
        """Open a store in this process. ``frame_bytes`` is a single frame size, or a list with a
        frame size or a (frame size, uncompressed size) pair for each size class. See
        `kvloft.limits` for ``limits``.

        ``groups`` holds (number in keys, kind, block tokens, blocks per unit, kept blocks, reach,
        size class, size class for compressed chunks) for each KV cache group
        (`kvloft.seam.shape`). The default is one full-attention group.
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
        """Connect to the server at ``socket``. A call that exceeds ``timeout_s`` counts as a miss.

        Without a server, every lookup misses and the session reconnects in the background. Raises
        ConfigError if the server belongs to another user.
        """
    @property
    def arena_path(self) -> str:
        """Path where this user's other processes can open the arena, or empty without a store."""
    @property
    def arena_id(self) -> int:
        """The arena's `Arena.id`, or 0 without a store."""
    @property
    def lifeline(self) -> tuple[str, int] | None:
        """Path and inode of the pipe that workers keep open, or None without a server.

        Open the pipe before mapping the arena: the server reuses frames only after all processes
        have closed the pipe.
        """
    @property
    def frame_sizes(self) -> list[int]:
        """Frame size of each size class."""
    @property
    def arena_sizes(self) -> tuple[int, int]:
        """Arena size and slab size, which are both 0 without a store."""
    @property
    def is_save_late(self) -> bool:
        """True if the last reservation timed out, so that it can be retried immediately."""
    def renew(self) -> bool:
        """Switch to a new store if the old store is gone. Return True if the session switched.

        The new store starts without the old chunks in host memory. The arena changes only in this
        call, which is made between plans, so a plan never refers to frames in two arenas.
        """
    @property
    def num_in_flight(self) -> int:
        """Number of reservations that some ranks have not reported yet."""
    def lookup(self, chain: KeyChain) -> tuple[int, int]:
        """Return how many leading units are in host memory and how many are in any tier, counting
        only full-attention groups.
        """
    def deepest_hit(self, chain: KeyChain, host_units: int, stored_units: int) -> tuple[int, int]:
        """Return the lengths, in units, of the deepest hits in host memory and in any tier, up to
        the given limits.
        """
    def acquire(self, chain: KeyChain, num_units: int = ...) -> ReadLease:
        """Pin the chunks that a prefix of ``num_units`` needs and read missing chunks from disk."""
    def reserve(
        self, rows: Sequence[tuple[KeyChain, Sequence[int], int, int, int, Sequence[Sequence[int]]]]
    ) -> tuple[list[ChunkBatch | None], list[int]]:
        """Reserve frames for each row, a (chain, token_ids, num_tokens, start, stop, tables) tuple.

        A row covers units [start, stop) in all groups except state groups. Returns, for each row,
        the chunks or None, and the number of units without a frame. On error, reserves nothing.

        First extends each chain by ``token_ids[:num_tokens]``. Skips chunks that are already
        stored, are being saved, or contain a null block. In full-attention groups, stops at the
        first chunk that gets no frame or has no parent. Reservations are in flight until they are
        settled or aborted.
        """
    def reserve_states(
        self, rows: Sequence[tuple[KeyChain, int, int, int]]
    ) -> list[ChunkBatch | None]:
        """Reserve a frame for the state of each (chain, group, unit, block). Returns None for a
        state that gets no frame.

        On error, reserves nothing. States of prefixes that are likely to be reused are kept longer.
        """
    def settle(
        self, saved: Sequence[int], failed: Sequence[int] = ..., misfits: Sequence[int] = ...
    ) -> tuple[int, int]:
        """Settle one rank's tickets. Return how many chunks became visible and how many failed.

        A chunk becomes visible when the last rank reports it, if no rank failed. ``misfits`` lists
        the ``failed`` tickets with chunks that did not fit a frame for compressed chunks. The next
        reservation for these chunks gets larger frames.
        """
    def abort(self, tickets: Sequence[int] | None = None) -> None:
        """Release the frames of tickets that no rank will report (by default, all tickets)."""
    def being_read(self, blocks: Sequence[int] | None = None) -> list[BlockId]:
        """Return the blocks in ``blocks`` (by default, all blocks) that in-flight saves may still
        read.
        """
    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove damaged chunks and their descendants from all tiers. Return the number of removed
        chunks.
        """
    def clear(self) -> None:
        """Remove all chunks and pending saves. Pinned and reserved frames are freed later."""
    def stats(self) -> dict[str, int]:
        """Return counters and gauges. rust/core/src/store/stats.rs defines their names."""
    def limit_memory(self, limit_bytes: int) -> None:
        """Save only to the first ``limit_bytes`` of the arena, which all workers can access."""
    def take_events(self) -> list[tuple[str, bool]]:
        """Return (line, is_problem) for each new log line."""
    def watch(self, capacity: int) -> None:
        """Start recording changed keys for `changes`, which must have only one caller. Keeps at
        least the last ``capacity`` keys.
        """
    def changes(self, asked: Sequence[bytes], limit: int) -> tuple[list[tuple[bytes, int]], bool]:
        """Return ([(key, where)], lost) for the ``asked`` keys and up to ``limit`` changed chunks.

        ``where`` is a bit mask of 1 (host memory), 2 (disk) and 4 (being saved or read). A failed
        save or read is also reported, unless the chunk is on disk. If ``lost`` is True, earlier
        reports may be outdated. If the server does not respond for one second, all ``asked`` keys
        are reported as removed, and ``lost`` is True in this report and in the next response.
        """
    def flush(self, timeout_s: float) -> bool:
        """Write all visible chunks to disk. Return False on timeout."""
    def close(self, timeout_s: float = 30.0) -> None: ...

@final
class Server:
    """A store shared by this user's engines. The server listens at ``socket`` until it is closed.

    Memory is allocated when the first engine connects. The disk directory is opened immediately or
    as soon as it is available (see `disk_trouble`). Namespaces with engines share memory equally
    unless ``shares`` sets percentages (keyed by the namespace's first hex digits). ``numa`` lists
    one NUMA node per shard, or a single node for all shards. Raises BusyError if another server
    uses the socket, and ConfigError if the socket's directory is not private or ``shares`` or
    ``disk_path`` is invalid.
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
        """Return the server's state (see `server_status`)."""
    def disk_trouble(self) -> str | None:
        """Return why the disk directory is unusable, or None if it is usable or not set."""
    def take_events(self) -> list[str]:
        """Return new log lines."""
    def close(self, timeout_s: float = 30.0) -> None:
        """Close all connections, and write remaining chunks to disk until the timeout."""

def available_bytes() -> int | None:
    """Return this machine's or container's available memory in bytes, or None if it is unknown."""

def server_status(socket: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return the server's state: host_bytes, slab_bytes, stats, settings, namespaces, refusals
    (namespace, number of rejected connections, and reason) and disk_trouble (None if the disk is
    usable).

    Each namespace has namespace (32 bytes), description, frame_sizes, slabs, stats, tenants (tag or
    None, host_bytes, disk_bytes, max_host_bytes, max_disk_bytes, ttl_s; largest first) and engines
    (pid, connected_ms, reservations, leases). Raises LateError after the timeout, StoreError if no
    server is running, DeniedError if the server's socket is not accessible, and ConfigError if the
    server rejects the request.
    """

def server_clear(socket: str, *, namespace: str = "", timeout_s: float = 30.0) -> int:
    """Remove all of a namespace's chunks from all tiers. Return the number of removed chunks.

    ``namespace`` is a prefix of the namespace's hex digits, or empty if the server has only one
    namespace. Raises the same exceptions as `server_status`. Unless exactly one namespace matches,
    raises a ConfigError that lists the namespaces.
    """

def server_evict(
    socket: str,
    *,
    namespace: str = "",
    salt: str | None = None,
    host_only: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Evict one cache salt's chunks, or all chunks, from all tiers or only from host memory.

    ``namespace`` is a prefix of the hex digits of the namespaces to search. With a salt, closed
    namespaces are also searched. Returns namespaces, chunks, host_bytes, disk_bytes, in_use and
    complete (False if chunks may remain). The salt is hashed in this process. Raises the same
    exceptions as `server_status`, and ConfigError if no namespace matches.
    """

def disk_inspect(path: str) -> list[dict[str, Any]]:
    """Return a dict for each namespace directory, most recently used first. Takes no lock.

    The keys are namespace (16 hex digits), description, chunks, slots, frame_sizes, bytes, oldest
    and newest (Unix seconds), and problem. Raises ConfigError if ``path`` is not a disk directory.
    """

@final
class DiskVerify:
    """Checks the key and checksum of every chunk in a disk directory, step by step.

    Raises BusyError if an engine uses the directory, and ConfigError if it is not a disk directory.
    """

    def __new__(cls, path: str) -> DiskVerify: ...
    @property
    def num_chunks(self) -> int: ...
    def step(self, max_chunks: int) -> list[dict[str, Any]]:
        """Check up to ``max_chunks`` more chunks and return a dict for each problem. Call this at
        least once.

        The keys are namespace, slot (numbered among the slots of the same size), frame_bytes, key
        (hex), problem and is_other_format. slot, frame_bytes and key can be None. Namespaces in
        another format are reported but not checked.
        """
    @property
    def num_checked(self) -> int: ...
