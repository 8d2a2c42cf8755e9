"""Sizes of the cache, which both sides and the store use: KV cache groups, shards and the arena.

`kvloft.vllm.shape` builds these values once at start from vLLM's configuration. Must not import
vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Self

COMPACT_SHARE: Final = 0.7188
"""Size of the records of compressed pages as a part of their bytes, in frames for compressed
chunks. All real KV fits (docs/design/compression.md).
"""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group: layers that share a block table.

    ``kind`` decides the blocks that a hit of L tokens needs:

    - "full": all
    - "window": those of the last ``reach`` tokens before L
    - "local": those of the attention chunk of ``reach`` tokens that contains position L
    - "state": the one state after L tokens

    Chunks of all groups end at the same tokens, so a group with shorter blocks has more of them per
    chunk.
    """

    block_tokens: int
    blocks_per_unit: int = 1
    kind: Literal["full", "window", "local", "state"] = "full"
    reach: int = 0
    part_bytes: int = 4096
    """Bytes of a shard's part of a frame."""
    compact_bytes: int = 0
    """The same for frames of compressed chunks; 0 if there are none."""

    @property
    def unit_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_unit

    @property
    def kept_blocks(self) -> int:
        """Return the number of blocks of a unit that a chunk keeps: its last ones.

        No hit needs the blocks before them, and vLLM may have freed those.
        """
        match self.kind:
            case "full" | "local":
                return self.blocks_per_unit
            case "window":
                return min(self.blocks_per_unit, max(1, -(-self.reach // self.block_tokens)))
            case "state":
                return 1


def part_sizes(groups: Sequence[GroupShape]) -> list[int]:
    """Return the bytes of parts by size class. Groups of one size share a class."""
    every = {group.part_bytes for group in groups} | {group.compact_bytes for group in groups}
    return sorted(every - {0})


@dataclass(frozen=True, slots=True)
class CacheShape:
    """KV cache groups and shards.

    ``num_replicas`` neighboring ranks are one shard: they hold the same bytes (MLA, or fewer KV
    heads than ranks). The first of them writes the shard's part of each frame, and all of them read
    it. ``lookahead`` is the number of tokens after a block on which a draft model's KV in that
    block depends. ``encoding`` is the encoding that parts can have, a number of
    `kvloft.transfer.frames`; 0: all parts are raw. Raises ValueError if the ranks are not whole
    shards.
    """

    groups: tuple[GroupShape, ...]
    num_ranks: int = 1
    num_replicas: int = 1
    lookahead: int = 0
    encoding: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_replicas:
            raise ValueError(
                f"{self.num_ranks} ranks cannot hold {self.num_replicas} copies of each shard"
            )

    @property
    def main(self) -> int:
        """Return the first group with full attention, or else with a window."""
        kinds = [group.kind for group in self.groups]
        return kinds.index("full" if "full" in kinds else "window")

    def number_of(self, group: int) -> int | None:
        """Return the group's number in keys; None if its chunks have the keys of the prefix."""
        return None if group == self.main and self.groups[group].kind == "full" else group + 1

    @property
    def unit_tokens(self) -> int:
        """Return the number of tokens of a unit: whole blocks of every group."""
        return self.groups[0].unit_tokens

    @property
    def is_divisible(self) -> bool:
        """Return True if any part of a stored prefix is a hit: one full-attention group."""
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    @property
    def is_dense(self) -> bool:
        """Return True if some group needs every block, so no hit spans a missing chunk."""
        return any(group.kind == "full" for group in self.groups)

    @property
    def num_shards(self) -> int:
        return self.num_ranks // self.num_replicas

    @property
    def frame_sizes(self) -> tuple[int, ...]:
        """Return the bytes of frames, by size class. Groups of one size share a class."""
        return tuple(size * self.num_shards for size in part_sizes(self.groups))

    @property
    def raw_frame_sizes(self) -> tuple[int, ...]:
        """Return the bytes that chunks take uncompressed, by size class."""
        raw = {group.compact_bytes: group.part_bytes for group in self.groups}
        return tuple(raw.get(size, size) * self.num_shards for size in part_sizes(self.groups))

    def frame_bytes(self, group: int) -> int:
        """Return the bytes of a frame of a group's chunks."""
        return self.groups[group].part_bytes * self.num_shards

    def size_classes(self, group: int) -> tuple[int, int | None]:
        """Return the size class of a group's frames, and that of frames for compressed chunks."""
        sizes, shape = part_sizes(self.groups), self.groups[group]
        compact = sizes.index(shape.compact_bytes) if shape.compact_bytes else None
        return sizes.index(shape.part_bytes), compact

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of a unit's frames in the groups that keep every unit."""
        full = [nth for nth, group in enumerate(self.groups) if group.kind == "full"]
        return sum(map(self.frame_bytes, full or [self.main]))

    def shard_of(self, rank: int) -> int:
        """Return the number of the rank's shard. Raises ValueError if there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not one of the {self.num_ranks} that share the cache")
        return rank // self.num_replicas

    def is_writer(self, rank: int) -> bool:
        return rank % self.num_replicas == 0


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """Location and size of the host arena, for workers that map it."""

    path: str
    size_bytes: int
    slab_bytes: int
    """Size of slabs, which hold whole frames of one size. The last one includes the rest."""
    groups: tuple[GroupShape, ...]
    """The KV cache groups as the scheduler side sees them: it knows the sizes of all ranks."""
    id: int = 0
    """Identifies the memory, because paths are reused; 0: unknown."""
    lifeline: tuple[str, int] | None = None
    """Path and inode of the pipe that workers hold open (see `Lifeline`); of servers only."""

    def is_same_memory(self, other: Self | None) -> bool:
        """Return True if ``other`` is the same memory, possibly through another connection."""
        return other is not None and replace(other, lifeline=self.lifeline) == self and self.id != 0
