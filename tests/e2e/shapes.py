"""Makes vLLM's CPU engine behave like the GPU engine, with async scheduling and the scheduler
output of Model Runner V2.

The CPU platform disables async scheduling and always uses Model Runner V1, although V1 supports
async scheduling. For V2, the scheduler emits output in V2's format, which kvloft receives. The
output is converted to V1's format just before the V1 worker receives it. This module runs only in
the engine's process.
"""

from typing import Any


def allow_async_scheduling() -> None:
    """Keep the value of ``async_scheduling``, which the CPU platform sets to False."""
    from vllm.platforms.cpu import CpuPlatform

    original: Any = CpuPlatform.check_and_update_config.__func__  # pyright: ignore

    def check(cls: type, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = bool(wanted)

    CpuPlatform.check_and_update_config = classmethod(check)  # pyright: ignore


def emit_v2_shape(scheduler: Any) -> None:
    """Make ``scheduler`` emit V2's format until build_connector_meta, and V1's afterwards."""
    scheduler.use_v2_model_runner = True
    original = scheduler._update_after_schedule
    started: set[str] = set()
    previous: set[str] = set()

    def update_after_schedule(output: Any) -> None:
        started.difference_update(output.finished_req_ids)
        _to_v1_shape(scheduler, output, started, previous)
        started.update(new.req_id for new in output.scheduled_new_reqs)
        previous.clear()
        previous.update(output.num_scheduled_tokens)
        original(output)

    scheduler._update_after_schedule = update_after_schedule


def _to_v1_shape(scheduler: Any, output: Any, started: set[str], previous: set[str]) -> None:
    cached = output.scheduled_cached_reqs
    fresh = [new for new in output.scheduled_new_reqs if new.req_id not in started]
    resumed = [new for new in output.scheduled_new_reqs if new.req_id in started]
    for new in fresh:
        assert new.prefill_token_ids is not None, "the scheduler did not emit V2's shape"
        new.prefill_token_ids = None
    for new in resumed:
        request = scheduler.requests[new.req_id]
        cached.req_ids.append(new.req_id)
        cached.resumed_req_ids.add(new.req_id)
        cached.new_block_ids.append(new.block_ids)
        cached.num_computed_tokens.append(new.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens + request.num_output_placeholders)
    for req_id in cached.req_ids:
        if req_id not in previous or req_id in cached.resumed_req_ids:
            cached.all_token_ids[req_id] = list(scheduler.requests[req_id].all_token_ids)
    output.scheduled_new_reqs = fresh


def preempt_as_0_26(scheduler: Any) -> None:
    """Make ``scheduler`` preempt like vLLM 0.26 to 0.29, which continue to preempt requests even if
    the blocks of the last preempted request cannot be freed yet. vLLM 0.30 and newer stop in this
    case.
    """
    import sys

    original = scheduler._request_blocks_can_be_freed

    def request_blocks_can_be_freed(request: Any) -> bool:
        return sys._getframe(1).f_code.co_name == "schedule" or original(request)

    scheduler._request_blocks_can_be_freed = request_blocks_can_be_freed


def fork_processes() -> None:
    """Make vLLM fork its engine and worker processes.

    By default, the CPU platform spawns these processes, which requires two more imports of vLLM (40
    s).
    """
    import os

    from vllm.platforms.cpu import CpuPlatform

    original: Any = CpuPlatform.check_and_update_config.__func__  # pyright: ignore

    def check(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check)  # pyright: ignore
