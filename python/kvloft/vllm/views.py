"""Converts vLLM's requests and steps to kvloft's views.

Fields that some supported vLLM releases lack are read with default values.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, cast
from uuid import uuid4

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvloft import _core
from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId, ReqId
from kvloft.seam.shape import CacheShape
from kvloft.seam.views import BoundaryState, EmbedRows, MediaItem, NewRequest, RequestView, StepView
from kvloft.vllm.identity.adapters import AdapterNames

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before vLLM 0.32, hits have no source label
    CacheHitSource = None


class VllmRequest:
    """Implements `LiveRequest` for a vLLM Request. ``adapters`` identifies LoRA adapters."""

    __slots__ = ("_adapters", "req_id", "request")

    def __init__(self, request: Request, adapters: AdapterNames) -> None:
        self.request, self._adapters = request, adapters
        self.req_id = ReqId(request.request_id)

    def tokens(self) -> tuple[Sequence[int], int]:
        # Unwrap the read-only view: Rust reads a list without copying it.
        request = self.request
        return request._all_token_ids, request.num_prompt_tokens  # noqa: SLF001

    @property
    def num_computed_tokens(self) -> int:
        return self.request.num_computed_tokens

    @property
    def skip_load(self) -> bool:
        """Return True if the request must not read from a cache, or if another connector transfers
        its KV from a prefill server.
        """
        skips = getattr(self.request, "skip_reading_prefix_cache", False)
        return bool(skips or self._transfer_params().get("do_remote_prefill"))

    @property
    def saves(self) -> Literal["all", "prompt"] | None:
        ours = self._transfer_params().get("kvloft")
        wish = ours.get("save") if isinstance(ours, dict) else None
        return wish if wish in ("all", "prompt") else None

    def _transfer_params(self) -> dict[str, Any]:
        params = getattr(self.request, "kv_transfer_params", None)
        return params if isinstance(params, dict) else {}

    def view(self) -> RequestView:
        request, prefix = self.request, self._adapters.media_prefix
        items = [
            MediaItem(prefix + each.identifier, each.mm_position.offset, each.mm_position.length)
            for each in request.mm_features
        ]
        savable_tokens = min(item.start for item in items) if prefix and items else None
        adapter = self._adapters.identify(request.lora_request)
        if adapter is not None and adapter[1] is None:
            adapter, savable_tokens = (adapter[0], uuid4().hex), 0
        return RequestView(
            adapter=cast("tuple[str, str] | None", adapter),
            cache_salt=request.cache_salt,
            embeds=_embeds(request),
            items=tuple(items),
            savable_tokens=savable_tokens,
        )

    def uses_adapter(self, number: int) -> bool:
        """Return True if the request uses the LoRA adapter whose number in vLLM is ``number``."""
        lora = self.request.lora_request
        return lora is not None and lora.lora_int_id == number


def _embeds(request: Request) -> tuple[EmbedRows, ...]:
    """Return a prompt's embedding rows, excluding positions that vLLM marks as token ids."""
    rows = request.prompt_embeds
    if rows is None:
        return ()
    is_token = getattr(request, "prompt_is_token_ids", None) or [False] * len(rows)
    runs = groupby(range(len(rows)), lambda at: bool(is_token[at]))
    return tuple(_rows(rows, list(run)) for is_id, run in runs if not is_id)


def _rows(tensor: torch.Tensor, run: Sequence[int]) -> EmbedRows:
    part = tensor[run[0] : run[-1] + 1].detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return EmbedRows(
        run[0], len(run), part.view(torch.uint8).numpy(), dtype=dtype, width=tensor.shape[-1]
    )


NewTables = Callable[[Any], Tables]


def tables_of(shape: CacheShape) -> NewTables:
    """Return a function that converts vLLM's block tables for all groups to `Tables`."""
    per_unit = [group.blocks_per_unit for group in shape.groups]
    return partial(Tables, main=shape.main, per_unit=per_unit if max(per_unit) > 1 else None)


