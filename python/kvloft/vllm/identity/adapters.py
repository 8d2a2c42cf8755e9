"""The identity of a request's LoRA adapter in keys. Must not depend on requests or the store."""

from uuid import uuid4

from huggingface_hub import constants as hub
from vllm.lora.request import LoRARequest

from kvloft.vllm.identity.weights import Look, LooksInTime, engine_start_s, hub_commit


class AdapterNames:
    """Identity of each LoRA: its name and path, and evidence of its weights.

    Other runs can share it only if its files are unchanged since this engine started, or a commit
    identifies them: then the workers loaded these weights, whenever they did. Otherwise it is valid
    for this run only; and once its files differ from the first check, no request shares it. vLLM
    identifies adapters by name in its prefix cache, and by number in its workers.
    """

    def __init__(self, media_prefix: str = "", *, are_seen: bool = True) -> None:
        """``media_prefix`` precedes every media identifier; it is unique to this engine if vLLM
        numbers them.

        Unless adapters ``are_seen`` before they are loaded, no request shares one with another.
        """
        self._are_seen = are_seen
        self._seen: dict[tuple[str, str], tuple[Look | None, str | None]] = {}
        """The files at first sight, and the identity as long as the files are unchanged."""
        self._first_of: dict[int, tuple[str, str]] = {}
        self._start_s = engine_start_s()
        self._looks = LooksInTime()
        self.media_prefix = media_prefix

    def identify(self, lora: LoRARequest | None) -> tuple[str, str] | None:
        """Return (name, path and weights) of ``lora``; None for the base model."""
        return (lora.lora_name, self._shared(lora) or uuid4().hex) if lora is not None else None

    def close(self) -> None:
        """Ends the thread that checks files. Nothing is identified afterwards."""
        self._looks.close()

    def _shared(self, lora: LoRARequest) -> str | None:
        """Return path and weights; None if this request shares its adapter with no other."""
        path, number = lora.lora_path or "", lora.lora_int_id
        # In place: reloaded in each step.
        if not self._are_seen or getattr(lora, "load_inplace", False):
            return None
        if self._first_of.setdefault(number, (lora.lora_name, path)) != (lora.lora_name, path):
            return None  # another adapter under a number that workers have loaded already
        slot = (f"{number} {lora.lora_name}", path)
        try:
            files = self._looks.look(path)
        except TimeoutError:
            return None
        if slot not in self._seen:
            self._seen[slot] = files, self._state(lora, path, files)
        first, state = self._seen[slot]
        if state is None or first != files:
            # It is no longer known which state of the files the workers loaded, or will load.
            self._seen[slot] = first, None
            return None
        shape = getattr(lora, "is_3d_lora_weight", None)
        return f"{path}|{state}{f'|3d={shape}' if shape is not None else ''}"

    def _state(self, lora: LoRARequest, path: str, files: Look | None) -> str:
        if getattr(lora, "tensorizer_config_dict", None):
            return uuid4().hex  # the weights are elsewhere
        if files is None:
            # vLLM loads the hub's current files unless it is offline, or a trainer passes tensors.
            return (hub_commit(path) if path and hub.HF_HUB_OFFLINE else None) or uuid4().hex
        return files.fingerprint() if files.latest_s <= self._start_s else uuid4().hex
