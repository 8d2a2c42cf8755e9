"""The KV cache groups, the shards and the arena, with the sizes that both sides and the store use.

At startup, `kvloft.vllm.shape` builds these values from vLLM's configuration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Self

COMPACT_SHARE: Final = 0.7188
"""Space for compressed pages in a frame for compressed chunks, as a fraction of the uncompressed
size. All KV of real models fits (docs/design/compression.md).
"""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group: layers that share a block table.

    ``kind`` determines the blocks that a hit of L tokens needs:

    - "full": all blocks
    - "window": blocks of the last ``reach`` tokens before L
    - "local": blocks of the attention chunk of ``reach`` tokens that contains position L
    - "state": the state after L tokens

    Chunks of all groups end at the same tokens, so a group with shorter blocks has more blocks per
    chunk.
    """

    block_tokens: int
    blocks_per_unit: int = 1
    kind: Literal["full", "window", "local", "state"] = "full"
    reach: int = 0
    part_bytes: int = 4096
    """Size of a shard's part of a frame, in bytes."""
    compact_bytes: int = 0
    """Size of a shard's part of a frame for compressed chunks; 0 if there are no such frames."""

    @property
    def unit_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_unit

    @property
    def kept_blocks(self) -> int:
        """Return the number of blocks at the end of a unit that its chunk contains.

        No hit needs the blocks before them, and vLLM may have freed them.
        """
        match self.kind:
            case "full" | "local":
                return self.blocks_per_unit
            case "window":
                return min(self.blocks_per_unit, max(1, -(-self.reach // self.block_tokens)))
            case "state":
                return 1


def part_sizes(groups: Sequence[GroupShape]) -> list[int]:
    """Return the size of a part in bytes, by size class. Groups with equal sizes share a class."""
    every = {group.part_bytes for group in groups} | {group.compact_bytes for group in groups}
    return sorted(every - {0})


@dataclass(frozen=True, slots=True)
class CacheShape:
    """KV cache groups and shards.

    ``num_replicas`` neighboring ranks form one shard: they hold the same bytes (MLA, or fewer KV
    heads than ranks). The first rank of a shard writes the shard's part of each frame, and all its
    ranks read it. ``lookahead`` is the number of tokens after a block on which a draft model's KV
    in that block depends. ``encoding`` is the encoding that parts can have, as numbered in
    `kvloft.transfer.frames`; with 0, all parts are raw. Raises ValueError if ``num_ranks`` is not a
    multiple of ``num_replicas``.
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
        """Return the first group with full attention, or the first sliding-window group if there is
        none.
        """
        kinds = [group.kind for group in self.groups]
        return kinds.index("full" if "full" in kinds else "window")

    def number_of(self, group: int) -> int | None:
        """Return the group number used in keys; None for the keys of the prefix itself."""
        return None if group == self.main and self.groups[group].kind == "full" else group + 1

    @property
    def unit_tokens(self) -> int:
        """Return the number of tokens of a unit, which is whole blocks in every group."""
        return self.groups[0].unit_tokens

    @property
    def is_divisible(self) -> bool:
        """Return True if the beginning of a stored prefix is always a hit, which requires a single
        full-attention group.
        """
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    @property
    def is_dense(self) -> bool:
        """Return True if a group needs every block, so that no hit extends past a missing chunk."""
        return any(group.kind == "full" for group in self.groups)

    @property
    def num_shards(self) -> int:
        return self.num_ranks // self.num_replicas

    @property
    def frame_sizes(self) -> tuple[int, ...]:
        """Return the size of a frame in bytes, by size class."""
        return tuple(size * self.num_shards for size in part_sizes(self.groups))

    @property
    def raw_frame_sizes(self) -> tuple[int, ...]:
        """Return the size of an uncompressed chunk in bytes, by size class."""
        raw = {group.compact_bytes: group.part_bytes for group in self.groups}
        return tuple(raw.get(size, size) * self.num_shards for size in part_sizes(self.groups))

    def frame_bytes(self, group: int) -> int:
        """Return the size of a frame for an uncompressed chunk of the group, in bytes."""
        return self.groups[group].part_bytes * self.num_shards

    def size_classes(self, group: int) -> tuple[int, int | None]:
        """Return the size classes of the group's frames for uncompressed and compressed chunks. The
        second is None if the group has no frames for compressed chunks.
        """
        sizes, shape = part_sizes(self.groups), self.groups[group]
        compact = sizes.index(shape.compact_bytes) if shape.compact_bytes else None
        return sizes.index(shape.part_bytes), compact

    @property
    def unit_bytes(self) -> int:
        """Return the total size in bytes of the frames of a unit, in the groups that need every
        unit.
        """
        full = [nth for nth, group in enumerate(self.groups) if group.kind == "full"]
        return sum(map(self.frame_bytes, full or [self.main]))

    def shard_of(self, rank: int) -> int:
        """Return the shard of a rank. Raises ValueError if the rank does not exist."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"invalid rank {rank}: only {self.num_ranks} ranks share the cache")
        return rank // self.num_replicas

    def is_writer(self, rank: int) -> bool:
        return rank % self.num_replicas == 0


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """Location and layout of the host arena, for workers that map it."""

    path: str
    size_bytes: int
    slab_bytes: int
    """Size of a slab, which holds whole frames of one size. The last slab includes the remainder.
    """
    groups: tuple[GroupShape, ...]
    """The KV cache groups of the scheduler side, whose sizes take all ranks into account."""
    id: int = 0
    """Identifies the memory, because paths are reused; 0 if unknown."""
    lifeline: tuple[str, int] | None = None
    """Path and inode of the pipe that workers hold open (see `Lifeline`); None without a server."""

    def is_same_memory(self, other: Self | None) -> bool:
        """Return True if ``other`` is the same memory, possibly through a different connection."""
        return other is not None and replace(other, lifeline=self.lifeline) == self and self.id != 0
