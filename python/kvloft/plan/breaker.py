"""Stops loads and saves after many loads failed in a row, and tries again later.

A load that fails makes its request wait for nothing, and a save that fails evicts something for nothing. It must not know why.
"""

from __future__ import annotations

MAX_FAILED_LOADS = 8
"""After so many in a row the workers move nothing any more, and an offer only makes requests wait, or fail."""

RETRY_S = 60.0
"""How long nothing is offered or saved before the next try."""


class Breaker:
    """``retry_s`` None: what tripped stays so, because a try that fails would cost a request its answer."""

    def __init__(self, retry_s: float | None) -> None:
        self._retry_s = retry_s
        self._failed_in_a_row = 0
        self._open_until_s: float | None = None
        self.has_tripped = False
        """Loads failed, and none has succeeded since."""

    def lets_pass(self, now_s: float) -> bool:
        """Whether copies are worth planning: before it trips, and again once its time is over."""
        return not self.has_tripped or (self._open_until_s is not None and now_s >= self._open_until_s)

    def count(self, now_s: float, *, failed: bool) -> bool:
        """A load ended, on all ranks. True if it was one failure too many."""
        if not failed:
            self._failed_in_a_row = 0
            self.has_tripped = False
            return False
        self._failed_in_a_row += 1
        if self._failed_in_a_row < MAX_FAILED_LOADS or not self.lets_pass(now_s):
            return False
        self.has_tripped = True
        self._open_until_s = None if self._retry_s is None else now_s + self._retry_s
        return True
