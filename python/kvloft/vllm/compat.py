"""What differs between the vLLM releases kvloft serves (0.26 to 0.33), detected by feature, never by version string.

Nothing here decides anything; the rest of the folder is written against this file. Contract notes: newer hooks that older
releases lack are simply never called; older ones that newer releases dropped are not needed.
"""

from __future__ import annotations

from typing import Any

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32 hits have no source
    CacheHitSource = None

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
except ImportError as error:  # pragma: no cover - older than anything we serve
    raise ImportError("kvloft needs vLLM 0.26 or newer (KVConnectorWorkerMetadata is missing)") from error

__all__ = ["CacheHitSource", "KVConnectorWorkerMetadata", "hit_sources", "preempted_ids"]


def hit_sources(by_tier: dict[str, int], num_tokens: int) -> dict[Any, int]:
    """Tokens by vLLM's source labels, summing to ``num_tokens``; what no tier accounts for is unspecified."""
    if CacheHitSource is None:
        return {}
    labels = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources = {labels[tier]: tokens for tier, tokens in by_tier.items() if tokens and tier in labels}
    rest = num_tokens - sum(sources.values())
    if rest < 0:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_tokens}
    if rest:
        sources[CacheHitSource.EXTERNAL_UNSPECIFIED] = rest
    return sources


def preempted_ids(scheduler_output: Any) -> frozenset[str]:
    """Requests preempted in or just before this step."""
    return frozenset(getattr(scheduler_output, "preempted_req_ids", None) or ())