def view_step(output: SchedulerOutput, new_tables: NewTables | None = None) -> StepView:
    """Convert a SchedulerOutput, in either of vLLM's formats, to a StepView. A resumed request
    appears as a new request with its complete block table.

    With ``new_tables``, the view's ``tables`` returns vLLM's current block tables, and ``grown``
    holds all blocks that vLLM assigned in this step.
    """
    blocks_of = _first_of if new_tables is None else _flatten
    cached = output.scheduled_cached_reqs
    new = [
        NewRequest(
            ReqId(request.req_id),
            request.num_computed_tokens,
            cast(Sequence[BlockId], blocks_of(request.block_ids)),
        )
        for request in output.scheduled_new_reqs
    ]
    req_ids, computed = cached.req_ids, cached.num_computed_tokens
    # Most requests get no blocks in a step. Rust skips these requests cheaply.
    added = cached.new_block_ids
    if new_tables is None:
        grown = _core.first_of_each(req_ids, added)
    else:
        rows = zip(req_ids, added, strict=True)
        grown = [(req_id, blocks_of(tables)) for req_id, tables in rows if tables]
    if resumed := cached.resumed_req_ids:
        tables = dict(grown)
        kept = [i for i, req_id in enumerate(req_ids) if req_id not in resumed]
        new += [
            NewRequest(ReqId(req_id), computed[i], tables.get(req_id, ()))
            for i, req_id in enumerate(req_ids)
            if req_id in resumed
        ]
        grown = [row for row in grown if row[0] not in resumed]
        req_ids, computed = [req_ids[i] for i in kept], [computed[i] for i in kept]
    drafts = output.scheduled_spec_decode_tokens or {}
    view = StepView(
        new=new,
        running=cast(Sequence[ReqId], req_ids),
        num_computed_tokens=computed,
        grown=grown,
        num_scheduled_tokens=cast(Any, output.num_scheduled_tokens),
        total_scheduled_tokens=output.total_num_scheduled_tokens,
        num_draft_tokens={ReqId(req_id): len(ids) for req_id, ids in drafts.items()},
        preempted=cast(Any, frozenset(getattr(output, "preempted_req_ids", None) or ())),
    )
    return view if new_tables is None else _resolve(view, output, new_tables)


def _resolve(view: StepView, output: SchedulerOutput, new_tables: NewTables) -> StepView:
    """Add vLLM's current block tables and offered states to ``view``."""
    state = output.kv_connector_block_state
    assert state is not None, "vLLM 0.32 and newer set kv_connector_block_state for every connector"
    grown = [*view.grown, *((new.req_id, new.block_ids) for new in view.new)]
    offered = state.boundary_state_offloads.items()

    def tables(req_id: ReqId) -> Tables | None:
        found = state.resolve_block_ids(req_id)
        return new_tables(found) if found else None

    return view._replace(
        new=[replace(new, block_ids=()) for new in view.new],
        grown=grown,
        tables=tables,
        states=[
            BoundaryState(ReqId(req_id), *row)
            for req_id, rows in offered
            if req_id not in view.preempted
            for row in rows
        ],
    )


def _flatten(tables: Sequence[Sequence[int]]) -> Sequence[int]:
    return [block for table in tables for block in table]


_first_of: Callable[[Any], Sequence[int]] = itemgetter(0)
"""Returns the table of the only group."""


def hit_sources(by_tier: Mapping[str, int], num_tokens: int) -> dict[Any, int]:
    """Return the number of tokens for each vLLM source label. The counts sum to ``num_tokens``."""
    if CacheHitSource is None:
        return {}
    tiers = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources = Counter({source: by_tier.get(tier, 0) for tier, source in tiers.items()})
    if sources.total() > num_tokens:
        sources.clear()
    sources[CacheHitSource.EXTERNAL_UNSPECIFIED] = num_tokens - sources.total()
    return dict(+sources)


def num_running(scheduler: Any) -> int:
    """Return the number of requests that occupy vLLM's running slots."""
    return len(scheduler.running) + getattr(scheduler, "num_waiting_for_streaming_input", 0)
