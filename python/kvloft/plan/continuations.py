"""Which chunk's KV each block holds to its last position, where a drafter's KV there depends on the next token.

vLLM's own cache tells blocks by their own tokens, so a hit of its may be a block that another continuation of the same prefix
wrote. That costs one draft position; saved under this continuation's key it would be wrong for good. It must not know vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvloft.plan.tracker import Tracker
from kvloft.seam.batch import Tables
from kvloft.seam.ids import BlockId


class Continuations:
    """What requests were seen to compute or load: key by block."""

    def __init__(self) -> None:
        self._keys: dict[BlockId, bytes] = {}

    def note(self, tracker: Tracker, num_blocks: int) -> None:
        """The request itself filled its first ``num_blocks`` blocks, but for those that vLLM had.

        It writes to those behind them, too: they may come into vLLM's cache before their next token is known here, or never be.
        """
        for nth in range(max(tracker.num_local_blocks, tracker.num_noted), num_blocks):
            key = tracker.chain.key(nth)
            for table, size in _tables(tracker):
                self._keys.update((block, key) for block in table[nth * size : (nth + 1) * size])
        tracker.num_noted = max(tracker.num_noted, num_blocks)
        self._drop_unknown(tracker)

    def forget(self, tracker: Tracker) -> None:
        """The request writes to its blocks what is not to be saved: whose those were before says nothing of them now."""
        self._drop_unknown(tracker)
        tracker.num_noted = max(tracker.num_noted, len(tracker.blocks))

    def _drop_unknown(self, tracker: Tracker) -> None:
        for table, size in _tables(tracker):
            for block in table[max(tracker.num_local_blocks, tracker.num_noted) * size :]:
                self._keys.pop(block, None)

    def are_its_own(self, tracker: Tracker, blocks: Sequence[BlockId]) -> bool:
        """Whether those of ``blocks`` that vLLM had are known to be of the request's own continuation."""
        wanted = set(blocks)
        for table, size in _tables(tracker):
            local = enumerate(table[: tracker.num_local_blocks * size])
            if any(self._keys.get(block) != tracker.chain.key(nth // size) for nth, block in local if block in wanted):
                return False
        return True


def _tables(tracker: Tracker) -> Iterator[tuple[Sequence[BlockId], int]]:
    """Each group's, and how many blocks of it have one key."""
    blocks = tracker.blocks
    if not isinstance(blocks, Tables):
        yield blocks, 1
    else:
        yield from ((table, blocks.size_of(group)) for group, table in enumerate(blocks.tables))
