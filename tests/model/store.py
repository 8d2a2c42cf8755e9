"""A model of the store as a dictionary. After each call, the dictionary contains all chunks that
lookups are allowed to find, regardless of evictions.

The model never evicts, so its results are upper bounds for a small store and exact for a large
store. Keys are whole prefixes (tuples of token ids), so two chunks are the same only if their
prefixes have the same tokens. This module must not import kvloft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

Prefix = tuple[int, ...]


@dataclass
class StoreModel:
    """Chunks by prefix: reserved (by a ticket), filled (committed, but the parent is not visible
    yet) or visible.
    """

    state: dict[Prefix, str] = field(default_factory=dict)
    tickets: dict[int, Prefix] = field(default_factory=dict)
    """Tickets whose reserved chunk still exists."""

    def parent(self, prefix: Prefix) -> Prefix:
        """Return the prefix before the last chunk, or () for the root."""
        return prefix[:-1]

    def ends(self, prompt: Prefix) -> list[Prefix]:
        """Return every prefix of ``prompt`` that ends with a chunk."""
        return [prompt[:end] for end in range(1, len(prompt) + 1)]

    def reserve(self, ticket: int, prefix: Prefix) -> None:
        assert prefix not in self.state, "a chunk must not be reserved twice"
        parent = self.parent(prefix)
        assert not parent or parent in self.state, "the parent of a reserved chunk must be present"
        self.state[prefix] = "reserved"
        self.tickets[ticket] = prefix

    def commit(self, tickets: Sequence[int]) -> int:
        """Commit tickets and return the number of chunks that became visible."""
        for ticket in tickets:
            prefix = self.tickets.pop(ticket, None)
            if prefix is not None:
                self.state[prefix] = "filled"
        risen = 0
        for prefix in sorted(self.state, key=len):
            parent = self.parent(prefix)
            if self.state[prefix] == "filled" and (
                not parent or self.state.get(parent) == "visible"
            ):
                self.state[prefix] = "visible"
                risen += 1
        return risen

    def abort(self, ticket: int) -> None:
        prefix = self.tickets.get(ticket)
        if prefix is not None:
            self.forget(prefix)

    def forget(self, prefix: Prefix) -> int:
        """Remove a chunk and its descendants. Return the number of removed chunks."""
        if prefix not in self.state:
            return 0
        gone = [other for other in self.state if other[: len(prefix)] == prefix]
        for other in gone:
            del self.state[other]
        self.tickets = {ticket: kept for ticket, kept in self.tickets.items() if kept not in gone}
        return len(gone)

    def clear(self) -> None:
        self.state.clear()
        self.tickets.clear()

    def visible(self, prefix: Prefix) -> bool:
        return self.state.get(prefix) == "visible"

    def lookup(self, prompt: Prefix) -> int:
        """Return the number of blocks that a store without evictions finds."""
        return next(
            (end for end in range(len(prompt)) if not self.visible(prompt[: end + 1])), len(prompt)
        )
