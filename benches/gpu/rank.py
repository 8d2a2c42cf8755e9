"""Functions that `ranks_child` runs in each rank's process to audit the rank's pages."""

from __future__ import annotations

from typing import Any

from benches.gpu.audit import PageAudit, poison, whole_blocks
from benches.gpu.llama import worker_totals

_audits: list[PageAudit] = []
"""This process's audit, created by `begin_audit`."""


def _paged_kv(worker: Any) -> list[list[Any]]:
    """Return this rank's paged KV as one list of tensors per KV cache group.

    The first dimension of each tensor is the block index.
    """
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
    """Start auditing this rank's mover, and return the number of paged KV tensors."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    mover = get_kv_transfer_group()._worker.core._mover
    named_before = getattr(mover, "wait_pinned", lambda timeout: None)  # its former name
    getattr(mover, "wait_registered", named_before)(60.0)
    worker_totals()  # the first call starts the counters
    groups = _paged_kv(worker)
    _audits.append(PageAudit(mover, *groups))
    return sum(map(len, groups))


def overwrite(worker: Any, seed: int) -> None:
    """Overwrite all of this rank's pages with noise."""
    poison([kv for group in _paged_kv(worker) for kv in group], seed)


def skip_loads(worker: Any, skip: bool) -> None:
    """Set whether this rank's loads report success without copying any bytes."""
    _audits[0].skip_loads = skip


def counts(worker: Any) -> dict[str, int]:
    """Return the audit's counts since the last call, and the worker's totals."""
    return {**_audits[0].take_counts(), **worker_totals()}
