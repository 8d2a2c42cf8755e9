"""What the cache is made of: sizes that both halves and the store read. Values, built once at start.

``kvloft.vllm.shape`` builds them from vLLM's own configuration. It must not know vLLM or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group: layers that share a block table, of which a prefix needs all blocks. Sizes are in tokens and blocks."""

    block_tokens: int
    blocks_per_chunk: int = 1

    @property
    def chunk_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_chunk


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Groups of layers and shards of ranks.

    Every ``num_replicas`` neighbouring ranks are a shard: they hold the same bytes (MLA, fewer KV heads than ranks). The first one
    writes the shard's part of each frame, ``part_bytes`` long, all of them read it. Raises ValueError where ranks are left over.
    """

    groups: tuple[GroupShape, ...]
    part_bytes: int = 4096
    num_ranks: int = 1
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_replicas:
            raise ValueError(f"{self.num_ranks} ranks cannot hold {self.num_replicas} copies of each shard")

    @property
    def full(self) -> GroupShape:
        """The group of full attention, which every served model has; from one key to the next is one of its blocks."""
        return self.groups[0]

    @property
    def num_shards(self) -> int:
        return self.num_ranks // self.num_replicas

    @property
    def frame_bytes(self) -> int:
        return self.part_bytes * self.num_shards

    def shard_of(self, rank: int) -> int:
        """Which part of a frame is ``rank``'s. Raises ValueError for a rank that is none of ours."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not one of the {self.num_ranks} that share the cache")
        return rank // self.num_replicas

    def is_writer(self, rank: int) -> bool:
        return rank % self.num_replicas == 0


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """How a worker maps the host tier."""

    path: str
    frame_bytes: int
    num_frames: int
    id: int = 0
    """Which memory it is, for paths are used again; 0: not known."""
