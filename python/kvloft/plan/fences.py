"""Which blocks saves in flight may still be reading, so that a step can name those it gives to somebody who will write them.

A save reads its blocks after the step that planned it has been launched; by then its request may be gone and a block another's.
The worker orders the next writer after the read (I2). It must not know how.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import compress

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId, Ticket
from kvloft.seam.views import StepView


class Fences:
    """Blocks of the saves in ``in_flight``, which is its owner's and changes under it: what leaves it needs no fence any more."""

    def __init__(self, in_flight: Collection[Ticket]) -> None:
        self._in_flight = in_flight
        self._reader_of: dict[BlockId, Ticket] = {}
        """Each block's last save. One that was settled stays until nothing is in flight: there are no more than blocks."""
        self._earlier: dict[BlockId, tuple[Ticket, ...]] = {}
        """Saves of a block that were in flight when its last was planned: that one may be dropped while they wait."""

    def add(self, copies: Sequence[ChunkCopy]) -> None:
        """Saves are planned. Called before their tickets are in flight."""
        if not self._in_flight:
            self.clear()
        in_flight, reader_of = self._in_flight, self._reader_of
        for copy in copies:
            for block in copy.blocks:
                if (before := reader_of.get(block)) is not None and before in in_flight:
                    self._keep(before, block)
                reader_of[block] = copy.ticket

    def add_many(self, blocks: Sequence[BlockId], tickets: Sequence[Ticket]) -> None:
        """The same for chunks of one block each, with nothing done in Python for each: ``tickets[i]`` reads ``blocks[i]``."""
        if not self._in_flight:
            self.clear()
        in_flight, reader_of = self._in_flight, self._reader_of
        # For a block that was never saved the reader is None, which is no ticket.
        for block in compress(blocks, map(in_flight.__contains__, map(reader_of.get, blocks))):
            self._keep(reader_of[block], block)
        reader_of.update(zip(blocks, tickets, strict=True))

    def _keep(self, before: Ticket, block: BlockId) -> None:
        """``before`` is in flight, and ``block`` has another last save now."""
        others = self._earlier.get(block, ())
        self._earlier[block] = (*(ticket for ticket in others if ticket in self._in_flight), before)

    def clear(self) -> None:
        """Forget everything."""
        self._reader_of.clear()
        self._earlier.clear()

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
        in_flight, earlier = self._in_flight, self._earlier
        is_read: Iterable[bool] = map(in_flight.__contains__, map(self._reader_of.get, blocks))
        if earlier:
            is_read = [
                read or any(ticket in in_flight for ticket in earlier.get(block, ()))
                for block, read in zip(blocks, is_read, strict=True)
            ]
        return compress(blocks, is_read)
