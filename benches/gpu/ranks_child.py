"""One engine over several GPUs: `python -m benches.gpu.ranks_child JSON`. Each rank compares its
loads.

Prompts one at a time: cold, from HBM, and, after paged KV was overwritten in each rank, from host
memory. Then these and new prompts together, so that several steps are in flight in the stages;
twice, the second time from host memory. Last with loads that copy nothing. Prints `RESULT {...}`.
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
"""New prompts for the crowd, as many, with the first lengths."""
NUM_TOKENS = 24
Answer = tuple[tuple[int, ...], int]
"""Return its tokens and the number of cached prompt tokens."""


def main(options: dict[str, Any]) -> None:
    """Run everything and print the results as JSON."""
    from kvloft.vllm.ranks import watch

    watch()  # kvloft's plugin does, which is not loaded here; pipeline stages need it
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
    os._exit(0)  # the engine's shutdown can hang in some releases, and everything is printed
