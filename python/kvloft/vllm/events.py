"""Converts `kvloft.plan.kv_events` events to vLLM's KV events, which vLLM publishes to routers.

Hashes, parents and extra keys match vLLM's events for the same blocks, so routers can merge
kvloft's events with vLLM's. Blocks with embeddings or multimodal items are not published, because
token ids do not identify them.
"""

import logging
from array import array
from collections.abc import Sequence
from functools import partial
from math import gcd
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils

from kvloft.plan.announcer import MAX_WAITING, Announcer
from kvloft.plan.kv_events import DISK, HOST, Block, Event, Stored
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session
from kvloft.seam.views import LiveRequest

logger = logging.getLogger("vllm.kvloft")

MEDIUM = {HOST: "CPU", DISK: "STORAGE"}
"""Each tier's medium, named as in vLLM's KV offloading."""
NO_EVENTS = (
    'kvloft: "kv_role" is "%s", so KV events omit kvloft\'s blocks; use "kv_both" to include them'
)
"""Warning for an engine that only loads or only saves."""


def announcer_of(
    vllm_config: Any, kv_cache_config: Any, store: Session, shape: CacheShape, *, is_shared: bool
) -> Announcer | None:
    """Return the announcer for ``store``, which other engines also use if ``is_shared``.

    Returns None if vLLM's ``kv_events_config`` disables KV events. Logs a warning and returns None
    if the engine's ``kv_role`` does not support KV events.
    """
    events = getattr(vllm_config, "kv_events_config", None)
    if events is None or not events.enable_kv_cache_events:
        return None
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is not None and not (transfer.is_kv_consumer and transfer.is_kv_producer):
        logger.warning(NO_EVENTS, transfer.kv_role)
        return None
    store.watch(MAX_WAITING)
    # vLLM hashes every hash_tokens tokens. With multiple groups or ``--prefix-match-unit``, all
    # block sizes are multiples of this number.
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or gcd(
        *(group.block_tokens for group in shape.groups)
    )
    return Announcer(store, shape, partial(describe, hash_tokens), is_shared=is_shared)


def describe(
    hash_tokens: int, live: LiveRequest, block_tokens: int, begin: int, end: int
) -> Sequence[Block]:
    """Return blocks [begin, end) of a `VllmRequest`, or an empty sequence if other processes cannot
    compute the hashes from the tokens.

    vLLM hashes every ``hash_tokens`` tokens and identifies a block by its last hash
    (`BlockHashListWithBlockSize`).
    """
    request: Any = live.request  # type: ignore[attr-defined]
    hashes, per_block = getattr(request, "block_hashes", ()), block_tokens // hash_tokens
    if (
        block_tokens % hash_tokens
        or len(hashes) < end * per_block
        or request.mm_features
        or request.prompt_embeds is not None
    ):
        return ()
    lora, (token_ids, _) = request.lora_request, live.tokens()
    adapter = (lora.adapter_id, lora.name) if lora is not None else None
    has_extra = lora is not None or (request.cache_salt and begin == 0)
    blocks = []
    for nth in range(begin, end):
        start, stop = nth * block_tokens, (nth + 1) * block_tokens
        extra = None
        if has_extra:
            extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0)
        parent = hashes[nth * per_block - 1] if nth else None
        ids, own = array("I", token_ids[start:stop]), hashes[(nth + 1) * per_block - 1]
        blocks.append(Block(own, parent, ids, adapter, extra))
    return blocks


class EventWriter:
    """Creates vLLM's events. ``specs`` holds each group's KV cache spec, in ``shape`` order."""

    def __init__(self, specs: Sequence[Any], shape: CacheShape) -> None:
        kind = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
        window = getattr(kv_cache_interface, "get_kv_cache_spec_sliding_window", None)
        self._groups = [
            {
                "group_idx": nth,
                "kv_cache_spec_kind": kind(spec).value if kind is not None else None,
                "kv_cache_spec_sliding_window": window(spec) if window is not None else None,
                "block_size": group.block_tokens,
            }
            for nth, (spec, group) in enumerate(zip(specs, shape.groups, strict=True))
        ]
        # vLLM 0.30 and older publish extra keys exactly as hashed.
        self._extra_keys = getattr(kv_cache_utils, "to_event_extra_keys", list)

    def write(self, event: Event) -> BlockStored | BlockRemoved:
        hash_of, medium = kv_cache_utils.maybe_convert_block_hash, MEDIUM[event.tier]
        if not isinstance(event, Stored):
            hashes = [hash_of(each) for each in event.hashes]
            return _make(BlockRemoved, block_hashes=hashes, medium=medium, group_idx=event.group)
        first = event.blocks[0]
        lora_id, lora_name = first.adapter or (None, None)
        return _make(
            BlockStored,
            block_hashes=[hash_of(block.hash) for block in event.blocks],
            parent_block_hash=hash_of(first.parent) if first.parent is not None else None,
            token_ids=[token for block in event.blocks for token in block.token_ids],
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            extra_keys=self._extra_keys([block.extra for block in event.blocks]),
            **self._groups[event.group],
        )


def _make(kind: Any, **fields: Any) -> Any:
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
