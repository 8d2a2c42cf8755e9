"""The engine that the engine benchmarks measure: in-process vLLM with random weights.

The weights are scaled so that attention logits have a standard deviation of about 6. As a result,
the next token depends on individual prompt tokens, and therefore on the loaded KV.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from benches.gpu.peers import CONNECTORS, SERVED
from benches.gpu.shapes import DRAFT, config_of

SHARPNESS = 2.5
"""Standard deviation of query and key entries. Its square is the logits' standard deviation."""
FLOOD_PROMPTS = 3
"""Number of prompts that together fill paged KV.

Each prompt fills at most an equal share, so that the next prompt fits while a connector still holds
blocks.
"""
SLOW_DECAY = -6.0
"""Logarithm of the decay rate of gated delta nets, chosen so that a state covers a few hundred
tokens.
"""


def sharpen(model: Any) -> int:
    """Replace the weights in place with random weights of unit gain, and return their number.

    Each parameter's name is its seed, so the weights depend only on the architecture. If all
    parameters in a pipeline stage shared a seed, the embeddings and the output head would be equal,
    and the engine would repeat the last token regardless of its KV.
    """
    import torch

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    parameters = sorted(model.named_parameters())
    generator = torch.Generator(device=parameters[0][1].device)
    count = 0
    for name, parameter in parameters:
        generator.manual_seed(zlib.crc32(name.encode()))
        count += parameter.numel()
        if parameter.dim() < 2:
            parameter.data.fill_(SLOW_DECAY if name.endswith("A_log") else 1.0)
            continue
        # Gemma multiplies embeddings by the square root of their width.
        scales_embeddings = config.model_type.startswith("gemma")
        fan_in = (
            1.0 if "embed_tokens" in name and not scales_embeddings else float(parameter.shape[-1])
        )
        parameter.data.normal_(0.0, fan_in**-0.5, generator=generator)
        if "qkv_proj" in name:
            q_and_k = parameter.shape[0] * (heads + kv_heads) // (heads + 2 * kv_heads)
            parameter.data[:q_and_k] *= SHARPNESS
        if "q_b_proj" in name:  # MLA computes keys from a latent vector of unit gain
            parameter.data *= SHARPNESS**2
        if "lm_head" in name:
            parameter.data *= 4.0
    for module in model.modules():
        if hasattr(module, "W_UK_T"):  # vLLM derives W_UK_T from the weights
            module.process_weights_after_loading(parameters[0][1].dtype)
    return count


