"""Computes one engine's greedy tokens: `python -m benches.gpu.equality_child NAME JSON`.

The phases include prompts that run one at a time (cold, from HBM, from the connector, and with
loads that copy nothing), more prompts than the block pool holds, and 200 random requests. Before
each warm run, the prefix cache is emptied and paged KV is overwritten with noise, so that tokens
match only if the loaded bytes are correct. Prints `RESULT {...}` after each phase.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from benches.gpu.audit import PageAudit, paged_kv, poison
from benches.gpu.kept import KeptBlocks
from benches.gpu.llama import Engine, apply_model, prompt_of, sharpen, worker_totals

LENGTHS = (777, 1024, 3000, 4096, 9001, 16385)


def make_norm_invariant() -> None:
    """Fix vLLM's batch-invariant mode for the norm that adds a residual (vLLM 0.26.0).

    This norm calls a CUDA kernel whose block size, and therefore summation order, depends on
    whether the step has at least 256 tokens. A decoding request's row is therefore rounded
    differently in steps with a prefill.
    """
    from vllm.model_executor.layers import layernorm

    plain = getattr(layernorm, "rms_norm_batch_invariant", None)
    if plain is None:
        return

    def norm(value: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
        if residual is None:
            return plain(value, weight, eps)
        residual = value + residual
        return plain(residual, weight, eps), residual

    layernorm.rms_norm_batch_invariant = norm


class Subject:
    """The engine under test, with a page audit (kvloft only) and a preemption counter."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        if options.get("invariant"):
            make_norm_invariant()
        self.engine = Engine(name, options)
        self.scale = options.get("scale", 1.0)
        self.only_first = bool(options.get("only_first"))
        self.scheduler = self.engine.engine.engine_core.engine_core.scheduler
        self.num_preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted
        self.has_prefix_cache = bool(
            self.engine.engine.vllm_config.cache_config.enable_prefix_caching
        )
        groups = paged_kv(self.engine.engine)
        self._tensors = [kv for group in groups for kv in group]
        self.kept = KeptBlocks(self.engine.engine, groups)
        self.block_tokens = max(
            g.kv_cache_spec.block_size for g in self.scheduler.kv_cache_config.kv_cache_groups
        )
        self.longest = int(self.engine.engine.vllm_config.model_config.max_model_len) - 64
        self.num_groups = len(groups)
        self._num_poisoned = 0
        self.audit: PageAudit | None = None
        if name in ("kvloft", "groups"):
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.engine.settle()
            worker = get_kv_transfer_group()._worker
            mover = worker.core._mover
            named_before = getattr(mover, "wait_pinned", lambda timeout: None)  # its former name
            getattr(mover, "wait_registered", named_before)(60.0)
            self.audit = PageAudit(mover, *groups)

    def prompt(self, rng: random.Random, num_tokens: int) -> list[int]:
        return prompt_of(rng, max(2, int(num_tokens * self.scale)))

    def empty_hbm(self) -> None:
        """Empty vLLM's prefix cache and overwrite all pages in HBM with noise."""
        for _ in range(50):
            self.engine.settle()
            if not self.has_prefix_cache or self.engine.llm.reset_prefix_cache():
                break
        else:
            raise RuntimeError("the prefix cache could not be emptied")
        self._num_poisoned += 1
        poison(self._tensors, self._num_poisoned)

    def measured(self, runs: dict[str, Callable[[], list[tuple[int, ...]]]]) -> dict[str, Any]:
        """Perform ``runs`` and return each run's tokens, copied bytes, audit counts and
        preemptions.

        The `reference` setup (``only_first``) performs only the first run.
        """
        found: dict[str, Any] = {}
        for name, run in list(runs.items())[: 1 if self.only_first else None]:
            before, preempted, begin = worker_totals(), self.num_preemptions, time.perf_counter()
            row: dict[str, Any] = {"tokens": run()}
            row["seconds"] = time.perf_counter() - begin
            after = worker_totals()
            row["preemptions"] = self.num_preemptions - preempted
            row["moved"] = {key: after[key] - before.get(key, 0) for key in after}
            row["audit"] = self.audit.take_counts() if self.audit is not None else {}
            found[name] = row
        return found


def phase_prompts(subject: Subject) -> dict[str, Any]:
    """Run prompts one at a time."""
    prompts = [subject.prompt(random.Random(n), n) for n in LENGTHS]

    def one_by_one() -> list[tuple[int, ...]]:
        return [subject.engine.tokens([prompt], 24)[0] for prompt in prompts]

    def twice() -> list[tuple[int, ...]]:
        return [[subject.engine.tokens([prompt], 24)[0] for _ in range(2)][1] for prompt in prompts]

    def warm() -> list[tuple[int, ...]]:
        subject.empty_hbm()
        return one_by_one()

    runs = {"cold": one_by_one}
    if subject.has_prefix_cache:
        runs["hbm"] = twice
    if subject.has_prefix_cache or subject.audit is not None:
        runs["warm"] = warm
    if subject.audit is not None:
        audit = subject.audit

        def skipped() -> list[tuple[int, ...]]:
            subject.empty_hbm()
            audit.skip_loads = True
            try:
                return one_by_one()
            finally:
                audit.skip_loads = False

        runs["skipped_load"] = skipped
    return subject.measured(runs)


