"""Runs a real vLLM engine in this process. A test controls it through JSON lines on a socket.

Every message is ``{"op": name, ...}``, and every response is ``{"ok": value}`` or ``{"error":
text}``. The engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so the test
decides when a step runs. This module must not import tests, and it refers to kvloft only through
the arguments that a test sends.
"""

import base64
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import shapes
from .zygote import end_with

STALL_STEPS = 20000


class Engine:
    """The operations that tests can call. Each ``do_*`` method is an operation."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.core: Any = None
        self.away = contextlib.ExitStack()
        self.internal: dict[str, str] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.admissions: list[dict[str, Any]] = []
        self.hooks_s: list[float] = []
        """Each step's time in the scheduler-side connector since `do_time_hooks`."""

    # -- start and stop
    # -----------------------------------------------------------------------------------------

    def do_start(
        self,
        kwargs: dict[str, Any],
        env: dict[str, str],
        log: str,
        v2_shape: bool = False,
        prepare: str = "",
    ) -> int:
        """Build the engine with ``kwargs`` for vLLM's EngineArgs, redirect output to the file
        ``log``, and return the id of this process.

        ``prepare`` is the name of a function in zoo/kernels.py that is called first.
        """
        _redirect(log)
        os.environ.update(env)
        if prepare:
            getattr(importlib.import_module(".zoo.kernels", __package__), prepare)()
        if kwargs.get("async_scheduling"):
            shapes.allow_async_scheduling()
        num_ranks = kwargs.get("tensor_parallel_size", 1) * kwargs.get("pipeline_parallel_size", 1)
        if num_ranks > 1 or kwargs.get("distributed_executor_backend") == "mp":
            shapes.fork_processes()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if transfer := kwargs.get("kv_transfer_config"):
            from vllm.config import KVTransferConfig

            kwargs["kv_transfer_config"] = KVTransferConfig(**transfer)
        if events := kwargs.get("kv_events_config"):
            from vllm.config.kv_events import KVEventsConfig

            kwargs["kv_events_config"] = KVEventsConfig(**events)
        self.llm = LLMEngine.from_engine_args(EngineArgs(**kwargs))
        self.core = self.llm.engine_core.engine_core
        if v2_shape:
            shapes.emit_v2_shape(self.core.scheduler)
        self._watch_admissions()
        return os.getpid()

    def _watch_admissions(self) -> None:
        """Record, at each admission of a request, the number of external tokens that the scheduler
        accepted from the connector.
        """
        connector = self.core.scheduler.connector
        if connector is None:
            return
        original = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens or request.status.name != "WAITING_FOR_REMOTE_KVS":
                self.admissions.append(
                    {
                        "id": request.request_id,
                        "external": num_external_tokens,
                        "resumed": request.num_preemptions > 0,
                    }
                )
            return original(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = update_state_after_alloc

    def do_stop(self) -> None:
        """Shut down the engine cleanly. The process exits after sending the response."""
        self.llm.engine_core.shutdown()
        raise SystemExit(0)

    # -- requests
    # -----------------------------------------------------------------------------------------

    def do_add(self, requests: list[dict[str, Any]]) -> None:
        """Add requests to the queue (client.Req defines the fields)."""
        for fields in requests:
            self._add(**fields)

    def _add(
        self,
        id: str,
        max_tokens: int,
        ids: list[int] | None = None,
        embeds: str | None = None,
        width: int = 0,
        is_token: list[bool] | None = None,
        salt: str | None = None,
        lora: list[Any] | None = None,
        skip_reading: bool = False,
        logprobs: int | None = None,
    ) -> None:
        import numpy as np
        import torch
        from vllm.lora.request import LoRARequest

        from vllm import SamplingParams

        prompt: dict[str, Any] = {}
        if embeds is not None:
            rows = np.frombuffer(base64.b64decode(embeds), dtype=np.float32).reshape(-1, width)
            prompt["prompt_embeds"] = torch.from_numpy(rows.copy())
        if ids is not None:
            prompt["prompt_token_ids"] = ids
        if is_token is not None:
            prompt["prompt_is_token_ids"] = is_token
        if salt is not None:
            prompt["cache_salt"] = salt
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            skip_reading_prefix_cache=skip_reading or None,
        )
        adapter = LoRARequest(*lora[:3], load_inplace=lora[3:] == [True]) if lora else None
        self.internal[id] = self.llm.add_request(id, prompt, params, lora_request=adapter)

    def do_step(self, count: int = 1) -> list[str]:
        """Run ``count`` engine steps and return the ids of the requests that finished."""
        finished: list[str] = []
        for _ in range(count):
            self.hooks_s.append(0.0)
            for output in self.llm.step():
                if output.finished:
                    self.results[output.request_id] = self._result(output)
                    finished.append(output.request_id)
        return finished

    def do_run(self) -> dict[str, dict[str, Any]]:
        """Step until the engine and its transfers are idle, then return all results and delete
        them.
        """
        for _ in range(STALL_STEPS):
            if not self._busy():
                break
            self.do_step()
        else:
            raise RuntimeError(f"the engine does not become idle: {self.do_state()}")
        results, self.results = self.results, {}
        return results

    def _busy(self) -> bool:
        queue = self.core.batch_queue
        return (
            self.llm.has_unfinished_requests() or self.core.scheduler.has_requests() or bool(queue)
        )

    def _result(self, output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        margin = None
        if completion.logprobs:
            tops = [
                sorted((x.logprob for x in entry.values()), reverse=True)
                for entry in completion.logprobs
            ]
            margin = min(top[0] - top[1] for top in tops)
        internal = self.internal.get(output.request_id, output.request_id)
        mine = [a for a in self.admissions if a["id"] == internal]
        return {
            "tokens": list(completion.token_ids),
            "finish": completion.finish_reason,
            "margin": margin,
            "cached": output.num_cached_tokens,
            "external": [a["external"] for a in mine if not a["resumed"]],
            "resumed": [a["external"] for a in mine if a["resumed"]],
        }

    def do_abort(self, ids: list[str]) -> None:
        """Abort requests in any state. ``ids`` contains the ids that the test assigned."""
        self.llm.abort_request([self.internal[i] for i in ids], internal=True)

    # -- everything else
    # -----------------------------------------------------------------------------------------

    def do_reset(self, connector: bool = False, running: bool = False) -> bool:
        """Call reset_prefix_cache and return True if it succeeded. vLLM rejects the call while a
        batch in flight or a load holds blocks.
        """
        try:
            return bool(
                self.llm.reset_prefix_cache(
                    reset_running_requests=running, reset_connector=connector
                )
            )
        except RuntimeError as error:
            if "remote KV transfer" not in str(error):
                raise
            return False

    def do_print(self) -> str:
        """Return the output of ``print(llm)`` for an LLM object with this engine."""
        from vllm import LLM

        llm = object.__new__(LLM)
        llm.llm_engine, llm._cached_repr = self.llm, None
        return repr(llm)

    def do_rpc(self, method: str, args: list[Any]) -> None:
        """Call vLLM's collective_rpc."""
        self.llm.collective_rpc(method, args=tuple(args))

    def do_core(self, method: str, kwargs: dict[str, Any]) -> None:
        """Call a method of vLLM's engine core: sleep, wake_up, pause_scheduler,
        resume_scheduler.
        """
        getattr(self.core, method)(**kwargs)

    def do_old_preemption(self, deferred: bool) -> None:
        """Make the scheduler preempt requests as vLLM 0.26 does and, with ``deferred``, defer the
        freeing of blocks.
        """
        shapes.preempt_as_0_26(self.core.scheduler)
        if deferred:
            self.core.scheduler.defer_block_free = True

    def do_reload(self, path: str) -> None:
        """Load another model's weights into the running engine."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def do_state(self) -> dict[str, Any]:
        """Return the requests' statuses by id, the block pool's state and other scheduler state."""
        scheduler = self.core.scheduler
        back = {v: k for k, v in self.internal.items()}
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "status": {back.get(r, r): q.status.name for r, q in scheduler.requests.items()},
            "computed": {
                back.get(r, r): q.num_computed_tokens for r, q in scheduler.requests.items()
            },
            "tokens": {back.get(r, r): q.num_tokens for r, q in scheduler.requests.items()},
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": pool.get_num_free_blocks(),
            "num_blocks": pool.num_gpu_blocks,
            "block_size": scheduler.block_size,
            "scheduler": type(scheduler).__name__,
            "v2_shape": bool(scheduler.use_v2_model_runner),
            "busy": self._busy(),
        }

    def do_metrics(self) -> dict[str, float]:
        """Return the counters and gauges of vLLM and kvloft, summed over labels.

        Histograms are returned as _sum and _count.
        """
        from prometheus_client import REGISTRY

        totals: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def do_call(self, path: str, args: list[Any] | None = None) -> Any:
        """Read or call the attribute at the dotted ``path`` in the scheduler-side connector, for
        white-box checks.
        """
        value = self.core.scheduler.connector
        for name in path.split("."):
            value = getattr(value, name)
        value = value(*(args or [])) if callable(value) else value
        return json.loads(json.dumps(value, default=repr))

    def do_probe(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a function of zoo/probe.py."""
        return getattr(importlib.import_module(".zoo.probe", __package__), name)(
            self.llm, **arguments
        )

    def do_time_hooks(self) -> None:
        """Start measuring each step's time in the scheduler-side connector."""
        connector = self.core.scheduler.connector
        names = (
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "update_connector_output",
        )

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def hook(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.hooks_s[-1] += time.perf_counter() - begin

            return hook

        for name in (*names, "request_finished", "request_finished_all_groups"):
            if hasattr(connector, name):
                setattr(connector, name, timed(getattr(connector, name)))
        self.do_hooks_s()

    def do_hooks_s(self) -> list[float]:
        """Return the seconds that each step spent in the connector since the last call."""
        taken, self.hooks_s = self.hooks_s, [0.0]
        return taken

    def do_detach(self, away: bool) -> None:
        """Detach the connector, as the benches do, or reattach it."""
        from benches.gpu.attached import detached

        if away:
            self.away.enter_context(detached(self.llm))
        else:
            self.away.close()

    def do_serve_http(self, argv: list[str], env: dict[str, str], log: str) -> int:
        """Run ``vllm serve`` in a child process and return the child's id.

        The `vllm` command does not work in the CPU package. A single API server is run as a module;
        multiple API servers require the function behind the command.
        """

        def run() -> None:
            shapes.fork_processes()
            if "--api-server-count" in argv:
                from vllm.entrypoints.cli import serve
                from vllm.utils.argparse_utils import FlexibleArgumentParser

                serve.ServeSubcommand.cmd(
                    serve.make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
                )
            else:
                sys.argv = ["api_server", *argv]
                runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

        return _fork(run, env, log)

    def do_bench(self, argv: list[str], log: str) -> int:
        """Run ``vllm bench serve`` to completion and return its exit status."""

        def run() -> None:
            from vllm.benchmarks.serve import add_cli_args, main
            from vllm.utils.argparse_utils import FlexibleArgumentParser

            parser = FlexibleArgumentParser()
            add_cli_args(parser)
            main(parser.parse_args(argv))

        return os.waitstatus_to_exitcode(os.waitpid(_fork(run, {}, log), 0)[1])

    def do_check(self, job: str, starter: int, prepare: str) -> None:
        """Run an engine of `kvloft check` in this process and exit (see forked.py)."""
        _redirect(str(Path(job).with_suffix(".log")))
        importlib.import_module(".forked", __package__).run(job, starter, prepare)
        raise SystemExit(0)


def _fork(run: Callable[[], None], env: dict[str, str], log: str) -> int:
    """Run ``run`` in a child process, which exits when this process exits."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        end_with(parent)
        os.setsid()
        _redirect(log)
        os.environ.update(env)
        run()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _redirect(path: str) -> None:
    """Redirect the output of this process and its libraries to a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, sys.stdout.fileno() if sys.stdout else 1)
    os.dup2(fd, 2)
    os.close(fd)


def serve(connection: socket.socket) -> int:
    """Handle messages until ``stop`` or until the connection closes, and return the exit status."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = Engine()
    stream = connection.makefile("rw")
    for line in stream:
        message: dict[str, Any] = json.loads(line)
        done = False
        try:
            answer: dict[str, Any] = {"ok": getattr(engine, "do_" + message.pop("op"))(**message)}
        except SystemExit:
            answer, done = {"ok": None}, True
        except BaseException:
            answer = {"error": traceback.format_exc()}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
        if done:
            return 0
    return 0
