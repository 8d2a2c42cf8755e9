"""Finds a request's longest stored prefix without hashing many tokens beyond that prefix."""

from kvloft.plan.request_state import RequestState
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session

FIRST_LOOKUP_TOKENS, LOOKUP_GROWTH = 512, 4
"""Number of tokens to hash for the first lookup, and the factor by which it grows for each later
lookup. The first lookup is small, because the forward pass waits for the hashes and an uncached
prompt needs only the first chunk's hash.
"""


class PrefixLookup:
    """Looks up prefixes in one store."""

    def __init__(self, store: Session, shape: CacheShape) -> None:
        self._store, self._unit_tokens = store, shape.unit_tokens
        self._is_divisible = shape.is_divisible

    def begin(self, request: RequestState) -> int:
        """Hash the tokens for the first lookup, and return the request's length in tokens."""
        return request.extend_chains(FIRST_LOOKUP_TOKENS)

    def find(self, request: RequestState, num_tokens: int) -> tuple[int, int]:
        """Return the number of leading units in host memory, and the number in any tier.

        ``num_tokens`` is the result of `begin`. Hashes and looks up more tokens as needed.
        """
        chain, limit = request.chain, FIRST_LOOKUP_TOKENS
        while True:
            host_units, stored_units = self._store.lookup(chain)
            # A longer chain does not help if the hit ends before the end of the chain.
            if stored_units < chain.num_blocks or chain.num_tokens >= num_tokens:
                break
            limit *= LOOKUP_GROWTH
            request.extend_chains(limit)
        if self._is_divisible:
            return host_units, stored_units
        most = self.max_units(num_tokens)
        return self._store.deepest_hit(chain, min(host_units, most), min(stored_units, most))

    def max_units(self, num_tokens: int) -> int:
        """Return the maximum number of units in a usable hit.

        vLLM must compute at least one token, and cannot shorten a hit by one token for models with
        sliding-window layers or Mamba states.
        """
        return (num_tokens - 1) // self._unit_tokens
