"""Lets a test hold forward passes in engines with worker processes so that the test decides how
long a step takes.

The processes communicate through the directory KV_HOLD. While this directory contains a file
`hold`, a forward pass writes `PID.held` and waits. For each chunk that a process writes to a frame,
it adds a line to `PID.stored`.
"""

import os
import time
from pathlib import Path
from typing import Any


def held_forwards() -> None:
    """Make each forward pass of a Llama model wait, and count the chunks that a process stores."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    from kvloft.transfer.frames import PrivatePart

    folder = Path(os.environ["KV_HOLD"])
    compute, store = LlamaForCausalLM.forward, PrivatePart.store

    def forward(*args: Any, **kwargs: Any) -> Any:
        if (folder / "hold").exists():
            (folder / f"{os.getpid()}.held").touch()
            while (folder / "hold").exists():
                time.sleep(0.01)
        return compute(*args, **kwargs)

    def counted(part: PrivatePart, *args: Any) -> None:
        store(part, *args)
        with (folder / f"{os.getpid()}.stored").open("a") as file:
            file.write("\n")

    LlamaForCausalLM.forward, PrivatePart.store = forward, counted  # type: ignore[method-assign]
