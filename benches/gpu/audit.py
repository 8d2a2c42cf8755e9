"""An independent look at the pages a worker moves: clones made with plain torch indexing, and compared byte for byte.

Every saved chunk's pages are cloned on the forward's own stream, by key; every loaded chunk's pages are compared with that clone
once the worker reports the load, and so is every chunk that another forward computes and saves again. It goes around a
worker's mover and shares no kernel, tag, stream or frame with it. It keeps what it cloned on the device: only for checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import ChunkKey
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.mover import Finished


def paged_kv(engine: Any) -> list[torch.Tensor]:
    """Every attention layer's paged KV of a vLLM engine in this process, blocks first."""
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    found = [kv[0] if isinstance(kv, list) else kv for kv in (getattr(layer, "kv_cache", None) for layer in layers)]
    return [kv for kv in found if isinstance(kv, torch.Tensor) and kv.numel()]


def poison(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Overwrite paged KV with finite noise of the size of real keys and values, so that a byte not loaded is a wrong byte."""
    for number, kv in enumerate(tensors):
        generator = torch.Generator(device=kv.device).manual_seed(seed * 1000 + number)
        kv.normal_(0.0, 3.0, generator=generator)
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize()


class PageAudit:
    """Goes around ``mover`` from its construction on; ``skip_loads`` makes loads report success and move nothing."""

    def __init__(self, mover: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._mover, self._tensors = mover, tensors
        self._submit_saves, self._submit_loads, self._poll = mover.submit_saves, mover.submit_loads, mover.poll
        mover.submit_saves, mover.submit_loads, mover.poll = self._saves, self._loads, self._poll_and_compare
        self._clones: dict[ChunkKey, torch.Tensor] = {}
        self._plans: dict[int, LoadPlan] = {}
        self._skipped: list[LoadResult] = []
        self._counts: dict[str, int] = {}
        self._differing: dict[str, list[torch.Tensor]] = {}
        self.skip_loads = False

    def forget(self) -> None:
        """Drop the clones; what is loaded without one counts as unknown."""
        self._clones.clear()

    def take_counts(self) -> dict[str, int]:
        """Chunks since the last call: loaded, loaded_differing, resaved, resaved_differing, saved, unknown."""
        counts = dict.fromkeys(("saved", "loaded", "loaded_differing", "resaved", "resaved_differing", "unknown"), 0)
        counts |= self._counts
        for name, found in self._differing.items():
            counts[f"{name}_differing"] = int(sum(int(value) for value in found))
        self._counts, self._differing = {}, {}
        return counts

    # -- around the mover -----------------------------------------------------------------------------------------

    def _saves(self, plans: Sequence[SavePlan]) -> None:
        copies = [copy for plan in plans for copy in plan.chunks]
        pages = self._pages(copies)
        known = [i for i, copy in enumerate(copies) if copy.key in self._clones]
        self._compare("resaved", [pages[i] for i in known], [self._clones[copies[i].key] for i in known])
        self._clones.update({copy.key: clone for copy, clone in zip(copies, pages, strict=True)})
        self._counts["saved"] = self._counts.get("saved", 0) + len(copies)
        self._submit_saves(plans)

    def _loads(self, plans: Sequence[LoadPlan]) -> None:
        if self.skip_loads:
            self._skipped += [LoadResult(plan.req_id, plan.load_id) for plan in plans]
        self._plans.update({plan.load_id: plan for plan in plans})
        if not self.skip_loads:
            self._submit_loads(plans)

    def _poll_and_compare(self) -> Finished:
        done: Finished = self._poll()
        done.loads += self._skipped
        self._skipped = []
        for result in done.loads:
            bad = {key for key, _ in result.bad_keys}
            copies = [copy for copy in self._plans.pop(result.load_id).chunks if copy.key not in bad and not result.failed]
            known = [copy for copy in copies if copy.key in self._clones]
            self._counts["unknown"] = self._counts.get("unknown", 0) + len(copies) - len(known)
            wanted = [self._clones[copy.key][copy.first_block : copy.first_block + len(copy.blocks)] for copy in known]
            self._compare("loaded", self._pages(known), wanted)
        return done

    def _pages(self, copies: Sequence[ChunkCopy]) -> list[torch.Tensor]:
        """A clone [blocks, bytes of all layers] per copy, made on the current stream."""
        if not copies:
            return []
        device = self._tensors[0].device
        ids = torch.tensor([block for copy in copies for block in copy.blocks], dtype=torch.int64).to(device)
        layers = [kv[ids].reshape(len(ids), -1).view(torch.uint8) for kv in self._tensors]
        return list(torch.cat(layers, dim=1).split([len(copy.blocks) for copy in copies]))

    def _compare(self, name: str, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        """Count chunks that differ; nothing waits for the device."""
        self._counts[name] = self._counts.get(name, 0) + len(found)
        for a, b in zip(found, wanted, strict=True):
            self._differing.setdefault(name, []).append((a != b).any() if a.shape == b.shape else torch.tensor(data=True))
