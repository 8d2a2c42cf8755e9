"""Splits the time to first token into parts before, during and after the forward passes.

The total varies by about one percent with the GPU clock and host load. The parts show where a
connector adds time.
"""

from __future__ import annotations

import gc
import time
from typing import Any, NamedTuple

from kvloft.transfer.cuda import driver


class Parts(NamedTuple):
    """Time in seconds spent in each part, for one request or for requests sent together."""

    before_s: float
    """Time from `ForwardParts.start` until the first forward pass is launched on an idle GPU."""
    gpu_s: float
    """Time from the start of the first forward pass to the end of the last forward pass."""
    between_s: float
    """Total time between forward passes; included in ``gpu_s``."""
    after_s: float
    """Time from the end of the last forward pass until the caller receives the last token."""
    collected_s: float
    """Time spent in Python's garbage collector; included in the other parts."""


MAX_FORWARDS = 256


class ForwardParts:
    """Measures the forward passes of ``model`` with hooks, which `close` removes."""

    def __init__(self, model: Any, stream: Any) -> None:
        """``stream()`` returns the `driver.Stream` of the forward passes."""
        self._stream = stream
        self._begins, self._ends = (
            [driver.Event(timing=True) for _ in range(MAX_FORWARDS)] for _ in range(2)
        )
        self._hooks = (
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        )
        gc.callbacks.append(self._collecting)
        self.start()

    def start(self) -> None:
        """Start a measurement. Call this immediately before sending the request."""
        self._begin_s = time.perf_counter()
        self._first_s: float | None = None
        self._collected_s = 0.0
        self._num = 0

    def take(self, seconds: float) -> Parts | None:
        """Return the parts of a request that took ``seconds`` since `start`.

        Returns None if the hooks recorded no forward pass, as in a CUDA graph replay, or too many
        forward passes.
        """
        if self._first_s is None or self._num > MAX_FORWARDS:
            return None
        driver.synchronize()
        begins, ends = self._begins[: self._num], self._ends[: self._num]
        gpu_s = ends[-1].seconds_since(begins[0])
        between_s = sum(
            begin.seconds_since(end) for end, begin in zip(ends, begins[1:], strict=False)
        )
        before_s = self._first_s - self._begin_s
        return Parts(before_s, gpu_s, between_s, seconds - before_s - gpu_s, self._collected_s)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began_s = time.monotonic()
        else:
            self._collected_s += time.monotonic() - self._collection_began_s

    def _before(self, *_: Any) -> None:
        if self._num < MAX_FORWARDS:
            self._begins[self._num].record(self._stream())
        if self._first_s is None:
            self._first_s = time.perf_counter()

    def _after(self, *_: Any) -> None:
        if self._num < MAX_FORWARDS:
            self._ends[self._num].record(self._stream())
        self._num += 1
