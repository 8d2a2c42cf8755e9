"""Stands for `kvloft.vllm.check`: an engine of `kvloft check` that the zygote forks, without
importing vLLM for half a minute.

``python -m e2e.forked JOB.json``, as kvloft.cli.check_engine starts it, is only a stub, which lives
as long as the engine. All that the engine does is `kvloft.vllm.check.run`.
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
    """Ask the zygote for an engine, and wait for its end."""
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
    """In the forked process: the engine, until it is done or process ``starter`` is gone."""
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
