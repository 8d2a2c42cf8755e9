"""Compares loaded pages with vLLM's own prefix cache, independently of kvloft's keys and plans.

vLLM identifies each cached block by a hash of its prefix and its KV cache group number.
`KeptBlocks` stores a clone of each computed block under this identifier, and compares each loaded
block with the clone under the same identifier. This detects KV from the wrong position, group or
prompt, even if the bytes were copied correctly. Clones occupy GPU memory, so this module is used
only in checks, not in measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


class KeptBlocks:
    """Clones of cached blocks in an in-process engine.

    ``groups`` is the engine's paged KV: one list of tensors per KV cache group, with the block as
    the first dimension.
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self._groups = groups
        self._clones: dict[bytes, torch.Tensor] = {}

    def note(self) -> int:
        """Clone all cached blocks that have no clone yet, and return the total number of clones."""
        for block in self._pool.blocks:
            name = block.block_hash
            if name is not None and name not in self._clones:
                self._clones[name] = self._page(_group_of(name), block.block_id)
        return len(self._clones)

    def compare(self, loaded: Sequence[tuple[int, int]]) -> Counter[str]:
        """Compare loaded blocks, given as (group, block), with their clones and return the counts.

        The keys are "same_N" and "differing_N" for group N, and "unnamed" for blocks without a
        clone.
        """
        counts: Counter[str] = Counter()
        for group, block in loaded:
            name = self._pool.blocks[block].block_hash
            clone = (
                self._clones.get(name) if name is not None and _group_of(name) == group else None
            )
            if clone is None:
                counts["unnamed"] += 1
            else:
                is_same = torch.equal(self._page(group, block), clone)
                counts[f"{'same' if is_same else 'differing'}_{group}"] += 1
        return counts

    def _page(self, group: int, block: int) -> torch.Tensor:
        """Return all bytes of a block that the group's layers use, without padding."""
        return torch.cat([kv[block].reshape(-1).view(torch.uint8) for kv in self._groups[group]])


def _group_of(name: bytes) -> int:
    """Return the group number at the end of a `BlockHashWithGroupId`."""
    return int.from_bytes(name[-4:], "big")
