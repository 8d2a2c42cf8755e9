"""Runs one engine on multiple GPUs: `python -m benches.gpu.ranks_child JSON`.

Performs the following runs and prints a `RESULT {...}` line after each:
- prompts one at a time: cold, from HBM, and from host memory after overwriting each rank's paged KV
- the same prompts together with new prompts, so that multiple steps are in flight in the pipeline;
  then again, loaded from host memory
- prompts one at a time, with loads that copy nothing
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benches.gpu.llama import Engine, prompt_of
from benches.gpu.rank import begin_audit, counts, overwrite, skip_loads

LENGTHS = (777, 1024, 3000, 4096, 9001, 16385)
NUM_NEW = 4
"""Number of new prompts in the crowd. Their lengths are the first NUM_NEW entries of LENGTHS."""
NUM_TOKENS = 24
Answer = tuple[tuple[int, ...], int]
"""The output tokens and the number of cached prompt tokens."""


def main(options: dict[str, Any]) -> None:
    from kvloft.vllm.ranks import watch

    watch()  # pipeline stages need this patch; the plugin that applies it is disabled here
    engine = Engine("groups" if "layer_types" in options["model"] else "kvloft", options)
    executor = engine.engine.engine_core.engine_core.model_executor
    engine.settle()
    layers = executor.collective_rpc(begin_audit)
    prompts = [prompt_of(random.Random(n), min(n, options["longest"])) for n in LENGTHS]
    both = [*prompts, *(prompt_of(random.Random(f"new-{n}"), n) for n in LENGTHS[:NUM_NEW])]

    def one_by_one() -> list[Answer]:
        return [answer for prompt in prompts for answer in engine.answers([prompt], NUM_TOKENS)]

    def at_once() -> list[Answer]:
        return engine.answers(both, NUM_TOKENS)

    def emptied(seed: int, answers: Callable[[], list[Answer]]) -> list[Answer]:
        engine.empty_gpu_cache()
        executor.collective_rpc(overwrite, args=(seed,))
        return answers()

    def skipped() -> list[Answer]:
        executor.collective_rpc(skip_loads, args=(True,))
        return emptied(4, one_by_one)

    runs: dict[str, Callable[[], list[Answer]]] = {
        "cold": one_by_one,
        "hbm": one_by_one,
        "warm": partial(emptied, 1, one_by_one),
        "crowd": partial(emptied, 2, at_once),
        "crowd_warm": partial(emptied, 3, at_once),
        "skipped_load": skipped,
    }
    result: dict[str, Any] = {"layers": layers, "runs": {}}
    for name, run in runs.items():
        found = run()
        engine.settle()
        result["runs"][name] = {
            "tokens": [tokens for tokens, _ in found],
            "cached": [cached for _, cached in found],
            "ranks": executor.collective_rpc(counts),
        }
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # skip the engine's shutdown, which can hang in some vLLM releases