def phase_crowd(subject: Subject) -> dict[str, Any]:
    """Run more requests than the block pool holds, so that some are preempted and resumed."""
    rng = random.Random(5)
    prompts = [subject.prompt(rng, rng.randrange(300, 1000)) for _ in range(56)]

    def at_once() -> list[tuple[int, ...]]:
        return subject.engine.tokens(prompts, 160)

    def warm() -> list[tuple[int, ...]]:
        subject.empty_hbm()
        return at_once()

    # Even without a connector, blocks still in HBM change how requests are batched.
    again = {"again": at_once} if subject.has_prefix_cache else {}
    return subject.measured({"cold": at_once, **again, "warm": warm})


def phase_load(subject: Subject) -> dict[str, Any]:
    """Run 200 random requests with shared prefixes, empty HBM, then rerun them in reverse order."""
    rng = random.Random(11)
    stems = [subject.prompt(rng, rng.randrange(500, 4000)) for _ in range(12)]
    longest = int(4000 * subject.scale)
    prompts = [
        rng.choice(stems)[: rng.randrange(100, longest)]
        + subject.prompt(rng, rng.randrange(10, 300))
        for _ in range(200)
    ]

    def backwards() -> list[tuple[int, ...]]:
        subject.empty_hbm()
        return subject.engine.tokens(prompts[::-1], 32)[::-1]

    return subject.measured(
        {"first": lambda: subject.engine.tokens(prompts, 32), "backwards": backwards}
    )


def phase_sleep(subject: Subject) -> dict[str, Any]:
    """Put the engine to sleep during saves. Outputs must be the same after it wakes up."""
    prompts = [subject.prompt(random.Random(100 + n), 3000) for n in range(8)]

    def tokens() -> list[tuple[int, ...]]:
        if subject.engine.engine.vllm_config.model_config.enable_sleep_mode:
            for level in (1, 2, 1):
                subject.engine.tokens(prompts, 1)
                subject.engine.llm.sleep(level=level)
                subject.engine.llm.wake_up()
                if level == 2:
                    apply_model(subject.engine.llm, sharpen)  # level 2 discards the weights
            subject.empty_hbm()
        return subject.engine.tokens(prompts, 24)

    return subject.measured({"first": tokens})


def phase_kept(subject: Subject) -> dict[str, Any]:
    """Run prompts one at a time, and compare loaded blocks with vLLM's own prefix cache.

    Prompt lengths are close to block boundaries.
    """
    size, longest = subject.block_tokens, subject.longest
    lengths = (
        size // 2,
        size,
        size + 1,
        2 * size - 1,
        3 * size + 5,
        8 * size + size // 2,
        40 * size,
    )
    prompts = [
        subject.prompt(random.Random(200 + n), n)
        for n in sorted({min(n, longest) for n in lengths})
    ]
    kept, looks, cached = subject.kept, list[dict[str, int]](), list[list[int]]()

    def one_by_one() -> list[tuple[int, ...]]:
        looks.append({})
        answers = [look(prompt) for prompt in prompts]
        cached.append([num_cached for _, num_cached in answers])
        return [tokens for tokens, _ in answers]

    def look(prompt: list[int]) -> tuple[tuple[int, ...], int]:
        (answer,) = subject.engine.answers([prompt], 16)
        if subject.audit is not None:
            for name, count in kept.compare(subject.audit.take_loaded()).items():
                looks[-1][name] = looks[-1].get(name, 0) + count
        if len(looks) == 1:  # the first run computes all blocks; later runs can load them
            kept.note()
        return answer

    def hbm() -> list[tuple[int, ...]]:
        one_by_one()
        del looks[-1], cached[-1]
        return one_by_one()

    def host() -> list[tuple[int, ...]]:
        subject.empty_hbm()
        return one_by_one()

    runs = {"cold": one_by_one, "hbm": hbm}
    if subject.audit is not None:
        audit = subject.audit

        def skipped() -> list[tuple[int, ...]]:
            audit.skip_loads = True
            try:
                return host()
            finally:
                audit.skip_loads = False

        runs |= {"warm": host, "skipped_load": skipped}
    found = subject.measured(runs)
    common = {"cached_hbm": cached[:2][-1], "block_tokens": size, "kv_groups": subject.num_groups}
    for row, counts, num_cached in zip(found.values(), looks, cached, strict=True):
        row |= {"kept": counts, "cached": num_cached, **common}
    return found


PHASES: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "kept": phase_kept,
    "prompts": phase_prompts,
    "crowd": phase_crowd,
    "load": phase_load,
    "sleep": phase_sleep,
}


def main(name: str, options: dict[str, Any]) -> None:
    begin = time.perf_counter()
    subject = Subject(name, options)
    config = subject.engine.engine.vllm_config
    result: dict[str, Any] = {
        "start_s": time.perf_counter() - begin,
        "parameters": subject.engine.num_parameters,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cudagraphs": str(config.compilation_config.cudagraph_mode),
        "kv_groups": len(paged_kv(subject.engine.engine)),
        "kv_strides": list(paged_kv(subject.engine.engine)[0][0].stride()),
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
        "phases": {},
    }
    for phase in options["phases"]:
        result["phases"][phase] = PHASES[phase](subject)
        if subject.audit is not None:
            subject.audit.forget()
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # skip the engine's shutdown, which can hang in some vLLM releases
