"""Finds the deepest stored prefix of a request, and hashes few more tokens than are found."""

from kvloft.plan.request_state import RequestState
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session

FIRST_LOOKUP_TOKENS, LOOKUP_GROWTH = 512, 4
"""Tokens hashed for the first lookup, and the factor for each further one. For an unknown prompt
the first chunk decides, and its forward pass waits for the keys.
"""


class PrefixLookup:
    """Lookups in one store."""

    def __init__(self, store: Session, shape: CacheShape) -> None:
        self._store, self._unit_tokens = store, shape.unit_tokens
        self._is_divisible = shape.is_divisible

    def begin(self, request: RequestState) -> int:
        """Hash the tokens of the first lookup and return the length of the request."""
        return request.extend_chains(FIRST_LOOKUP_TOKENS)

    def find(self, request: RequestState, num_tokens: int) -> tuple[int, int]:
        """Return the leading units found in host memory, and in any tier, after `begin` returned
        ``num_tokens``. Looks up all tokens of the request if necessary.
        """
        chain, limit = request.chain, FIRST_LOOKUP_TOKENS
        while True:
            host_units, stored_units = self._store.lookup(chain)
            # A hit that ends before the chain does ends there with a longer chain, too.
            if stored_units < chain.num_blocks or chain.num_tokens >= num_tokens:
                break
            limit *= LOOKUP_GROWTH
            request.extend_chains(limit)
        if self._is_divisible:
            return host_units, stored_units
        most = self.max_units(num_tokens)
        return self._store.deepest_hit(chain, min(host_units, most), min(stored_units, most))

    def max_units(self, num_tokens: int) -> int:
        """Return the units of the deepest usable hit. With windows and states, vLLM cannot shorten
        a hit by one token to leave one to compute.
        """
        return (num_tokens - 1) // self._unit_tokens
