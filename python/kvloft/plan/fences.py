"""Which blocks saves in flight may still be reading, so that a step can name those it gives to somebody who will write them.

A save reads its blocks after the step that planned it has been launched; by then its request may be gone and a block another's.
The worker orders the next writer after the read (I2). It must not know how.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import compress

from kvloft.types import BlockId, ChunkCopy, StepView, Ticket


class Fences:
    """Blocks of the saves in ``in_flight``, which is its owner's and changes under it: what leaves it needs no fence any more."""

    def __init__(self, in_flight: Collection[Ticket]) -> None:
        self._in_flight = in_flight
        self._reader_of: dict[BlockId, Ticket] = {}
        """Each block's last save. One that was settled stays until nothing is in flight: there are no more than blocks."""

    def add(self, copies: Sequence[ChunkCopy]) -> None:
        """Saves are planned. Called before their tickets are in flight."""
        if not self._in_flight:
            self._reader_of.clear()
        for copy in copies:
            blocks = copy.blocks
            if len(blocks) == 1:
                self._reader_of[blocks[0]] = copy.ticket
            else:
                self._reader_of.update(dict.fromkeys(blocks, copy.ticket))

    def clear(self) -> None:
        """Forget everything."""
        self._reader_of.clear()

    def everything(self) -> tuple[BlockId, ...]:
        """For a step of which nothing is known."""
        return tuple(self._among(list(self._reader_of)))

    def rewritten(self, view: StepView, block_tokens: int) -> tuple[BlockId, ...]:
        """Blocks that saves may be reading and that this step gives to a request to write.

        A new request writes from its first block that is not computed yet; blocks before that are only read.
        """
        if not self._in_flight:
            return ()
        found: list[BlockId] = []
        for request in view.new:
            found += self._among(request.block_ids[request.num_computed_tokens // block_tokens :])
        found += self._among([block for _, blocks in view.grown for block in blocks])
        return tuple(found)

    def _among(self, blocks: Sequence[BlockId]) -> Iterable[BlockId]:
        # For a block that was never saved the reader is None, which is no ticket.
        return compress(blocks, map(self._in_flight.__contains__, map(self._reader_of.get, blocks)))
