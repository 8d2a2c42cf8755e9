"""Calls on one rank of an engine, in its process: the audit of its pages. A module that ranks can
import.
"""

from __future__ import annotations

from typing import Any

from benches.gpu.audit import PageAudit, poison, whole_blocks
from benches.gpu.llama import worker_totals

_audits: list[PageAudit] = []
"""Of this process."""


def _paged_kv(worker: Any) -> list[list[Any]]:
    """Of the layers that this rank has, by KV cache group; each has its blocks first."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half, layers = (
        get_kv_transfer_group()._worker,
        worker.vllm_config.compilation_config.static_forward_context,
    )
    groups = half._group_layers or [list(layers)]
    return [
        [
            kv
            for name in names
            if name in layers
            for kv in whole_blocks(layers[name], half._num_blocks)
        ]
        for names in groups
    ]


def begin_audit(worker: Any) -> int:
    """In a rank: observe its mover; return the number of layers."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    mover = get_kv_transfer_group()._worker.core._mover
    named_before = getattr(mover, "wait_pinned", lambda timeout: None)  # at earlier commits
    getattr(mover, "wait_registered", named_before)(60.0)
    worker_totals()  # counts from here on
    groups = _paged_kv(worker)
    _audits.append(PageAudit(mover, *groups))
    return sum(map(len, groups))


def overwrite(worker: Any, seed: int) -> None:
    """In a rank: every page is wrong."""
    poison([kv for group in _paged_kv(worker) for kv in group], seed)


def skip_loads(worker: Any, skip: bool) -> None:
    """In a rank: loads report success and move nothing."""
    _audits[0].skip_loads = skip


def counts(worker: Any) -> dict[str, int]:
    """In a rank: counts of moves and comparisons since the last call, and bytes since the first."""
    return {**_audits[0].take_counts(), **worker_totals()}
