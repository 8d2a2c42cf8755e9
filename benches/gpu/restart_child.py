"""Runs the engine that `restart` kills: `python -m benches.gpu.restart_child JSON`.

Each process runs the same prompt three times: in a new engine, from HBM, and, once the prompt is
saved, from the cache. It then prints `RESULT {...}` and waits to be killed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from benches.gpu.engine_child import wait_registered
from benches.gpu.llama import Engine, prompt_of

SETTLES = 8
WRITE_S = 120.0


def main(options: dict[str, Any]) -> None:
    """Run the prompt and print the results.

    ``started_s`` and ``answered_s`` are measured from the time the parent started this process.
    """
    engine = Engine(options["name"], options)
    started_s = time.monotonic() - options["begin_s"]
    if options["life"] == 0:
        wait_registered(engine, options)  # saves use only registered frames; loads use all frames
        # This warm-up compiles kernels, so that the first measurement does not include compilation.
        engine.ttft(engine.prompt(options["context"]))
    prompt = prompt_of(random.Random("restart"), options["context"])
    first = engine.ttft(prompt)
    answered_s = time.monotonic() - options["begin_s"]
    again = engine.ttft(prompt)
    for _ in range(SETTLES):
        engine.settle()
    engine.empty_gpu_cache()
    loaded = engine.ttft(prompt)
    if options.get("extra"):
        _wait_written(engine)
    result = {
        "started_s": started_s,
        "answered_s": answered_s,
        "ttft_ms": first[0] * 1e3,
        "cached": first[2],
        "first": first[1],
        "hbm_ms": again[0] * 1e3,
        "loaded_ms": loaded[0] * 1e3,
        "loaded_cached": loaded[2],
        "first_loaded": loaded[1],
    }
    print("RESULT", json.dumps(result), flush=True)
    time.sleep(3600)


def _wait_written(engine: Engine) -> None:
    connector = engine.engine.engine_core.engine_core.scheduler.connector
    if not connector._scheduler._store.flush(WRITE_S):
        raise RuntimeError(f"the prompt's chunks were not written to disk within {WRITE_S} s")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
