"""What the cache is made of: sizes that both halves and the store read. Values, built once at start.

``kvloft.vllm.shape`` builds them from vLLM's own configuration. It must not know vLLM or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One KV cache group: layers that share a block table. Sizes are in tokens and blocks.

    ``kind`` says which blocks a prefix of L tokens needs: "full" all of them; "window" those of the last ``reach`` tokens before
    L; "local" those of the local chunk of ``reach`` tokens that L cuts; "state" the one state after L tokens. Chunks of all groups
    end at the same tokens, so a group of shorter blocks has more of them in each.
    """

    block_tokens: int
    blocks_per_unit: int = 1
    kind: Literal["full", "window", "local", "state"] = "full"
    reach: int = 0

    @property
    def unit_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_unit

    @property
    def kept_blocks(self) -> int:
        """Blocks of a unit that a chunk keeps, the last ones: no prefix needs more, and vLLM may have freed those before."""
        match self.kind:
            case "full" | "local":
                return self.blocks_per_unit
            case "window":
                return min(self.blocks_per_unit, max(1, -(-self.reach // self.block_tokens)))
            case "state":
                return 1


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Groups of layers and shards of ranks.

    Every ``num_replicas`` neighbouring ranks are a shard: they hold the same bytes (MLA, fewer KV heads than ranks). The first one
    writes the shard's part of each frame, ``part_bytes`` long, all of them read it. A frame holds a chunk of any one group.
    ``lookahead``: tokens behind a block that a drafter's KV in it depends on. ``encoding``: what parts may be encoded with, a
    number of `kvloft.transfer.frames`; 0: all are raw. Raises ValueError where ranks are left over.
    """

    groups: tuple[GroupShape, ...]
    part_bytes: int = 4096
    num_ranks: int = 1
    num_replicas: int = 1
    lookahead: int = 0
    encoding: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_replicas:
            raise ValueError(f"{self.num_ranks} ranks cannot hold {self.num_replicas} copies of each shard")

    @property
    def main(self) -> int:
        """Which group stands for the request where one must: the first of full attention, or the first of windows without any."""
        kinds = [group.kind for group in self.groups]
        return kinds.index("full" if "full" in kinds else "window")

    def number_of(self, group: int) -> int | None:
        """The number in the keys of what ``groups[group]`` keeps; None: they are the prefix's own."""
        return None if group == self.main and self.groups[group].kind == "full" else group + 1

    @property
    def unit_tokens(self) -> int:
        """Tokens from one cache key to the next: whole blocks of every group."""
        return self.groups[0].unit_tokens

    @property
    def is_divisible(self) -> bool:
        """True if any part of a stored prefix is a hit: with one group of full attention. Else a hit is whole or nothing."""
        return len(self.groups) == 1 and self.groups[0].kind == "full"

    @property
    def is_dense(self) -> bool:
        """True if some group keeps every block of a prefix, so that no hit goes beyond a missing chunk."""
        return any(group.kind == "full" for group in self.groups)

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
    lifeline: tuple[str, int] | None = None
    """Path and inode of the pipe that a worker holds open while it can write to frames; None for an engine's own store."""

    def is_same_memory(self, other: ArenaSpec | None) -> bool:
        """Whether frames of ``other`` are frames of this arena, whatever connection they came by."""
        return other is not None and replace(other, lifeline=self.lifeline) == self and self.id != 0
