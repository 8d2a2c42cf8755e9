"""Which blocks saves in flight may still be reading, so that a step can name those it gives to somebody who will write them.

A save reads its blocks after the step that planned it has been launched; by then its request may be gone and a block another's.
The worker orders the next writer after the read (I2). It must not know how.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvloft.types import BlockId, ChunkCopy, StepView, Ticket


class Fences:
    """Blocks of saves that some worker has not reported yet."""

    def __init__(self) -> None:
        self._blocks_of: dict[Ticket, tuple[BlockId, ...]] = {}
        self._reader_of: dict[BlockId, Ticket] = {}

    def add(self, copy: ChunkCopy) -> None:
        """A save of these blocks is planned."""
        self._blocks_of[copy.ticket] = copy.blocks
        self._reader_of.update(dict.fromkeys(copy.blocks, copy.ticket))

    def settle(self, ticket: Ticket) -> None:
        """Every worker reported it."""
        for block in self._blocks_of.pop(ticket, ()):
            if self._reader_of.get(block) == ticket:
                del self._reader_of[block]

    def clear(self) -> None:
        """Forget everything."""
        self._blocks_of.clear()
        self._reader_of.clear()

    def everything(self) -> tuple[BlockId, ...]:
        """For a step of which nothing is known."""
        return tuple(self._reader_of)

    def rewritten(self, view: StepView, block_tokens: int) -> tuple[BlockId, ...]:
        """Blocks that saves may be reading and that this step gives to a request to write.

        A new request writes from its first block that is not computed yet; blocks before that are only read.
        """
        if not self._reader_of:
            return ()
        found: list[BlockId] = []
        for request in view.new:
            found += self._among(request.block_ids[request.num_computed_tokens // block_tokens :])
        for _, blocks in view.grown:
            found += self._among(blocks)
        return tuple(found)

    def _among(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        return [block for block in blocks if block in self._reader_of]
