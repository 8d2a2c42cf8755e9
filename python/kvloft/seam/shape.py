"""What the cache is made of: sizes that both halves and the store read. Values, built once at start.

``kvloft.vllm.shape`` builds them from vLLM's own configuration. It must not know vLLM or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group: layers that share a block table.

    ``kind`` says which blocks a prefix of L tokens needs; "full" needs all of them. Sizes are in tokens and blocks.
    """

    block_tokens: int
    blocks_per_chunk: int = 1
    kind: Literal["full"] = "full"
    is_draft: bool = False

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class ShardShape:
    """One part of every frame: ``part_bytes`` at ``offset``, whose first ``payload_bytes`` are a full chunk's pages.

    ``ranks`` hold the same bytes (MLA, fewer KV heads than ranks): the first of them writes the part, all of them read it.
    """

    ranks: tuple[int, ...]
    payload_bytes: int
    offset: int
    part_bytes: int

    @property
    def writer(self) -> int:
        return self.ranks[0]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Groups of layers and shards of ranks. ``hash_tokens`` are the tokens from one key to the next."""

    hash_tokens: int
    groups: tuple[GroupShape, ...]
    shards: tuple[ShardShape, ...]

    @classmethod
    def of_one_group(
        cls, group: GroupShape, *, payload_bytes: int = 0, part_bytes: int = 4096, num_ranks: int = 1, num_replicas: int = 1
    ) -> CacheShape:
        """One group, and every ``num_replicas`` neighbouring ranks with the same bytes.

        Raises ValueError unless ``num_replicas`` divides ``num_ranks``.
        """
        if num_ranks % num_replicas:
            raise ValueError(f"{num_ranks} ranks cannot hold {num_replicas} copies of each shard")
        shards = tuple(
            ShardShape(tuple(range(first, first + num_replicas)), payload_bytes, nth * part_bytes, part_bytes)
            for nth, first in enumerate(range(0, num_ranks, num_replicas))
        )
        return cls(group.block_tokens, (group,), shards)

    @property
    def full(self) -> GroupShape:
        """The group of full attention, which every served model has."""
        return self.groups[0]

    @property
    def num_ranks(self) -> int:
        return sum(len(shard.ranks) for shard in self.shards)

    @property
    def frame_bytes(self) -> int:
        last = self.shards[-1]
        return last.offset + last.part_bytes

    def shard_of(self, rank: int) -> int:
        """Which part of a frame is ``rank``'s. Raises ValueError for a rank that no shard names."""
        for nth, shard in enumerate(self.shards):
            if rank in shard.ranks:
                return nth
        raise ValueError(f"rank {rank} is not one of the {self.num_ranks} that share the cache")


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """How a worker maps the host tier."""

    path: str
    frame_bytes: int
    num_frames: int
