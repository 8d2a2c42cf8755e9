"""Types of the Rust extension. Errors are those of `kvloft.errors`; sizes are bytes."""

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
    """Return (key, value[0]) of those whose value is neither None nor empty, in order."""

@final
class KeyChain:
    """Keys of a request's prefix, one per block, as tokens are appended.

    With a ``lookahead`` of n, a key also covers the n positions after its block.
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
        """Declare a multimodal item before its positions are appended. Idempotent."""
    def append_tokens(
        self, token_ids: Sequence[int], start: int = 0, stop: int | None = None, /
    ) -> None:
        """Append ``token_ids[start:stop]``; a list is read in place."""
    def append_embeds(self, rows: Any, *, dtype: str, width: int) -> None:
        """Append rows: a C-contiguous buffer of n x width elements of ``dtype``."""
    def key(self, block: int, group: int | None = None) -> bytes:
        """Return a block's key, or that of KV cache group number ``group``'s chunk."""

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
        """Tag the payload of ``part``, write its trailer, and return the tag.

        ``part``: offset, part_bytes, key, layout, page_bytes, num_blocks, rank. The payload is the
        pages of each block, back to back.
        """
    def check(self, part: dict[str, Any]) -> str | None:
        """Return None, or 'unsealed', 'key', 'layout', 'shape' or 'tag'. ``part`` as in `seal`."""

def prefer_numa_node(address: int, num_bytes: int, node: int) -> bool:
    """Place pages that are not in memory yet on a NUMA node. Returns False if it cannot."""

@final
class ChunkBatch:
    """Immutable columns of chunks, compared by value; see ``kvloft.seam.batch``.

    Reading columns is faster than iterating over thousands of chunks.
    """

    def __new__(
        cls, parts: Sequence[tuple[int, bytes, bytes, bytes]], tickets: bytes
    ) -> ChunkBatch:
        """Out of `columns`. Raises ConfigError where they do not fit together."""
    @staticmethod
    def concat(batches: Sequence[Any]) -> ChunkBatch:
        """Return all chunks as those of one group. Blocks per chunk must be equal."""
    def by_group(self) -> list[tuple[int, ChunkBatch]]:
        """A batch for each KV cache group."""
    def by_size(self) -> list[tuple[int, int, ChunkBatch]]:
        """A batch for each KV cache group and size class of frames."""
    def columns(self) -> tuple[list[tuple[int, bytes, bytes, bytes]], bytes]:
        """Return (group, frames (u32), keys, blocks (i32)) of each group, and tickets (u64).

        Groups have equal numbers of blocks per chunk; -1 stands for a block that is not copied.
        """
    def tickets(self) -> list[Ticket]: ...
    def block_ids(self) -> list[BlockId]:
        """Blocks that are copied, of all chunks."""
    def by_frame(self) -> ChunkBatch:
        """Return the chunks in the order of frames, so that neighbors are one copy."""
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
    """Pins the host part of a prefix; disk chunks after it are being read."""

    def poll(self) -> tuple[int, int]:
        """Return (units ready to load, units being read). Never blocks on I/O.

        (0, 0) if a chunk of a hit that is whole or nothing will not come.
        """
    def batch(
        self, tables: Sequence[Sequence[int]], begin: int, end: int
    ) -> tuple[ChunkBatch, dict[str, int]]:
        """Pair the chunks of units [begin, end) with blocks of ``tables``, one per KV cache group.

        Returns the chunks, and units by their tier when leased ('host' or 'disk'): all or nothing,
        except with one full-attention group.
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
        """``frame_bytes``: the frame size, or one per size class, or pairs with the bytes that a
        chunk of the class takes uncompressed. ``limits``: see `kvloft.limits`.

        ``groups``: (number in keys, kind, block tokens, blocks per unit, kept blocks, reach, size
        class, size class of compressed chunks) of each KV cache group; see `kvloft.seam.shape`.
        None: one group of full attention.
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
        """Use the store of the server at ``socket``. A call after ``timeout_s`` is a miss.

        Without a server everything is a miss, and it reconnects in the background. Raises
        ConfigError for a socket of another user's process.
        """
    @property
    def arena_path(self) -> str:
        """Return a path that other processes of this user may open; empty without a store."""
    @property
    def arena_id(self) -> int:
        """As `Arena.id`; 0 while there is no store."""
    @property
    def lifeline(self) -> tuple[str, int] | None:
        """Return path and inode of the pipe that workers hold open; None without a server.

        Open it before mapping the arena: the server reuses frames once every process has closed it.
        """
    @property
    def frame_sizes(self) -> list[int]:
        """Bytes of frames, by size class."""
    @property
    def arena_sizes(self) -> tuple[int, int]:
        """Bytes of the arena and of its slabs; 0 while there is no store."""
    @property
    def is_save_late(self) -> bool:
        """Return True if the last reservation timed out, so it can be retried at once."""
    def renew(self) -> bool:
        """Use the store that replaced one that is gone, and return True if there is one.

        It is empty. Only here does the arena change, so that no plan has frames of two.
        """
    @property
    def num_in_flight(self) -> int:
        """Reservations that some rank has not reported."""
    def lookup(self, chain: KeyChain) -> tuple[int, int]:
        """Return the leading units of every full-attention group: in host memory, in any tier."""
    def deepest_hit(self, chain: KeyChain, host_units: int, stored_units: int) -> tuple[int, int]:
        """Return the deepest hits of at most that many units: in host memory, in any tier."""
    def acquire(self, chain: KeyChain, num_units: int = ...) -> ReadLease:
        """Pin the chunks that a prefix of ``num_units`` needs, and start to read those on disk."""
    def reserve(
        self, rows: Sequence[tuple[KeyChain, Sequence[int], int, int, int, Sequence[Sequence[int]]]]
    ) -> tuple[list[ChunkBatch | None], list[int]]:
        """Reserve frames for (chain, token_ids, num_tokens, start, stop, tables) rows.

        These are the chunks of units [start, stop) in every group but states. Returns chunks (None:
        none) and the number of units without a frame, of each row. All or nothing on an error.

        First extends each chain by ``token_ids[:num_tokens]``. Skips chunks that are stored, being
        saved, or have a null block. Full-attention groups stop at the first chunk without a frame
        or a parent. Reservations are in flight until they are settled or aborted.
        """
    def reserve_states(
        self, rows: Sequence[tuple[KeyChain, int, int, int]]
    ) -> list[ChunkBatch | None]:
        """Reserve a frame for the state of each (chain, group, unit, block); None: no chunk.

        All or nothing on an error. If the prefix continues, it and the state are kept longer.
        """
    def settle(
        self, saved: Sequence[int], failed: Sequence[int] = ..., misfits: Sequence[int] = ...
    ) -> tuple[int, int]:
        """Settle tickets of one rank. Returns (chunks that became visible, chunks that failed).

        A chunk becomes visible with the last rank's report, if none failed. ``misfits``: those of
        ``failed`` that did not fit a frame for compressed chunks; they get a larger frame next
        time.
        """
    def abort(self, tickets: Sequence[int] | None = None) -> None:
        """Release reserved frames that no rank will report; None for all."""
    def being_read(self, blocks: Sequence[int] | None = None) -> list[BlockId]:
        """Return the ``blocks`` that a save in flight may still read; None for every such block."""
    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove damaged chunks and their descendants from every tier; returns their number."""
    def clear(self) -> None:
        """Remove all chunks, also saves in flight. Pinned and reserved frames are freed later."""
    def stats(self) -> dict[str, int]:
        """Counters and gauges; see rust/core/src/store/stats.rs for the names."""
    def limit_memory(self, limit_bytes: int) -> None:
        """Save only to the first ``limit_bytes`` of the arena, which workers can copy to."""
    def take_events(self) -> list[tuple[str, bool]]:
        """Return new log lines, each with whether it reports a problem."""
    def watch(self, capacity: int) -> None:
        """Record changes of at most ``capacity`` keys, for one caller of `changes`."""
    def changes(self, asked: Sequence[bytes], limit: int) -> tuple[list[tuple[bytes, int]], bool]:
        """Return ([(key, where)], lost): chunks ``asked``, and up to ``limit`` changed ones.

        Where: 1 in host memory + 2 on disk + 4 being read. A save or read without a result is
        reported, too, unless the chunk is on disk. ``lost``: other keys may have changed. After a
        second without an answer of the server, nothing is anywhere, and ``lost`` is True once:
        then, and with its next answer.
        """
    def flush(self, timeout_s: float) -> bool:
        """Write all visible chunks to disk; returns False at the timeout."""
    def close(self, timeout_s: float = 30.0) -> None: ...

