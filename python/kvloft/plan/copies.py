"""Makes the copies of a plan out of columns: a long prompt has thousands of chunks, and a forward waits for all of them.

So nothing here is done for each chunk but what runs in C. It must not know what the copies are for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat

from kvloft.seam.batch import ChunkCopy
from kvloft.seam.ids import BlockId

MANY = 256
"""From so many chunks on, a plan is made with the `collector_at_rest`."""


def chunk_copies(
    frames: Iterable[int],
    keys: Iterable[bytes],
    nums_blocks: Iterable[int],
    blocks: Iterable[tuple[BlockId, ...]],
    tickets: Iterable[int],
) -> tuple[ChunkCopy, ...]:
    """One copy for each row of the columns, which are equally long; ``blocks`` begin with the chunk's first."""
    rows = zip(frames, keys, nums_blocks, repeat(0), blocks, tickets, strict=False)
    # What ``ChunkCopy._make`` does, less a call in Python for each.
    return tuple(map(tuple.__new__, repeat(ChunkCopy), rows))


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Let the cycle collector wait while a long plan is made: it would run dozens of times, and nothing of a plan is in a cycle.

    What it would have looked at several times it then looks at once.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
