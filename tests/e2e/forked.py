"""Replaces `kvloft.vllm.check` with an engine that the zygote forks, which avoids another import of
vLLM (half a minute).

kvloft.cli.check_engine starts ``python -m e2e.forked JOB.json``, a stub that runs as long as the
engine. The engine runs `kvloft.vllm.check.run`.
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
    """Request an engine from the zygote and wait until the engine exits."""
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
    """Run the engine in this forked process until it finishes or process ``starter`` exits."""
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
