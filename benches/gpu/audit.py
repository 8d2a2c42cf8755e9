"""Compares loaded pages with saved pages, byte for byte and independently of the mover.

`PageAudit` wraps a worker's mover and uses plain torch indexing; it shares no kernel, tag, stream
or frame with the mover. The audit clones every saved chunk's pages on the forward pass's stream.
When the worker reports a load, the audit compares each loaded chunk with its clone. If a chunk is
saved again, the audit compares it with the clone from the previous save. Clones occupy GPU memory,
so the audit is used only in checks, not in measurements.
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
    """Return an in-process engine's paged KV as one list of tensors per KV cache group.

    The first dimension of each tensor is the block index.
    """
    layers = engine.vllm_config.compilation_config.static_forward_context
    config = engine.engine_core.engine_core.scheduler.kv_cache_config
    return [
        [kv for name in group.layer_names for kv in whole_blocks(layers[name], config.num_blocks)]
        for group in config.kv_cache_groups
    ]


def whole_blocks(layer: Any, num_blocks: int) -> list[torch.Tensor]:
    """Return a layer's paged KV as tensors of shape [num_blocks, ...].

    If kernel blocks are smaller than scheduler blocks, dimension 1 is the kernel block within the
    scheduler block.
    """
    tensors = [kv for kv in _tensors(getattr(layer, "kv_cache", None)) if kv.numel()]
    return [
        kv if kv.shape[0] == num_blocks else kv.unflatten(0, (num_blocks, -1)) for kv in tensors
    ]


def _tensors(kv: Any) -> Sequence[torch.Tensor]:
    """Return a layer's KV tensors: one for attention, multiple for Mamba, none if the layer has no
    KV.
    """
    return [kv] if isinstance(kv, torch.Tensor) else kv or []


def poison(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Overwrite paged KV with finite noise, so that all bytes are wrong until loaded.

    The noise has the magnitude of real keys and values.
    """
    for number, kv in enumerate(tensors):
        generator = torch.Generator(device=kv.device).manual_seed(seed * 1000 + number)
        kv.normal_(0.0, 3.0, generator=generator)
        if (
            kv.dtype == torch.float32
        ):  # a Mamba state; other groups read its memory as bfloat16, so it must not contain NaN
            kv.copy_(kv.bfloat16())
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize()


class PageAudit:
    """Audits the saves and loads of ``mover``.

    The constructor wraps the methods of ``mover``. If ``skip_loads`` is set, loads report success
    without copying any bytes.
    """

    def __init__(self, mover: Any, *groups: Sequence[torch.Tensor]) -> None:
        """``groups`` is the paged KV of each KV cache group.

        A group without KV on this rank is neither compared nor counted.
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
        """Drop all clones. Later loads of the cloned chunks are counted as unknown."""
        self._clones.clear()

    def take_counts(self) -> dict[str, int]:
        """Return the chunk counts since the last call.

        The dictionary has the keys loaded, loaded_differing, resaved, resaved_differing, saved and
        unknown. With multiple groups, it also has loaded_0, saved_0, loaded_1 and so on.
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
        """Return the (KV cache group, block id) of every block loaded since the last call. Blocks
        of skipped loads are included.
        """
        loaded, self._loaded = self._loaded, []
        return loaded

    # -- wrappers of the mover's methods

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
        """Add ``num_chunks`` to the total and, with multiple groups, to the group's count."""
        for label in (name, f"{name}_{group}") if len(self._groups) > 1 and num_chunks else (name,):
            self._counts[label] = self._counts.get(label, 0) + num_chunks

    def _pages(self, group: int, copies: Sequence[ChunkCopy]) -> list[torch.Tensor]:
        """Clone the pages of each copy on the current stream.

        Each clone has the shape [blocks, bytes of all layers of the group].
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
        """Record which chunks differ, without waiting for the device."""
        for a, b in zip(found, wanted, strict=True):
            self._differing.setdefault(name, []).append(
                (a != b).any() if a.shape == b.shape else torch.tensor(data=True)
            )
