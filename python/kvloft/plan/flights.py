"""Loads on their way to the GPU: a request that wants the same blocks waits for them and then shares them.

vLLM caches the blocks of a load when it promotes the request that waited for it, which it does before it asks about others.
It must not know the store.
"""

from __future__ import annotations

from kvloft.seam.ids import ReqId
from kvloft.seam.store import KeyChain


class Flight:
    """Blocks [begin, end) of ``chain`` on their way. ``has_ended``: nothing is to be waited for any more."""

    __slots__ = ("began_s", "begin", "chain", "end", "has_ended")

    def __init__(self, chain: KeyChain, begin: int, end: int, began_s: float) -> None:
        self.chain = chain
        self.begin = begin
        self.end = end
        self.began_s = began_s
        self.has_ended = False


class Flights:
    """At most one flight a request: from its admission until vLLM admits it again with what was loaded."""

    def __init__(self) -> None:
        self._by_request: dict[ReqId, Flight] = {}

    def num_since(self, time_s: float) -> int:
        """Flights that began then or later: one that hangs holds nobody up for long."""
        return sum(flight.began_s >= time_s for flight in self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, req_id: ReqId, flight: Flight) -> None:
        """Blocks of ``req_id`` are being loaded from now on."""
        self.end(req_id)
        self._by_request[req_id] = flight

    def end(self, req_id: ReqId) -> None:
        """The load of ``req_id`` failed, its request ended, or its blocks are in vLLM's own cache."""
        if (flight := self._by_request.pop(req_id, None)) is not None:
            flight.has_ended = True

    def find(self, chain: KeyChain, block: int) -> Flight | None:
        """A flight that brings block ``block`` of ``chain``; keys cover all that comes before a block."""
        for flight in self._by_request.values():
            if flight.begin <= block < flight.end and flight.chain.key(block) == chain.key(block):
                return flight
        return None

    def clear(self) -> None:
        """Forget everything."""
        for req_id in list(self._by_request):
            self.end(req_id)
