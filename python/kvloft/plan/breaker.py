"""Stops loads and saves after many loads failed in a row, and tries again later.

A load that fails makes its request wait for nothing, and a save that fails evicts something for nothing. It must not know why.
"""

from __future__ import annotations

MAX_FAILED_LOADS = 8
"""After so many in a row the workers no longer move anything, and an offer only makes requests wait, or fail."""

RETRY_S = 60.0
"""How long nothing is offered or saved before the next try."""


class Breaker:
    """``retry_s`` infinite: what tripped stays so, because a try that fails would cost a request its answer."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._failed_in_a_row = 0
        self._open_until_s = 0.0

    @property
    def has_tripped(self) -> bool:
        """Loads failed, and none has succeeded since."""
        return self._failed_in_a_row >= MAX_FAILED_LOADS

    def lets_pass(self, now_s: float) -> bool:
        """Whether copies are worth planning: before it trips, and again once its time is over."""
        return not self.has_tripped or now_s >= self._open_until_s

    def count(self, now_s: float, *, failed: bool) -> bool:
        """A load ended, on all ranks. True if it was one failure too many."""
        let_pass = self.lets_pass(now_s)
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
        if not (self.has_tripped and let_pass):
            return False
        self._open_until_s = now_s + self._retry_s
        return True
