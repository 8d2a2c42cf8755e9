"""Finds the deepest stored prefix of a request, and hashes few more tokens than are found."""

from __future__ import annotations

from dataclasses import dataclass

from kvloft.plan.request_state import RequestState
from kvloft.seam.shape import CacheShape
from kvloft.seam.store import Session

FIRST_LOOKUP_TOKENS, LOOKUP_GROWTH = 512, 4
"""Tokens hashed for the first lookup, and the factor for each further one. For an unknown prompt
the first chunk decides, and its forward pass waits for the keys."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Leading units found in host memory, and in any tier."""

    host_units: int
    stored_units: int


class PrefixLookup:
    """Lookups in one store."""

    def __init__(self, store: Session, shape: CacheShape) -> None:
        self._store, self._shape = store, shape

    def begin(self, request: RequestState) -> int:
        """Hash the tokens of the first lookup and return the length of the request."""
        return request.extend_chains(FIRST_LOOKUP_TOKENS)

    def find(self, request: RequestState) -> Hit:
        """Return the deepest hits of the request, with a lookup of all its tokens if necessary."""
        limit = FIRST_LOOKUP_TOKENS
        while True:
            num_tokens = request.extend_chains(limit)
            host_units, stored_units = self._store.lookup(request.chain)
            # A hit that ends before the chain does ends there with a longer chain, too.
            if stored_units < request.chain.num_blocks or request.chain.num_tokens >= num_tokens:
                break
            limit *= LOOKUP_GROWTH
        if self._shape.is_divisible:
            return Hit(host_units, stored_units)
        most = self.max_units(num_tokens)
        bounds = min(host_units, most), min(stored_units, most)
        return Hit(*self._store.deepest_hit(request.chain, *bounds))

    def max_units(self, num_tokens: int) -> int:
        """Return the units of the deepest usable hit. With windows and states, vLLM cannot go back
        one token to have one left to compute.
        """
        return (num_tokens - 1) // self._shape.unit_tokens