@final
class Server:
    """A store that engines of this user share, at ``socket`` from its construction on.

    Memory is allocated for the first engine. The disk directory is opened at once, or once it is
    available (`disk_trouble`). Namespaces with engines share memory equally, except for ``shares``:
    percent by the beginning of a namespace's name in hex. ``numa``: node of each shard, or one for
    all. Raises BusyError if another server has the socket, and ConfigError if its directory is not
    private, or shares or ``disk_path`` can never be used.
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
        """Return why the disk directory is not in use for now; None if it is."""
    def take_events(self) -> list[str]:
        """Return new log lines."""
    def close(self, timeout_s: float = 30.0) -> None:
        """Close every connection, and write remaining chunks to disk until the timeout."""

def available_bytes() -> int | None:
    """Return the bytes of memory that this machine or container has left; None if unknown."""

def server_status(socket: str, *, timeout_s: float = 5.0) -> dict[str, Any]:
    """Return the server's state: host_bytes, slab_bytes, stats, settings, namespaces, refusals
    (namespace, count and reason of rejected engines) and disk_trouble (None if the disk is in use).

    Of each namespace: namespace (32 bytes), description, frame_sizes, slabs, stats, tenants (tag or
    None, host_bytes, disk_bytes, max_host_bytes, max_disk_bytes, ttl_s; largest first) and engines
    (pid, connected_ms, reservations, leases). Raises LateError without an answer in time,
    StoreError without a server, DeniedError without access to its socket, and ConfigError if the
    server rejects the request.
    """

def server_clear(socket: str, *, namespace: str = "", timeout_s: float = 30.0) -> int:
    """Remove a namespace from every tier, for all engines; returns the number of chunks.

    Its name in hex begins with ``namespace``, which may be empty if there is only one. Raises as
    `server_status`, and ConfigError, with all names, unless exactly one matches.
    """

def server_evict(
    socket: str,
    *,
    namespace: str = "",
    salt: str | None = None,
    host_only: bool = False,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Evict the chunks of a cache salt, or all, from every tier or from host memory only.

    In namespaces whose names in hex begin with ``namespace``; with a salt, also in those without an
    engine. Returns namespaces, chunks, host_bytes, disk_bytes, in_use and complete (False: chunks
    may remain). The salt is hashed here. Raises as `server_status`, and ConfigError without a
    namespace.
    """

def disk_inspect(path: str) -> list[dict[str, Any]]:
    """Return a dict for each namespace directory, most recently used first. Takes no lock.

    It has namespace (16 hex digits), description, chunks, slots, frame_sizes, bytes, oldest and
    newest (Unix seconds or None) and problem (or None). ConfigError if it is no disk directory.
    """

@final
class DiskVerify:
    """Checks key and checksum of every chunk of a disk directory, step by step.

    Raises BusyError while an engine owns it, and ConfigError if it is no disk directory.
    """

    def __new__(cls, path: str) -> DiskVerify: ...
    @property
    def num_chunks(self) -> int: ...
    def step(self, max_chunks: int) -> list[dict[str, Any]]:
        """Check up to max_chunks more; returns damage found. Call it at least once.

        Damage: namespace, slot (among those of its size), frame_bytes, key (hex), problem and
        is_other_format; None where a whole file is damaged. Other formats are not checked.
        """
    @property
    def num_checked(self) -> int: ...
