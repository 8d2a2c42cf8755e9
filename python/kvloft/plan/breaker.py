"""The circuit breaker: pauses loads and saves after many failed loads in a row, and retries later.

Each failed load makes its request wait in vain, and each failed save evicts a chunk in vain.
"""

MAX_FAILED_LOADS = 8
"""Failed loads in a row that trip the breaker."""

RETRY_S = 60.0
"""Pause before the next attempt."""


class CircuitBreaker:
    """Counts failed loads in a row.

    ``retry_s`` is infinite if a failed attempt would end a request with an error: once tripped, the
    breaker stays open.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._failed_in_a_row = 0
        self._open_until_s = 0.0

    @property
    def has_tripped(self) -> bool:
        """True if too many loads failed, and none has succeeded since."""
        return self._failed_in_a_row >= MAX_FAILED_LOADS

    def allows(self, now_s: float) -> bool:
        """Return True if copies may be planned: before it trips, and after the pause."""
        return not self.has_tripped or now_s >= self._open_until_s

    def count(self, now_s: float, *, failed: bool) -> bool:
        """Count a load that ended on all ranks. Returns True if the breaker trips with it."""
        was_allowed = self.allows(now_s)
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
        if not (self.has_tripped and was_allowed):
            return False
        self._open_until_s = now_s + self._retry_s
        return True
