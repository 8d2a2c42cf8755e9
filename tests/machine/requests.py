"""Converts a `Spec` to a vLLM Request with ids, embeddings, media, adapter, salt and sessions."""

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from vllm import SamplingParams

from .symbols import ADAPTERS, Spec, Turn


def make_request(spec: Spec, hasher: Callable[..., Any], turn: Turn | None = None) -> Request:
    """Return the vLLM request for ``spec``, or for the input ``turn`` of its streaming session."""
    ids = spec.ids if turn is None else turn.ids
    extra = {"kv_transfer_params": {"kvloft": {"save": spec.saves}}} if spec.saves else None
    max_tokens = spec.max_tokens if turn is None else turn.max_tokens
    request = Request(
        request_id=spec.id,
        prompt_token_ids=list(ids) if ids is not None else None,
        pooling_params=None,
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra
        ),
        prompt_embeds=spec.embeds if turn is None else None,
        prompt_is_token_ids=list(spec.is_token) if spec.is_token else None,
        cache_salt=spec.salt,
        lora_request=_adapter(spec.adapter) if spec.adapter else None,
        mm_features=[_feature(item.identifier, item.start, item.length) for item in spec.items]
        or None,
        block_hasher=hasher,
        resumable=bool(spec.turns),
    )
    if spec.skips_cache:
        request.skip_reading_prefix_cache = True
    return request


@lru_cache
def _adapter(name: str) -> LoRARequest:
    """Return an adapter with a unique number and directory. The adapter is never loaded."""
    folder = Path(tempfile.mkdtemp(prefix=f"machine-{name}-"))
    (folder / "adapter_config.json").write_text(f'{{"name": "{name}"}}')
    (folder / "adapter_model.safetensors").write_bytes(name.encode())
    return LoRARequest(name, 1 + ADAPTERS.index(name), str(folder))


def _feature(identifier: str, start: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(start, length),
    )
