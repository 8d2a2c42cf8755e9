"""Runs an engine for `kvloft check` in a new process: ``python -m kvloft.vllm.check JOB.json``.

This process starts vLLM with the user's flags, with or without kvloft, runs the job's prompts, and
appends one JSON line per event to a file. The parent process compares the outputs. When the parent
exits, stdin closes, and this process and its workers exit.
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloft.errors import ConfigError
from kvloft.plan.disk_pacing import DiskPacing
from kvloft.vllm.check_prompts import choose_prompts
from kvloft.vllm.shape import KIND_OF_SPEC, group_layers, group_shape, layer_specs

NUM_OUTPUT_TOKENS = 24
NUM_SETTLING_STEPS = 200_000
COUNTERS = {
    "host": "vllm:kvloft_load_tokens_host_total",
    "disk": "vllm:kvloft_load_tokens_disk_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "errors": "vllm:kvloft_hook_errors_total",
    "damaged": "vllm:kvloft_verify_failures_total",
}


@dataclass(slots=True)
class Engine:
    """Runs prompts in an in-process vLLM engine, one at a time so that every pass has the same
    batch shapes.
    """

    llm: Any
    blocks: Counter[int] = field(default_factory=Counter)
    """Number of blocks loaded per KV cache group."""
    num_asked: int = 0

    @property
    def core(self) -> Any:
        return self.llm.engine_core.engine_core

    @property
    def config(self) -> Any:
        """Return vLLM's KVCacheConfig."""
        return self.core.scheduler.kv_cache_config

    def watch(self) -> None:
        """Count loaded blocks per group from the step plans, because no metric counts them."""
        connector = self.core.scheduler.connector
        if connector is None:
            return
        original = connector.build_connector_meta

        def build_connector_meta(scheduler_output: Any) -> Any:
            metadata = original(scheduler_output)
            for load in metadata.plan.loads:
                for group, chunks in load.chunks.by_group():
                    self.blocks[group] += len(chunks.block_ids())
            return metadata

        connector.build_connector_meta = build_connector_meta

    def ask(self, ids: Sequence[int]) -> dict[str, Any]:
        """Run a prompt and return its greedy tokens, their margins, and the counter increments.

        ``clear`` has one row per token: its log probability, its margin over the second-best token,
        and the second-best token's id.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=NUM_OUTPUT_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=2,
        )
        before, self.blocks = self.counters(), Counter()
        self.num_asked += 1
        self.llm.add_request(f"check-{self.num_asked}", {"prompt_token_ids": list(ids)}, params)
        last: Any = None
        while self.llm.has_unfinished_requests():
            last = next((output for output in self.llm.step() if output.finished), last)
        self.settle()
        counted = self.counters()
        said, clear = last.outputs[0], []
        for token, entry in zip(said.token_ids, said.logprobs or (), strict=False):
            second, other = max(
                (value.logprob, each) for each, value in entry.items() if each != token
            )
            clear.append([entry[token].logprob, entry[token].logprob - second, other])
        return {
            "prompt": len(ids),
            "tokens": list(said.token_ids),
            "clear": clear,
            "cached": last.num_cached_tokens or 0,
            "blocks": [self.blocks[group] for group in range(len(self.config.kv_cache_groups))],
            **{name: counted[name] - before[name] for name in COUNTERS},
        }

    def settle(self) -> None:
        """Run steps until no request or transfer is in flight."""
        for _ in range(NUM_SETTLING_STEPS):
            if not (self.core.scheduler.has_requests() or self.core.batch_queue):
                return
            self.llm.step()
        raise RuntimeError(
            f"the engine is still busy after {NUM_SETTLING_STEPS} steps: a request or a transfer "
            "did not complete"
        )

    def forget(self, *, connector: bool = False) -> None:
        """Clear vLLM's prefix cache and, with ``connector``, kvloft's cache."""
        if not self.llm.reset_prefix_cache(reset_connector=connector):
            raise RuntimeError(
                "vLLM did not clear its prefix cache: blocks are in use although no request is "
                "running"
            )

    def counters(self) -> Counter[str]:
        from prometheus_client import REGISTRY

        names = {metric: name for name, metric in COUNTERS.items()}
        found = Counter[str]()
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name in names:
                    found[names[sample.name]] += int(sample.value)
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Describe vLLM's KV cache groups in kvloft's terms."""
        found, specs = [], layer_specs(self.config)
        for group in self.config.kv_cache_groups:
            spec = specs[group.layer_names[0]]
            name = type(spec).__name__
            shape = group_shape(spec) if name in KIND_OF_SPEC else None
            found.append(
                {
                    "kind": shape.kind if shape else name,
                    "reach": shape.reach if shape else 0,
                    "block_tokens": group.kv_cache_spec.block_size,
                    "layers": len(group.layer_names),
                    "is_draft": bool(getattr(group, "is_eagle_group", False)),
                }
            )
        return found

    def facts(self) -> dict[str, Any]:
        """Return the engine's model, KV cache groups and capacity.

        ``full_requests`` is the number of max_model_len requests that fit into KV memory, and
        ``request_bytes`` is the KV size of one such request. Both are None if unknown. Compare
        engines by ``request_bytes``, because block sizes depend on the number of groups.
        """
        from vllm.v1.core import kv_cache_utils

        config, vllm_config = self.config, self.llm.vllm_config
        concurrency = getattr(kv_cache_utils, "get_max_concurrency_for_kv_cache_config", None)
        full_requests = concurrency(vllm_config, config) if concurrency else None
        specs = layer_specs(config)  # groups share tensors, so the largest group sets the size
        kv_bytes = config.num_blocks * max(
            sum(specs[name].page_size_bytes for name in names) for names in group_layers(config)
        )
        return {
            "architecture": vllm_config.model_config.architecture,
            "dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
            "max_model_len": vllm_config.model_config.max_model_len,
            "groups": self.groups(),
            "hit_tokens": getattr(config, "cache_hit_alignment_tokens", None)
            or vllm_config.cache_config.block_size,
            "blocks": config.num_blocks,
            "full_requests": full_requests and round(full_requests, 2),
            "request_bytes": full_requests and round(kv_bytes / full_requests),
            "drafter": getattr(vllm_config.speculative_config, "method", None),
        }


