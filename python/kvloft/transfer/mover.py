"""The interface of movers: submit copies, and poll for results.

`cpu.CpuMover` copies at once; a CUDA mover can take several steps. Must not depend on engines, or
on requests beyond their id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvloft.seam.ids import BlockId, Ticket
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan


@dataclass(slots=True)
class Finished:
    """Copies that finished since the last poll.

    ``bad_blocks`` are blocks whose load failed. ``misfits`` are those of ``failed`` whose chunk did
    not fit a frame for compressed chunks.
    """

    saved: list[Ticket] = field(default_factory=list)
    failed: list[Ticket] = field(default_factory=list)
    misfits: list[Ticket] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)
    bad_blocks: set[BlockId] = field(default_factory=set)
    num_bytes_saved: int = 0
    num_bytes_loaded: int = 0
    seconds_saving: float = 0.0
    seconds_loading: float = 0.0


class Mover(Protocol):
    """Moves chunks. `poll` returns every submitted ticket and load exactly once (I10)."""

    @property
    def usable_bytes(self) -> int | None:
        """Return n if only the first n bytes of the arena can be copied to now; None for all."""

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """Make the next forward pass, which can write ``rewritten``, wait for the saves that still
        read these blocks (I2).

        ``has_loads``: loads will be submitted in this step, possibly after the forward was launched
        (as in vLLM 0.30 and newer). They run after the work launched before this call and need not
        wait for that forward.
        """

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Gather chunks after the forward that wrote the blocks, before the next (I2)."""

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Check and scatter chunks. Their blocks belong to requests that wait for the load."""

    def poll(self) -> Finished: ...

    def drain(self) -> Finished:
        """Wait for all copies in flight, and return the results. For engine sleep and shutdown."""

    def close(self) -> None:
        """Wait for all copies in flight, and release resources."""
