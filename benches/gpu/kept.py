"""The content of vLLM's own prefix cache, block by block: an oracle for loaded pages that uses
neither kvloft's keys nor its plans.

vLLM names each cached block by a hash of its prefix and the number of its KV cache group. Pages are
cloned by that name while they have computed bytes, and compared after a load under the same name: a
window or state of the wrong boundary, group or prompt differs, even if it was copied correctly.
Clones stay on the device: only for checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch


class KeptBlocks:
    """Of an engine in this process with the paged KV ``groups``, a list of tensors a KV cache
    group, blocks first.
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[torch.Tensor]]) -> None:
        self._pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self._groups = groups
        self._clones: dict[bytes, torch.Tensor] = {}

    def note(self) -> int:
        """Clone cached blocks without a clone; return the number of clones."""
        for block in self._pool.blocks:
            name = block.block_hash
            if name is not None and name not in self._clones:
                self._clones[name] = self._page(_group_of(name), block.block_id)
        return len(self._clones)

    def compare(self, loaded: Sequence[tuple[int, int]]) -> Counter[str]:
        """Of ``loaded`` (group, block), by group: "same_0", "differing_0", ..., and "unnamed" if
        vLLM gives no recorded name.
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
        """All bytes of a block that the group's layers use, padding left out."""
        return torch.cat([kv[block].reshape(-1).view(torch.uint8) for kv in self._groups[group]])


def _group_of(name: bytes) -> int:
    """The number after the hash (`BlockHashWithGroupId`)."""
    return int.from_bytes(name[-4:], "big")