def start(job: dict[str, Any]) -> tuple[Engine, list[str]]:
    """Start the engine, and return the engine and the ignored flags. Raises ConfigError if the
    flags set a different connector.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="kvloft check MODEL --"))
    parsed, ignored = parser.parse_known_args(["--model", job["model"], *job["flags"]])
    args = EngineArgs.from_cli_args(parsed)
    args.disable_log_stats, args.data_parallel_size = False, 1
    given, args.kv_transfer_config = args.kv_transfer_config, None
    if given is not None and given.kv_connector != "KVLoftConnector":
        raise ConfigError(
            f"--kv-transfer-config sets kv_connector={given.kv_connector}; kvloft check supports "
            "only KVLoftConnector"
        )
    if job["disk_path"] is not None:
        extra = (given.kv_connector_extra_config if given else {}) | job["extra"]
        extra |= {"disk_path": job["disk_path"], "disk_size": job["disk_size"]}
        args.kv_transfer_config = KVTransferConfig(
            kv_connector="KVLoftConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
    # Load from disk even if recomputing is faster: only loaded chunks get checked.
    DiskPacing.always_pays = True
    engine = Engine(LLMEngine.from_engine_args(args))
    engine.watch()
    return engine, ignored


def run(job: dict[str, Any]) -> None:
    """Start an engine, run the job's passes, and write events to ``job["events"]``."""
    with Path(job["events"]).open("a", buffering=1) as file:

        def report(event: str, **what: Any) -> None:
            print(json.dumps({"event": event, **what}), file=file)

        try:
            engine, ignored = start(job)
            report("started", facts=engine.facts(), ignored=ignored)
            _run_passes(engine, job, report)
            engine.llm.engine_core.shutdown()
            report("done")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported before the process exits
            traceback.print_exc()
            report("failed", error=f"{type(error).__name__}: {error}")


def _run_passes(engine: Engine, job: dict[str, Any], report: Any) -> None:
    prompts: dict[str, list[int]] = job["prompts"]
    if not prompts:
        chosen = choose_prompts(engine, NUM_OUTPUT_TOKENS)
        prompts = {name: ids for name, (ids, _) in chosen.items()}
        report("prompts", prompts=prompts)
        report("pass", name="plain", answers={name: answer for name, (_, answer) in chosen.items()})
    for name in job["passes"]:
        if name == "reset":
            engine.forget(connector=True)
        answers = {}
        for prompt, ids in prompts.items():
            if prompt.startswith("fork") != (name == "fork"):
                continue
            if name not in ("cold", "reset"):
                engine.forget()
            if name == "own":
                engine.ask(ids)
            answers[prompt] = engine.ask(ids)
        report("pass", name=name, answers=answers)


def end_with_parent() -> None:
    """Kill this process group when stdin closes, which happens when the parent exits."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    run(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a hung worker or thread must not delay the exit
