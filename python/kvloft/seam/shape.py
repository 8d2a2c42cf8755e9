"""Describes KV cache groups, shards and the arena, with their sizes.

Both sides and the store use these values. `kvloft.vllm.shape` derives the values from vLLM's
configuration at startup.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Self

COMPACT_SHARE: Final = 0.7188
"""Space for compressed pages in a frame for compressed chunks, as a fraction of the uncompressed
size. The KV of all tested models fits (docs/design/compression.md).
"""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group: the layers that share a block table.

    ``kind`` determines which blocks a hit of L tokens needs:

    - "full": all blocks
    - "window": the blocks of the last ``reach`` tokens before L
    - "local": the blocks of the attention chunk of ``reach`` tokens that contains position L
    - "state": the state after L tokens

    Units have the same boundaries in all groups, so a group with shorter blocks has more blocks
    per unit.
    """

    block_tokens: int
    blocks_per_unit: int = 1
    kind: Literal["full", "window", "local", "state"] = "full"
    reach: int = 0
    part_bytes: int = 4096
    """Size of a shard's part in a frame, in bytes."""
    compact_bytes: int = 0
    """Size of a shard's part in a frame for compressed chunks, in bytes, or 0 without compression.
    """

    @property
    def unit_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_unit

    @property
    def kept_blocks(self) -> int:
        """Return the number of blocks in a chunk. A chunk holds the last blocks of its unit.

        Hits do not need the earlier blocks of the unit, and vLLM may have freed them.
        """
        match self.kind:
            case "full" | "local":
                return self.blocks_per_unit
            case "window":
                return min(self.blocks_per_unit, max(1, -(-self.reach // self.block_tokens)))
            case "state":
                return 1


def part_sizes(groups: Sequence[GroupShape]) -> list[int]:
    """Return the part size in bytes for each size class. Equal sizes share a class."""
    every = {group.part_bytes for group in groups} | {group.compact_bytes for group in groups}
    return sorted(every - {0})


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The KV cache groups and shards of a model.

    A shard is ``num_replicas`` consecutive ranks that hold the same bytes (MLA). The first rank of
    a shard writes the shard's part of each frame, and all ranks of the shard read that part.
    ``lookahead`` is the number of tokens after a block that affect the draft model's KV in the
    block. ``encoding`` is the encoding of compressed parts, as defined in `kvloft.transfer.frames`,
    or 0 if all parts are raw. Raises ValueError if ``num_ranks`` is not a multiple of
    ``num_replicas``.
    """

    groups: tuple[GroupShape, ...]
    num_ranks: int = 1
    num_replicas: int = 1
    lookahead: int = 0
    encoding: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_replicas:
            raise ValueError(
                f"num_ranks={self.num_ranks} is not a multiple of num_replicas={self.num_replicas}"
            )

    @property
    def main(self) -> int:
        """Return the index of the first full-attention group, or of the first sliding-window group
        if no group has full attention.
        """
        kinds = [group.kind for group in self.groups]
        return kinds.index("full" if "full" in kinds else "window")

    def number_of(self, group: int) -> int | None:
        """Return the number that is hashed into the group's keys, or None if the group uses prefix
        keys.
        """
        return None if group == self.main and self.groups[group].kind == "full" else group + 1

    @property
    def unit_tokens(self) -> int:
        """Return the number of tokens per unit. A unit consists of whole blocks in every group."""
        return self.groups[0].unit_tokens

    @property
    def is_divisible(self) -> bool:
        """Return True if a hit can end at any unit boundary of a stored prefix. This requires a
        single full-attention group.
        """
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    @property
    def is_dense(self) -> bool:
        """Return True if any group has full attention. Hits then end at the first missing chunk."""
        return any(group.kind == "full" for group in self.groups)

    @property
    def num_shards(self) -> int:
        return self.num_ranks // self.num_replicas

    @property
    def frame_sizes(self) -> tuple[int, ...]:
        """Return the frame size in bytes for each size class."""
        return tuple(size * self.num_shards for size in part_sizes(self.groups))

    @property
    def raw_frame_sizes(self) -> tuple[int, ...]:
        """Return the uncompressed chunk size in bytes for each size class."""
        raw = {group.compact_bytes: group.part_bytes for group in self.groups}
        return tuple(raw.get(size, size) * self.num_shards for size in part_sizes(self.groups))

    def frame_bytes(self, group: int) -> int:
        """Return the frame size in bytes for the group's uncompressed chunks."""
        return self.groups[group].part_bytes * self.num_shards

    def size_classes(self, group: int) -> tuple[int, int | None]:
        """Return the size classes of the group's frames for uncompressed and for compressed chunks.
        The second size class is None if the group's chunks are not compressed.
        """
        sizes, shape = part_sizes(self.groups), self.groups[group]
        compact = sizes.index(shape.compact_bytes) if shape.compact_bytes else None
        return sizes.index(shape.part_bytes), compact

    @property
    def unit_bytes(self) -> int:
        """Return the total size in bytes of a unit's frames in all full-attention groups, or in the
        main group if there is no full-attention group.
        """
        full = [nth for nth, group in enumerate(self.groups) if group.kind == "full"]
        return sum(map(self.frame_bytes, full or [self.main]))

    def shard_of(self, rank: int) -> int:
        """Return a rank's shard. Raises ValueError if the rank does not exist."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"invalid rank {rank}: only {self.num_ranks} ranks share the cache")
        return rank // self.num_replicas

    def is_writer(self, rank: int) -> bool:
        return rank % self.num_replicas == 0


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """The location and layout of the host arena, which workers map."""

    path: str
    size_bytes: int
    slab_bytes: int
    """Size of a slab, which holds frames of one size. The last slab also includes the arena's
    remaining bytes.
    """
    groups: tuple[GroupShape, ...]
    """The scheduler side's KV cache groups, whose sizes take all ranks into account."""
    id: int = 0
    """Identifies the memory, because a path can be reused. The id is 0 if it is unknown."""
    lifeline: tuple[str, int] | None = None
    """Path and inode of the pipe that workers keep open (see `Lifeline`), or None without a server.
    """

    def is_same_memory(self, other: Self | None) -> bool:
        """Return True if ``other`` describes the same memory. The lifelines may differ."""
        return other is not None and replace(other, lifeline=self.lifeline) == self and self.id != 0
