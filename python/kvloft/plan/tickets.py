"""Which saves are in flight: each ticket, and how many ranks have yet to report it.

A ticket is settled once, by the last rank's report (I10); it is committed only if no rank failed it (I3). A report can name
a whole prompt's chunks, so what is usual is done in columns: a rank reports tickets that have all been planned and failed none.
It must not know the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import ChunkKey, Ticket


@dataclass(slots=True)
class Settled:
    """What one report settled, in the order of arrival; ``superseded`` are chunks that the committed ones replace."""

    committed: Sequence[Ticket] = ()
    aborted: Sequence[Ticket] = ()
    superseded: Sequence[ChunkKey] = ()


class Tickets:
    """Saves that some worker has not reported yet."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.in_flight: dict[Ticket, int] = {}
        """Ranks that have yet to report it."""
        self._failed: set[Ticket] = set()
        self._supersedes: dict[Ticket, ChunkKey] = {}

    def __len__(self) -> int:
        return len(self.in_flight)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.in_flight)

    def add(self, copies: Sequence[ChunkCopy]) -> None:
        """These saves are planned."""
        for copy in copies:
            self.in_flight[copy.ticket] = self._num_ranks

    def add_many(self, tickets: Sequence[Ticket]) -> None:
        """The same for many, with nothing done in Python for each."""
        self.in_flight.update(dict.fromkeys(tickets, self._num_ranks))

    def supersede(self, ticket: Ticket, key: ChunkKey) -> None:
        """Once ``ticket`` is committed, nobody needs ``key`` any more."""
        self._supersedes[ticket] = key

    def fail_all(self) -> None:
        """Nothing that is in flight now may become visible."""
        self._failed.update(self.in_flight)

    def forget(self, tickets: Iterable[Ticket]) -> None:
        """Nobody will report these."""
        for ticket in tickets:
            self.in_flight.pop(ticket, None)
            self._failed.discard(ticket)
            self._supersedes.pop(ticket, None)

    def settle(self, saved: Sequence[Ticket], failed: Sequence[Ticket]) -> Settled:
        """Take in one rank's report. Tickets that are not in flight are none of ours any more."""
        self._failed.update(filter(self.in_flight.__contains__, failed))
        settled = self._arrive((*saved, *failed))
        if not self._failed and not self._supersedes:
            return Settled(settled)
        committed: list[Ticket] = []
        aborted: list[Ticket] = []
        superseded: list[ChunkKey] = []
        for ticket in settled:
            key = self._supersedes.pop(ticket, None)
            if ticket in self._failed:
                self._failed.remove(ticket)
                aborted.append(ticket)
            else:
                committed.append(ticket)
                if key is not None:
                    superseded.append(key)
        return Settled(committed, aborted, superseded)

    def _arrive(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Count one rank's report of each; returns those that it was the last for."""
        in_flight = self.in_flight
        if self._num_ranks > 1:
            remaining = set(map(in_flight.get, tickets))
            if len(remaining) != 1 or len(set(tickets)) != len(tickets):
                return self._arrive_one_by_one(tickets)
            num_left = remaining.pop()
            if num_left is None:
                return []
            if num_left > 1:
                in_flight.update(dict.fromkeys(tickets, num_left - 1))
                return []
        # The last rank: what was in flight had some number, and is not found again if it is named twice.
        return list(compress(tickets, map(in_flight.pop, tickets, repeat(0))))

    def _arrive_one_by_one(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        settled: list[Ticket] = []
        for ticket in tickets:
            num_left = self.in_flight.get(ticket)
            if num_left is None:
                continue
            if num_left > 1:
                self.in_flight[ticket] = num_left - 1
            else:
                del self.in_flight[ticket]
                settled.append(ticket)
        return settled

    def clear(self) -> None:
        """Forget everything."""
        self.in_flight.clear()
        self._failed.clear()
        self._supersedes.clear()
