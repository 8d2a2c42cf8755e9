"""One engine with one connector (or none), measured in a process of its own: `python -m kvloft.bench.engine_child NAME JSON`.

An 8B Llama shape with random weights made sharp: attention logits have a spread of several units, so that the next token
depends on single tokens of the prompt, and so on the KV that was loaded. Prints one line `RESULT {...}` after each phase.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvloft.bench.turns import Turns

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip
SHARPNESS = 2.5
"""Standard deviation of queries' and keys' entries; its square is that of the attention logits."""


def sharpen(model: Any) -> int:
    """Random weights of unit gain in place, the same for the same architecture; returns how many parameters there are."""
    import torch

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    parameters = sorted(model.named_parameters())
    generator = torch.Generator(device=parameters[0][1].device).manual_seed(20)
    count = 0
    for name, parameter in parameters:
        count += parameter.numel()
        if parameter.dim() < 2:
            parameter.data.fill_(1.0)
            continue
        fan_in = 1.0 if "embed_tokens" in name else float(parameter.shape[-1])
        parameter.data.normal_(0.0, fan_in**-0.5, generator=generator)
        if "qkv_proj" in name:
            q_and_k = parameter.shape[0] * (heads + kv_heads) // (heads + 2 * kv_heads)
            parameter.data[:q_and_k] *= SHARPNESS
        if "lm_head" in name:
            parameter.data *= 4.0
    return count


class Engine:
    """vLLM in this process, and the few things the phases do with it."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        folder = Path(options["model_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        model = {**MODEL, **options.get("model", {})}
        (folder / "config.json").write_text(json.dumps(model))
        settings: dict[str, Any] = {
            "model": str(folder), "skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16",
            "max_model_len": 40960, "max_num_batched_tokens": 8192, "max_num_seqs": 64, "gpu_memory_utilization": 0.62,
            "num_gpu_blocks_override": options["num_blocks"], "generation_config": "vllm", "enable_prefix_caching": True,
            "disable_log_stats": True, "seed": 0,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
            },
        }  # fmt: skip
        transfer = {
            "none": None,
            "native": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                       "kv_connector_extra_config": {"cpu_bytes_to_use": options["host_bytes"]}},
            "kvloft": {"kv_connector": "KVLoftConnector", "kv_connector_module_path": "kvloft.vllm.connector", "kv_role": "kv_both",
                       "kv_load_failure_policy": "recompute",
                       "kv_connector_extra_config": {"host_size": options["host_bytes"], **options.get("extra", {})}},
        }[name]  # fmt: skip
        settings.update(options.get("llm", {}))
        if transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.sampling = SamplingParams
        self.llm = LLM(**settings)
        self.num_parameters = self.llm.apply_model(sharpen)[0]
        self.engine = self.llm.llm_engine
        self.block_tokens = 16
        self._random = random.Random(7)
        self._next = 0
        self.bytes_a_token = model["num_hidden_layers"] * 2 * model["num_key_value_heads"] * model["head_dim"] * 2

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(10, 128000) for _ in range(num_tokens)]

    def params(self, max_tokens: int, **more: Any) -> Any:
        return self.sampling(max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, **more)

    def ttft(self, prompt: list[int]) -> tuple[float, tuple[int, float], int]:
        """(seconds, (token, its logprob), tokens that were cached)."""
        begin = time.perf_counter()
        output = self.llm.generate([{"prompt_token_ids": prompt}], self.params(1, logprobs=1), use_tqdm=False)[0]
        seconds = time.perf_counter() - begin
        first = output.outputs[0]
        return seconds, (first.token_ids[0], round(next(iter(first.logprobs[0].values())).logprob, 5)), output.num_cached_tokens

    def tokens(self, prompts: Sequence[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], self.params(max_tokens), use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def add(self, prompt: list[int], max_tokens: int) -> str:
        self._next += 1
        name = f"bench{self._next}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, self.params(max_tokens))
        return name

    def settle(self) -> None:
        """Let saves land: small requests keep the engine stepping."""
        for _ in range(4):
            self.ttft(self.prompt(40))
            time.sleep(0.1)

    def empty_gpu_cache(self, num_tokens: int) -> None:
        """Push everything else out of the block pool."""
        for _ in range(-(-num_tokens // 32768)):
            self.ttft(self.prompt(32768))
        self.settle()


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    """Of its own, so that every connector sees the same whatever ran before."""
    return [rng.randrange(10, 128000) for _ in range(num_tokens)]


def worker_totals() -> dict[str, int]:
    """What kvloft's worker moved since its start, if that is the connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
    return dict(worker.core.lifetime) if worker is not None else {}


def wait_pinned(engine: Engine, options: dict[str, Any]) -> None:
    """Until kvloft's host memory is pinned: seconds after the first request. OffloadingConnector pins before it starts."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if options["name"] == "kvloft":
        engine.ttft(engine.prompt(64))
        get_kv_transfer_group()._worker.core._mover.wait_pinned(120.0)  # noqa: SLF001 (a bench looks inside)


def load_trace(options: dict[str, Any]) -> Any:
    """A `LoadTrace` around kvloft's mover if ``options`` ask for one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if not options.get("trace") or options["name"] != "kvloft":
        return None
    from kvloft.bench.trace import LoadTrace

    return LoadTrace(get_kv_transfer_group()._worker.core._mover)  # noqa: SLF001 (a bench looks inside)


def phase_ttft(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """From HBM, and from the connector after the GPU's cache was emptied; cold too (`phase_cold` is the one to compare)."""
    context = options["context"]
    engine.ttft(engine.prompt(2048))
    engine.ttft(engine.prompt(context))
    engine.settle()
    prompts = [engine.prompt(context) for _ in range(2)]
    before = worker_totals()
    cold = [engine.ttft(p) for p in prompts]
    engine.settle()
    hits = [engine.ttft(p) for p in prompts for _ in range(2)]
    warm: list[tuple[float, tuple[int, float], int]] = []
    trace, traced = load_trace(options), list[dict[str, Any]]()
    middle = before
    for _ in range(0 if options["name"] == "none" else options.get("rounds", 2)):
        engine.empty_gpu_cache(options["num_blocks"] * engine.block_tokens)
        middle = worker_totals()
        for prompt in prompts:
            if trace is not None:
                trace.start()
            warm.append(engine.ttft(prompt))
            traced += [trace.summary()] if trace is not None else []
    after = worker_totals()
    num_bytes = engine.bytes_a_token * (context - 1)
    found = {name: [row[0] * 1e3 for row in rows] for name, rows in (("cold", cold), ("hbm", hits), ("warm", warm)) if rows}
    return {
        "context": context, **{f"{name}_ms": statistics.median(times) for name, times in found.items()},
        "all_ms": {name: [round(each, 2) for each in times] for name, times in found.items()},
        "cached_tokens": [row[2] for row in warm], "first_cold": [row[1] for row in cold[-2:]],
        "first_hbm": [row[1] for row in hits], "first_warm": [row[1] for row in warm], "kv_bytes": num_bytes,
        "loaded_bytes_last_round": after.get("loaded_bytes", 0) - middle.get("loaded_bytes", 0),
        "saved_bytes": after.get("saved_bytes", 0) - before.get("saved_bytes", 0), "trace": traced,
    }  # fmt: skip


def phase_cold(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """TTFT of prompts nobody has seen, in turns with the other engines."""
    context = options["context"]
    for length in (2048, context):
        engine.ttft(engine.prompt(length))
    engine.settle()
    turns = Turns(Path(options["turns"]), options["name"], options["names"])
    seconds = []
    for _ in range(options.get("colds", 8)):
        with turns.mine():
            seconds.append(engine.ttft(engine.prompt(context))[0])
            time.sleep(0.1)  # what it saved is on its way
    return {"cold_ms": statistics.median(seconds) * 1e3, "all_ms": [round(each * 1e3, 2) for each in seconds]}


def phase_wave(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """Eight prompts of half the context at once."""
    prompts = [engine.prompt(options["context"] // 2) for _ in range(8)]

    trace = load_trace(options)

    def wave() -> dict[str, Any]:
        if trace is not None:
            trace.start()
        begin = time.perf_counter()
        waiting = {engine.add(p, 1) for p in prompts}
        added = time.perf_counter() - begin
        times: list[float] = []
        steps: list[tuple[float, float]] = []
        while engine.engine.has_unfinished_requests() and time.perf_counter() - begin < 60:
            stepped = time.perf_counter()
            for output in engine.engine.step():
                if output.finished and any(output.request_id.startswith(name) for name in waiting):
                    times.append(time.perf_counter() - begin)  # noqa: PERF401 (the clock is read output by output)
            steps.append((time.perf_counter() - stepped, stepped - begin))
        return {
            "makespan_ms": max(times) * 1e3, "mean_ms": statistics.mean(times) * 1e3, "finished": len(times),
            "added_ms": added * 1e3, "steps": len(steps), "first_step_ms": steps[0][0] * 1e3,
            "finished_ms": [round(seconds * 1e3, 1) for seconds in times],
            "longest_steps_ms": [(round(took * 1e3, 1), round(at * 1e3, 1)) for took, at in sorted(steps, reverse=True)[:12]],
            "trace": trace.summary() if trace is not None else None,
        }  # fmt: skip

    found: dict[str, Any] = {"cold": wave()}
    engine.settle()
    found["hbm"] = wave()
    found["warm"] = []
    for _ in range(1 if options["name"] == "none" else options.get("rounds", 2) + 1):
        engine.empty_gpu_cache(options["num_blocks"] * engine.block_tokens)
        found["warm"].append(wave())
    found["warm_makespan_ms"] = statistics.median(row["makespan_ms"] for row in found["warm"])
    return found


def phase_decode(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """Steps of 16 running requests: alone, while 16k-token prompts arrive and are saved, while they are loaded again."""
    big = [engine.prompt(options["context"] // 2) for _ in range(4)]
    running = [engine.prompt(1000) for _ in range(16)]

    def run(arriving: Sequence[list[int]]) -> dict[str, float]:
        for prompt in running:
            engine.add([*prompt[:-8], *engine.prompt(8)], 400)
        queue, pending, steps, count = list(arriving), set[str](), list[tuple[float, bool]](), 0
        while engine.engine.has_unfinished_requests():
            if count >= 60 and queue and not pending and (count - 60) % 40 == 0:
                pending.add(engine.add(queue.pop(0), 2))
            begin = time.perf_counter()
            outputs = engine.engine.step()
            steps.append((time.perf_counter() - begin, bool(pending)))
            count += 1
            for output in outputs:
                if output.finished:
                    pending = {name for name in pending if not output.request_id.startswith(name)}
        alone = [seconds for seconds, busy in steps[20:] if not busy]
        mixed = [seconds for seconds, busy in steps[20:] if busy]
        return {**_percentiles("alone", alone), **_percentiles("mixed", mixed), "wall_s": sum(seconds for seconds, _ in steps)}

    engine.settle()
    found = {"plain": run([]), "plain_again": run([]), "saving": run(big)}
    engine.settle()
    engine.empty_gpu_cache(options["num_blocks"] * engine.block_tokens)
    found["loading"] = run(big)
    return found


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    marks = {p: ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1e3 for p in (50, 90, 99)}
    return {
        **{f"{name}_p{p}_ms": value for p, value in marks.items()},
        f"{name}_steps": len(seconds),
        f"{name}_max_ms": ordered[-1] * 1e3,
    }


def phase_tokens(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens: cold, from HBM, from the connector, and with loads that copy nothing, which must change them."""
    prompts = [prompt_of(random.Random(n), n) for n in options.get("token_lengths", (3000, 9001, 16384, 20000))]
    found: dict[str, Any] = {"cold": [engine.tokens([p], 24)[0] for p in prompts]}
    found["hbm"] = [engine.tokens([p], 24)[0] for p in prompts]
    engine.empty_gpu_cache(options["num_blocks"] * engine.block_tokens)
    before = worker_totals()
    found["warm"] = [engine.tokens([p], 24)[0] for p in prompts]
    found["loaded_bytes"] = worker_totals().get("loaded_bytes", 0) - before.get("loaded_bytes", 0)
    if options["name"] == "kvloft":
        engine.empty_gpu_cache(options["num_blocks"] * engine.block_tokens)
        with _loads_that_copy_nothing():
            found["skipped_load"] = [engine.tokens([p], 24)[0] for p in prompts]
    return found


class _loads_that_copy_nothing:  # noqa: N801 (used as a statement)
    """The worker says that its loads are done, and moves no byte: what a broken connector would do."""

    def __enter__(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvloft.types import LoadResult

        self._mover = get_kv_transfer_group()._worker.core._mover  # noqa: SLF001 (a fault made on purpose)
        mover = self._mover

        def submit_loads(plans: Sequence[Any]) -> None:
            mover._done.loads += [LoadResult(plan.req_id, plan.load_id) for plan in plans]  # noqa: SLF001

        mover.submit_loads = submit_loads

    def __exit__(self, *_: object) -> None:
        del self._mover.submit_loads


def phase_load(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    """200 requests with shared prefixes over a block pool that preempts; their tokens, in order."""
    rng = random.Random(11)
    stems = [prompt_of(rng, rng.randrange(500, 6000)) for _ in range(12)]
    prompts = [rng.choice(stems)[: rng.randrange(200, 6000)] + prompt_of(rng, rng.randrange(1, 300)) for _ in range(200)]
    before = worker_totals()
    begin = time.perf_counter()
    tokens = engine.tokens(prompts, 32)
    again = engine.tokens(prompts[::-1], 32)[::-1]
    after = worker_totals()
    return {
        "tokens": tokens, "again": again, "seconds": time.perf_counter() - begin,
        "loaded_bytes": after.get("loaded_bytes", 0) - before.get("loaded_bytes", 0),
        "saved_bytes": after.get("saved_bytes", 0) - before.get("saved_bytes", 0),
    }  # fmt: skip


PHASES: dict[str, Callable[[Engine, dict[str, Any]], dict[str, Any]]] = {
    "cold": phase_cold, "ttft": phase_ttft, "wave": phase_wave, "decode": phase_decode, "tokens": phase_tokens, "load": phase_load,
}  # fmt: skip


def main(name: str, options: dict[str, Any]) -> None:
    """Run the phases that ``options`` ask for on one engine and print the result as JSON."""
    options["name"] = name
    begin = time.perf_counter()
    engine = Engine(name, options)
    result: dict[str, Any] = {"name": name, "start_s": time.perf_counter() - begin, "parameters": engine.num_parameters}
    result["v2_runner"] = bool(getattr(engine.engine.vllm_config, "use_v2_model_runner", False))
    print("RESULT", json.dumps(result), flush=True)
    wait_pinned(engine, options)
    for phase in options["phases"]:
        begin = time.perf_counter()
        result[phase] = PHASES[phase](engine, options)
        result[phase]["phase_s"] = time.perf_counter() - begin
        print("RESULT", json.dumps(result), flush=True)
    result["totals"] = worker_totals()
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # an engine's own shutdown may hang on some releases, and everything is printed
