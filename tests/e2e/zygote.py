"""Imports vLLM once, then forks one engine process per connection.

Importing vLLM takes 10 to 30 s on two cores, while building an engine takes 2 s. With one fork per
engine, restarts are cheap enough for tests. Each connection to the Unix socket is handled by a
child process that uses the JSON protocol of engine.py. The zygote itself never runs a torch
operation, so no thread pool exists when it forks. The command is ``python -m <package>.zygote
SOCKET PARENT``.
"""

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys

PRELOAD = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.model_executor.models.llama",
    "vllm.lora.request",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.fused_moe.oracle.int8",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.entrypoints.openai.api_server",
)


def preload() -> None:
    """Import the modules that every engine uses. Ignore modules that this vLLM release lacks."""
    import importlib

    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for work in (configure_logging, describe_flags, replace_kernels):
        with contextlib.suppress(ImportError, AttributeError):
            work()
    always_wait_for_disk()
    gc.unfreeze = lambda: None  # an exiting engine would unfreeze and traverse all imported objects
    import vllm.model_executor.models.registry as registry

    # vLLM inspects model classes in a new process (another 20 s of imports). The tests' models can
    # be inspected in this process.
    registry._run_in_subprocess = lambda fn: fn()


def configure_logging() -> None:
    """Configure logging once for all engines, because this visits every logger."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())


def describe_flags() -> None:
    """Generate the descriptions of vLLM's flags, which vLLM caches, once for all engines (1 s)."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    EngineArgs.add_cli_args(FlexibleArgumentParser())


def always_wait_for_disk() -> None:
    """Make requests wait for the disk even if computing is faster.

    Tests count the tokens that are loaded, on machines of any speed. With KV_DISK_PACING=1,
    requests wait for the disk only if it is faster.
    """
    from kvloft.plan.disk_pacing import DiskPacing

    DiskPacing.always_pays = os.environ.get("KV_DISK_PACING") != "1"


def replace_kernels() -> None:
    """Replace vLLM's GPU-only kernels before forking, because vLLM searches every module for these
    kernels.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda _cls: None)


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent exits. Exit if the parent has already
    exited.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the tests that started this process have exited")


def main(path: str, parent: int) -> None:
    """Fork engines until the parent exits."""
    end_with(parent)
    preload()
    gc.collect()
    # Without a freeze, garbage collection in an engine would write to the shared pages and thereby
    # copy them.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen(16)
        os.rename(f"{path}.new", path)  # clients connect when the file exists
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _child(connection)
            connection.close()


def _child(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    from . import engine

    status = 1
    try:
        status = engine.serve(connection)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
