"""The circuit breaker pauses loads and saves after too many consecutive load failures.

Without the breaker, each failed load would delay a request, and each failed save would evict a
chunk.
"""

MAX_FAILED_LOADS = 8
"""Number of consecutive failed loads that trip the breaker."""

RETRY_S = 60.0
"""Time in seconds from the breaker's trip to the first retry."""


class CircuitBreaker:
    """Counts consecutive failed loads.

    If a failed load makes its request fail, ``retry_s`` is infinite and the breaker never retries.
    """

    def __init__(self) -> None:
        self.retry_s = RETRY_S
        """Duration of the pause after too many failed loads, in seconds."""
        self._failed_in_a_row = 0
        self._open_until_s = 0.0

    @property
    def has_tripped(self) -> bool:
        """True if too many loads have failed and none has succeeded since."""
        return self._failed_in_a_row >= MAX_FAILED_LOADS

    def allows(self, now_s: float) -> bool:
        """Return True if the breaker has not tripped or the pause is over."""
        return not self.has_tripped or now_s >= self._open_until_s

    def count(self, now_s: float, *, failed: bool) -> bool:
        """Record a completed load or a failed save. Return True if this trips the breaker."""
        was_allowed = self.allows(now_s)
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
        if not (self.has_tripped and was_allowed):
            return False
        self._open_until_s = now_s + self.retry_s
        return True
