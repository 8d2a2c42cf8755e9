"""Replaces `kvloft.vllm.check`: an engine of `kvloft check` that the zygote forks, which saves half
a minute of vLLM's import.

``python -m e2e.forked JOB.json``, as started by kvloft.cli.check_engine, is a stub that runs as
long as the engine. The engine runs `kvloft.vllm.check.run`.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path


def main(job: str) -> None:
    """Request an engine from the zygote, and wait for its end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["ZYGOTE"])
        message = {
            "op": "check",
            "job": job,
            "starter": os.getpid(),
            "prepare": os.environ["ZOO_PREPARE"],
        }
        connection.sendall(json.dumps(message).encode() + b"\n")
        connection.recv(1)


def run(job: str, starter: int, prepare: str) -> None:
    """In the forked process: run the engine until it is done or process ``starter`` has exited."""
    handle = os.pidfd_open(starter)

    def end_with_starter() -> None:
        select.select([handle], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_starter, daemon=True).start()
    if prepare:
        getattr(importlib.import_module(".zoo.kernels", __package__), prepare)()
    from kvloft.vllm.check import run

    run(json.loads(Path(job).read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
