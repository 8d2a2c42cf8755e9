"""Runs one vLLM engine in a separate process for chat_demo.py.

Run as ``python chat_engine.py ARGUMENTS_JSON``. The process reads requests from file descriptor 3
and writes responses to file descriptor 4, one JSON object per line. This script does not import
kvloft: the arguments name the connector, and counts come from vLLM's metrics.
"""

import json
import os
import sys
import time
from typing import Any

HOST, DISK = "vllm:kvloft_load_tokens_host_total", "vllm:kvloft_load_tokens_disk_total"
DROPPED, LATE = "vllm:kvloft_save_dropped_chunks_total", "vllm:kvloft_server_late_total"


def counters() -> dict[str, float]:
    """Return vLLM's Prometheus counters, summed over labels."""
    from prometheus_client import REGISTRY

    totals: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def serve_turn(engine: Any, turn_id: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Run one prompt with greedy sampling and return the fields of `chat_demo.Turn`."""
    from vllm import SamplingParams

    before, begin, ttft_s = counters(), time.perf_counter(), 0.0
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2
    )
    engine.add_request(turn_id, {"prompt_token_ids": prompt}, params)
    output: Any = None
    while engine.has_unfinished_requests():
        if outputs := engine.step():
            ttft_s, output = ttft_s or time.perf_counter() - begin, outputs[-1]
    after = counters()
    from_host, from_disk, dropped, late = (
        int(after.get(name, 0) - before.get(name, 0)) for name in (HOST, DISK, DROPPED, LATE)
    )
    cached = output.num_cached_tokens or 0
    tops = [
        sorted((p.logprob for p in entry.values()), reverse=True)
        for entry in output.outputs[0].logprobs
    ]
    return {
        "tokens": list(output.outputs[0].token_ids),
        "margin": min(top[0] - top[1] for top in tops),
        "ttft_s": ttft_s,
        "gpu": cached - from_host - from_disk,
        "host": from_host,
        "disk": from_disk,
        "computed": len(prompt) - cached,
        "dropped": dropped,
        "late": late,
    }


def main() -> None:
    """Start the engine, then handle requests until the input closes."""
    arguments: dict[str, Any] = json.loads(sys.argv[1])
    requests, answers = os.fdopen(3), os.fdopen(4, "w", buffering=1)
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if transfer := arguments.pop("kv_transfer_config", None):
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    # The first step includes one-time setup, which would distort the measured TTFT.
    serve_turn(engine, "warm-up", [3, 4, 5], 2)
    print(json.dumps({"ready": True}), file=answers)
    for line in requests:
        message = json.loads(line)
        if message.pop("reset", False):
            answer: Any = {"reset": engine.reset_prefix_cache()}
        else:
            answer = serve_turn(engine, **message)
        print(json.dumps(answer), file=answers)
    engine.engine_core.shutdown()
    print(json.dumps({"stopped": True}), file=answers)


if __name__ == "__main__":
    main()
