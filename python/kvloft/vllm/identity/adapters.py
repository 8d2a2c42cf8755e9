"""Computes LoRA adapter identities and the media identifier prefix for cache keys."""

import logging
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from huggingface_hub import constants as hub
from vllm.lora.request import LoRARequest

from kvloft.vllm.identity.weights import Look, LooksInTime, engine_start_s

logger = logging.getLogger("vllm.kvloft")

MEDIA_ARE_NUMBERED = (
    "kvloft: prompts with images or other media are saved only up to the first item: with "
    "--no-enable-prefix-caching and --mm-processor-cache-gb 0, vLLM numbers media items instead of "
    "hashing them. Remove either flag to cache entire prompts"
)


def media_prefix(vllm_config: Any) -> str:
    """Return the prefix for media item identifiers in keys. If vLLM numbers media items instead of
    hashing their content, log a warning and return a prefix unique to this process.
    """
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    has_cache = getattr(media, "mm_processor_cache_gb", None) != 0
    if has_cache or vllm_config.cache_config.enable_prefix_caching:
        return ""
    logger.warning(MEDIA_ARE_NUMBERED)
    return f"{uuid4().hex}|"


NOT_CACHED = "kvloft: requests with LoRA adapter %r are not cached: %s"
RENAME = "to cache these requests, load the adapter under a new name"


class _NotSharedError(Exception):
    """Explains why requests with an adapter must not be cached."""


class AdapterNames:
    """Identifies each LoRA adapter by its name, its path and a fingerprint of its weights.

    Runs can share an adapter's KV if the adapter's files have not changed since this engine
    started, or if a commit identifies them. In both cases, the workers have loaded exactly these
    weights. Otherwise, the identity is valid only for this run. Once the files differ from the
    first check, requests with the adapter are no longer cached. vLLM identifies adapters by name in
    its prefix cache and by number in its workers.
    """

    def __init__(
        self,
        media_prefix: str = "",
        *,
        are_seen: bool = True,
        on_replace: Callable[[int], None] = lambda _number: None,
    ) -> None:
        """``media_prefix`` precedes all media identifiers and is unique to this engine if vLLM
        numbers media items.

        ``are_seen`` is True if `identify` is called before vLLM loads an adapter. Otherwise,
        requests with adapters are not cached.

        ``on_replace`` is called with an adapter's number before workers can replace its weights,
        which earlier requests with that number may still use.
        """
        self._are_seen = are_seen
        self._on_replace = on_replace
        self._seen: dict[tuple[str, str], tuple[tuple[Look | None, str | None], str | None]] = {}
        """The files and hub commit at the first check, and the identity. The identity is None once
        the files or the commit have changed.
        """
        self._first_of: dict[int, tuple[str, str]] = {}
        self._replaced: set[int] = set()
        """Numbers under which workers may have loaded different weights."""
        self._warned: set[tuple[str, str]] = set()
        self._start_s = engine_start_s()
        self._looks = LooksInTime()
        self.media_prefix = media_prefix

    def identify(self, lora: LoRARequest | None) -> tuple[str, str | None] | None:
        """Return the name and identity of ``lora``, or None for the base model. The identity is
        None if the request must not be cached. Each reason is logged once per adapter.
        """
        if lora is None:
            return None
        try:
            return lora.lora_name, self._shared(lora)
        except _NotSharedError as error:
            warning = (lora.lora_name, str(error))
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning(NOT_CACHED, *warning)
            return lora.lora_name, None

    def check_again(self, lora: LoRARequest) -> None:
        """Recheck an adapter's files for a resumed request, because workers may reload them."""
        _name, identity = self.identify(lora) or ("", "")
        if identity is None:
            self._on_replace(lora.lora_int_id)

    def close(self) -> None:
        """Stop the thread that checks files. Call no method afterwards."""
        self._looks.close()

    def _shared(self, lora: LoRARequest) -> str:
        """Return the identity of the path and weights. Raises _NotSharedError."""
        path, number = lora.lora_path or "", lora.lora_int_id
        first_of = self._first_of.setdefault(number, (lora.lora_name, path))
        # With load_inplace, vLLM reloads the adapter in every step. Later requests with the number
        # use the new weights, even if they name the first path.
        is_replaced = getattr(lora, "load_inplace", False) or first_of != (lora.lora_name, path)
        if is_replaced and number not in self._replaced:
            self._replaced.add(number)
            self._on_replace(number)
        if not self._are_seen:
            raise _NotSharedError(
                "kvloft cannot check the adapter's files before this vLLM release loads them"
            )
        if number in self._replaced:
            raise _NotSharedError(
                f"the adapter's weights may have been replaced (lora_int_id {number}); {RENAME}"
            )
        slot = (f"{number} {lora.lora_name}", path)
        try:
            now = self._looks.look(path)
        except TimeoutError:
            raise _NotSharedError(
                "checking the adapter's files timed out; the next request repeats the check"
            ) from None
        if slot not in self._seen:
            self._seen[slot] = now, self._state(lora, *now)
        first, state = self._seen[slot]
        if first == (None, None) and state is not None:  # perhaps downloaded since then
            first = now
            self._seen[slot] = first, state
        if state is not None and first != now:
            # The workers may have loaded any version of the files, or may yet load a newer version.
            self._seen[slot] = first, None
            self._on_replace(number)
        if state is None or first != now:
            raise _NotSharedError(f"the adapter's files have changed since its first use; {RENAME}")
        shape = getattr(lora, "is_3d_lora_weight", None)
        return f"{path}|{state}{f'|3d={shape}' if shape is not None else ''}"

    def _state(self, lora: LoRARequest, files: Look | None, commit: str | None) -> str:
        if getattr(lora, "tensorizer_config_dict", None):
            return uuid4().hex  # the weights are not at the path
        if files is None:
            # Either a trainer passed tensors, or the adapter is on the hub. Unless vLLM is offline,
            # it loads the latest files from the hub.
            return (commit if hub.HF_HUB_OFFLINE else None) or uuid4().hex
        return files.fingerprint() if files.latest_s <= self._start_s else uuid4().hex
