"""Benchmarks vLLM's scheduler while many requests wait for the disk.

Run as `python benches/bench_waiting.py [--waiting N]`. N requests wait for a hung disk that holds
their prefixes (40 prefixes of 128 tokens), while 8 other requests run. For comparison, the same
requests run on a scheduler without a connector. The benchmark requires vLLM but does not run a
model.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvloft.vllm import scheduler_half
from vllm import SamplingParams

BLOCK_TOKENS, NUM_PREFIXES, PREFIX_TOKENS, NUM_RUNNING, NUM_BLOCKS = 16, 40, 128, 8, 4000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


class DiskThatHangs:
    """A store that has all prefixes on disk but never completes a disk read."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def lookup(self, chain: Any) -> tuple[int, int]:
        return 0, min(chain.num_blocks, PREFIX_TOKENS // BLOCK_TOKENS)

    def acquire(self, chain: Any, num_units: int) -> Any:
        return SimpleNamespace(
            poll=lambda: (0, num_units), batch=lambda *_: None, release=lambda: None
        )


def scheduler_of(folder: Path, *, has_cache: bool, max_seqs: int) -> Scheduler:
    """Return vLLM's scheduler for a CPU model, using kvloft with a hung disk if ``has_cache``."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    transfer = KVTransferConfig(
        kv_connector="KVLoftConnector",
        kv_connector_module_path="kvloft.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"host_size": "64MiB", "load_timeout": 600},
    )
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=1024,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=2048,
        enable_prefix_caching=True,
        async_scheduling=False,
        kv_transfer_config=transfer if has_cache else None,
        prefix_caching_hash_algo="sha256",
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    kv_config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
    open_store = scheduler_half.open_store
    scheduler_half.open_store = lambda *args, **kwargs: DiskThatHangs(open_store(*args, **kwargs))  # type: ignore[assignment]
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_config,
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        structured_output_manager=StructuredOutputManager(config),
        log_stats=False,
    )
    scheduler_half.open_store = open_store
    return scheduler


def add(scheduler: Scheduler, name: str, ids: list[int], hasher: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
    scheduler.add_request(
        Request(
            request_id=name,
            prompt_token_ids=ids,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher,
        )
    )


def step(scheduler: Scheduler) -> tuple[float, int]:
    """Run one step. Return how many ms ``schedule`` took and how many requests it scheduled."""
    start = time.perf_counter()
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    took = time.perf_counter() - start
    result = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
        sampled_token_ids=[[1] for _ in ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.update_from_output(output, result)
    return took * 1e3, len(ids)


def times(num_waiting: int, num_steps: int, *, has_cache: bool, max_seqs: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        scheduler = scheduler_of(Path(folder), has_cache=has_cache, max_seqs=max_seqs)
        init_none_hash(get_hash_fn_by_name("sha256"))
        hasher = get_request_block_hasher(BLOCK_TOKENS, get_hash_fn_by_name("sha256"))
        half = scheduler.connector._scheduler if scheduler.connector is not None else None
        if half is not None:
            half.core._loads_allowed = False
        for nth in range(NUM_RUNNING):
            add(scheduler, f"runs-{nth}", [500 - nth] * 40, hasher)
        step(scheduler)
        if half is not None:
            half.core._loads_allowed = half.may_wait = True
        for nth in range(num_waiting):
            prefix = nth % NUM_PREFIXES
            add(
                scheduler,
                f"waits-{nth}",
                [prefix] * PREFIX_TOKENS + [nth % 400, nth // 400, 7, 8],
                hasher,
            )
        gc.collect()
        gc.freeze()
        found = [step(scheduler) for _ in range(num_steps)]
        assert half is None or not half.hook_errors, (
            "a kvloft hook raised an exception; see the log"
        )
        return [took for took, _ in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rows = {
        "vLLM alone, no free slot": {"has_cache": False, "max_seqs": NUM_RUNNING},
        "kvloft, no free slot": {"has_cache": True, "max_seqs": NUM_RUNNING},
        "vLLM alone, free slots": {"has_cache": False, "max_seqs": 256},
        "kvloft, free slots": {"has_cache": True, "max_seqs": 256},
    }
    print(
        f"{options.waiting} waiting: ms per schedule(){'':<18} {'median':>9} {'longest':>9} "
        f"{'first':>9}"
    )
    for name, how in rows.items():
        first, *rest = times(options.waiting, options.steps, **how)  # type: ignore[arg-type]
        print(f"{name:<48} {statistics.median(rest):>9.2f} {max(rest):>9.2f} {first:>9.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
