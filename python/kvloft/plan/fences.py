"""Which blocks a step gives to somebody who will write them while a save in flight may still read them.

A save reads its blocks after the step that planned it has been launched; by then its request may be gone and a block another's.
The worker orders the next writer after the read (I2). It must not know how.
"""

from __future__ import annotations

from kvloft.seam.ids import BlockId
from kvloft.seam.store import Session
from kvloft.seam.views import StepView


def rewritten(view: StepView, store: Session, block_tokens: int) -> tuple[BlockId, ...]:
    """Blocks that saves may be reading and that this step gives to a request to write.

    A new request writes from its first block that is not computed yet; blocks before that are only read.
    """
    if not store.num_in_flight:
        return ()
    given = [block for _, blocks in view.grown for block in blocks]
    for request in view.new:
        given += request.block_ids[request.num_computed_tokens // block_tokens :]
    return tuple(store.being_read(given)) if given else ()