class Engine:
    """An in-process vLLM engine with the operations that the benchmark phases need."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        from vllm.config import KVTransferConfig

        from vllm import LLM, SamplingParams

        folder = Path(options["model_dir"])
        model = config_of(options.get("model", {}))
        _write_config(folder, model)
        settings: dict[str, Any] = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 40960,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.62,
            "num_gpu_blocks_override": options["num_blocks"],
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
            },
        }
        extra = options.get("extra", {})
        transfer = {
            "none": None,
            "native": {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": options["host_bytes"]},
            },
            "kvloft": _kvloft(host_size=options["host_bytes"], **extra),
            "raw": _kvloft(host_size=options["host_bytes"], compression="off", **extra),
            "groups": _kvloft(
                "KVLoftGroupsConnector", host_size=options["host_bytes"], kv_groups="all"
            ),
            "served": _kvloft(server=f"unix:{options.get('socket')}", **extra),
            **CONNECTORS,
        }["served" if name in SERVED else "kvloft" if name == "before" else name]
        settings.update(options.get("llm", {}))
        if options.get("drafts"):
            settings["speculative_config"] = drafts = dict(options["drafts"])
            if drafts["method"] == "eagle":
                _write_config(folder / "draft", config_of(DRAFT))
                drafts["model"] = str(folder / "draft")
        if transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.sampling = SamplingParams
        self.llm = LLM(**settings)
        self.num_parameters = apply_model(self.llm, sharpen)[0]
        self.engine = self.llm.llm_engine
        self.block_tokens = 16
        # Engines that share a server get different prompts, so that none loads KV computed by
        # another.
        self._random = random.Random(8 if name in SERVED[1:] else 7)
        self._next = 0
        self._floods = options.get("floods", False)
        self.bytes_a_token = (
            model["num_hidden_layers"] * 2 * model["num_key_value_heads"] * model["head_dim"] * 2
        )

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(10, 128000) for _ in range(num_tokens)]

    def params(self, max_tokens: int, **more: Any) -> Any:
        return self.sampling(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, **more
        )

    def ttft(self, prompt: list[int]) -> tuple[float, tuple[int, float], int]:
        """Compute one token. Return (seconds, (token, its logprob), number of cached tokens)."""
        begin = time.perf_counter()
        output = self.llm.generate(
            [{"prompt_token_ids": prompt}], self.params(1, logprobs=1), use_tqdm=False
        )[0]
        seconds = time.perf_counter() - begin
        first = output.outputs[0]
        return (
            seconds,
            (first.token_ids[0], round(next(iter(first.logprobs[0].values())).logprob, 5)),
            output.num_cached_tokens,
        )

    def tokens(self, prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
        return [tokens for tokens, _ in self.answers(prompts, max_tokens)]

    def answers(
        self, prompts: Sequence[list[int]], max_tokens: int
    ) -> list[tuple[tuple[int, ...], int]]:
        """Run all prompts together. Return (tokens, number of cached prompt tokens) per prompt."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts], self.params(max_tokens), use_tqdm=False
        )
        return [
            (tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0)
            for output in outputs
        ]

    def add(self, prompt: list[int], max_tokens: int) -> str:
        self._next += 1
        name = f"bench{self._next}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, self.params(max_tokens))
        return name

    def settle(self) -> None:
        """Run small requests to keep the engine stepping while pending saves complete."""
        for _ in range(4):
            self.ttft(self.prompt(40))
            time.sleep(0.1)

    def empty_gpu_cache(self) -> None:
        """Empty vLLM's own prefix cache, but keep the connector's chunks.

        Raises RuntimeError if vLLM does not reset the cache.
        """
        if self._floods:
            return self._flood()
        for _ in range(50):
            self.settle()
            if self.llm.reset_prefix_cache():
                return None
        raise RuntimeError("vLLM's prefix cache could not be emptied: some blocks were not freed")

    def _flood(self) -> None:
        """Overwrite every block by running new prompts.

        Some connectors keep a few blocks until the next request, so vLLM cannot reset its cache.
        """
        config = self.engine.vllm_config
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        each = min(blocks // FLOOD_PROMPTS, config.model_config.max_model_len // size - 1)
        for _ in range(-(-blocks // each) + 1):
            self.ttft(self.prompt(each * size))
        self.settle()


def _kvloft(connector: str = "KVLoftConnector", **settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "kvloft.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, unless the file already has this content.

    kvloft's namespace depends on the file's modification time, so engines that share a cache must
    not rewrite the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, text = folder / "config.json", json.dumps(config)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def apply_model(llm: Any, function: Any) -> list[Any]:
    """Like ``llm.apply_model``, but without kvloft's hook, which would disable caching.

    This is safe because all engines sharing a cache make the same change before their first
    request. The engine must run in this process.
    """
    found: list[Any] = llm.llm_engine.engine_core.engine_core.model_executor.collective_rpc(
        "apply_model", args=(function,)
    )
    return found


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    """Return a random prompt. Engines with equal ``rng`` states get the same prompt."""
    return [rng.randrange(10, 128000) for _ in range(num_tokens)]


def count_asked(engine: Engine) -> list[int]:
    """Return a one-item list that counts the tokens vLLM loads from the connector."""
    connector, count = engine.engine.engine_core.engine_core.scheduler.connector, [0]
    if connector is not None:
        update = connector.update_state_after_alloc

        def counted(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            count[0] += num_external_tokens
            return update(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = counted
    return count


def worker_totals() -> dict[str, int]:
    """Return the totals reported by kvloft's worker since the first call.

    Returns an empty dictionary if kvloft is not the connector.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
    core = getattr(worker, "core", None)  # PegaFlow's `_worker` has no core
    if core is None:
        return {}
    if core not in _TOTALS:
        _TOTALS[core] = _counted(core)
    return dict(_TOTALS[core])


_TOTALS: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()


def _counted(core: Any) -> Counter[str]:
    """Return a counter that is updated with every report from the mover to ``core``."""
    totals, note = Counter[str](), core._note

    def counting(done: Any) -> None:
        totals.update(
            saved_bytes=done.num_bytes_saved,
            loaded_bytes=done.num_bytes_loaded,
            saved_chunks=len(done.saved),
            failed_chunks=len(done.failed),
            loads=len(done.loads),
            bad_chunks=sum(len(result.bad_keys) for result in done.loads),
        )
        note(done)

    core._note = counting
    return totals
