"""An independent check of the pages a worker moves: clones made with plain torch indexing, and
compared byte for byte.

Every saved chunk's pages are cloned on the forward pass's stream, by key; every loaded chunk's
pages are compared with that clone once the worker reports the load, and so is every chunk that
another forward pass computes and saves again. It wraps a worker's mover and shares no kernel, tag,
stream or frame with it. Clones stay on the device: only for checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import ChunkKey
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan
from kvloft.transfer.mover import Finished


def paged_kv(engine: Any) -> list[list[torch.Tensor]]:
    """Every layer's paged KV of a vLLM engine in this process, blocks first; a list for each KV
    cache group.
    """
    layers = engine.vllm_config.compilation_config.static_forward_context
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    return [
        [kv for name in group.layer_names for kv in whole_blocks(layers[name], config.num_blocks)]
        for group in config.kv_cache_groups
    ]


def whole_blocks(layer: Any, num_blocks: int) -> list[torch.Tensor]:
    """A layer's paged KV, [num_blocks, ...]; if a kernel's blocks are smaller than the scheduler's,
    a block is several rows.
    """
    tensors = [kv for kv in _tensors(getattr(layer, "kv_cache", None)) if kv.numel()]
    return [
        kv if kv.shape[0] == num_blocks else kv.unflatten(0, (num_blocks, -1)) for kv in tensors
    ]


def _tensors(kv: Any) -> Sequence[torch.Tensor]:
    """Tensors of a layer: one, several for a state, or none for a layer without KV."""
    return [kv] if isinstance(kv, torch.Tensor) else kv or []


def poison(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Overwrite paged KV with finite noise of the size of real keys and values, so that a byte not
    loaded is a wrong byte.
    """
    for number, kv in enumerate(tensors):
        generator = torch.Generator(device=kv.device).manual_seed(seed * 1000 + number)
        kv.normal_(0.0, 3.0, generator=generator)
        if (
            kv.dtype == torch.float32
        ):  # a state: other groups see the same bytes as bfloat16, and must not see NaN
            kv.copy_(kv.bfloat16())
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize()


class PageAudit:
    """Wraps ``mover`` from its construction on; ``skip_loads`` makes loads report success without
    moving bytes.
    """

    def __init__(self, mover: Any, *groups: Sequence[torch.Tensor]) -> None:
        """``groups``: the paged KV of each KV cache group; a group without KV on this rank is not
        compared or counted.
        """
        self._mover, self._groups = mover, groups
        self._submit_saves, self._submit_loads, self._poll = (
            mover.submit_saves,
            mover.submit_loads,
            mover.poll,
        )
        mover.submit_saves, mover.submit_loads, mover.poll = (
            self._saves,
            self._loads,
            self._poll_and_compare,
        )
        self._clones: dict[ChunkKey, torch.Tensor] = {}
        self._plans: dict[int, LoadPlan] = {}
        self._skipped: list[LoadResult] = []
        self._loaded: list[tuple[int, int]] = []
        self._counts: dict[str, int] = {}
        self._differing: dict[str, list[torch.Tensor]] = {}
        self.skip_loads = False

    def forget(self) -> None:
        """Drop the clones; later loads of these chunks count as unknown."""
        self._clones.clear()

    def take_counts(self) -> dict[str, int]:
        """Chunks since the last call: loaded, loaded_differing, resaved, resaved_differing, saved,
        unknown; of several groups also loaded_0, saved_0, loaded_1, ...
        """
        counts = dict.fromkeys(
            ("saved", "loaded", "loaded_differing", "resaved", "resaved_differing", "unknown"), 0
        )
        counts |= self._counts
        for name, found in self._differing.items():
            counts[f"{name}_differing"] = int(sum(int(value) for value in found))
        self._counts, self._differing = {}, {}
        return counts

    def take_loaded(self) -> list[tuple[int, int]]:
        """Return (KV cache group, block) of every chunk loaded since the last call, including
        skipped loads.
        """
        loaded, self._loaded = self._loaded, []
        return loaded

    # -- around the mover
    # -----------------------------------------------------------------------------------------

    def _saves(self, plans: Sequence[SavePlan]) -> None:
        for group, copies in self._by_group(plans):
            pages = self._pages(group, copies)
            known = [i for i, copy in enumerate(copies) if copy.key in self._clones]
            self._compare(
                "resaved", [pages[i] for i in known], [self._clones[copies[i].key] for i in known]
            )
            self._counts["resaved"] = self._counts.get("resaved", 0) + len(known)
            self._clones.update(
                {copy.key: clone for copy, clone in zip(copies, pages, strict=True)}
            )
            self._count("saved", group, len(copies))
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
            for group, chunks in self._by_group([self._plans.pop(result.load_id)]):
                copies = [copy for copy in chunks if copy.key not in bad and not result.failed]
                known = [copy for copy in copies if copy.key in self._clones]
                self._counts["unknown"] = self._counts.get("unknown", 0) + len(copies) - len(known)
                wanted = [
                    self._clones[copy.key][copy.first_block : copy.first_block + len(copy.blocks)]
                    for copy in known
                ]
                self._compare("loaded", self._pages(group, known), wanted)
                self._count("loaded", group, len(known))
                self._loaded += [(group, block) for copy in copies for block in copy.blocks]
        return done

    def _by_group(self, plans: Sequence[SavePlan | LoadPlan]) -> list[tuple[int, list[ChunkCopy]]]:
        found: dict[int, list[ChunkCopy]] = {}
        for plan in plans:
            for group, batch in plan.chunks.by_group() if plan.chunks else ():
                found.setdefault(group, []).extend(batch)
        return [(group, copies) for group, copies in found.items() if self._groups[group]]

    def _count(self, name: str, group: int, num_chunks: int) -> None:
        """For all groups, and for each group if there are several."""
        for label in (name, f"{name}_{group}") if len(self._groups) > 1 and num_chunks else (name,):
            self._counts[label] = self._counts.get(label, 0) + num_chunks

    def _pages(self, group: int, copies: Sequence[ChunkCopy]) -> list[torch.Tensor]:
        """A clone [blocks, bytes of all layers of the group] per copy, made on the current
        stream.
        """
        if not copies:
            return []
        tensors = self._groups[group]
        ids = torch.tensor(
            [block for copy in copies for block in copy.blocks], dtype=torch.int64
        ).to(tensors[0].device)
        layers = [kv[ids].reshape(len(ids), -1).view(torch.uint8) for kv in tensors]
        return list(torch.cat(layers, dim=1).split([len(copy.blocks) for copy in copies]))

    def _compare(
        self, name: str, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> None:
        """Note which chunks differ; nothing waits for the device."""
        for a, b in zip(found, wanted, strict=True):
            self._differing.setdefault(name, []).append(
                (a != b).any() if a.shape == b.shape else torch.tensor(data=True)
            )
