"""What a first token's time is made of: the host's until the first forward starts, the GPU's until the last ends, and the rest.

Whole times scatter by a percent with the GPU's clock and the host's cores; the parts say where a connector's share is. It must not
know connectors.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from kvloft.transfer.cuda import driver


class Parts(NamedTuple):
    """Of one request, in seconds."""

    before_s: float
    """From `ForwardParts.start` until its first forward was launched on a GPU that had nothing to do."""
    gpu_s: float
    """From there to the end of its last forward."""
    after_s: float
    """Until the caller had the token."""


class ForwardParts:
    """Goes around the forwards of ``model`` from its construction until `close`."""

    def __init__(self, model: Any, stream: Any) -> None:
        """``stream()`` is the `driver.Stream` that forwards are launched on."""
        self._stream = stream
        self._first, self._last = driver.Event(timing=True), driver.Event(timing=True)
        self._hooks = (model.register_forward_pre_hook(self._before), model.register_forward_hook(self._after))
        self.start()

    def start(self) -> None:
        """The request is sent now."""
        self._begin_s = time.perf_counter()
        self._first_s: float | None = None

    def take(self, seconds: float) -> Parts:
        """Of the request that was sent at `start` and took so many ``seconds``. Raises RuntimeError if it had no forward."""
        if self._first_s is None:
            raise RuntimeError("no forward was seen")
        driver.synchronize()
        gpu_s = self._last.seconds_since(self._first)
        before_s = self._first_s - self._begin_s
        return Parts(before_s, gpu_s, seconds - before_s - gpu_s)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, *_: Any) -> None:
        if self._first_s is None:
            self._first.record(self._stream())
            self._first_s = time.perf_counter()

    def _after(self, *_: Any) -> None:
        self._last.record(self._stream())
