"""The seam between the worker half and whatever moves pages: submit copies, poll what finished.

``cpu.CpuMover`` copies at once; a CUDA mover may take several steps. It must not know engines or requests beyond an id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvloft.seam.ids import BlockId, Ticket
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan


@dataclass(slots=True)
class Finished:
    """Copies that finished since the last poll; ``bad_blocks`` were to be loaded and were not."""

    saved: list[Ticket] = field(default_factory=list)
    failed: list[Ticket] = field(default_factory=list)
    loads: list[LoadResult] = field(default_factory=list)
    bad_blocks: set[BlockId] = field(default_factory=set)
    num_bytes_saved: int = 0
    num_bytes_loaded: int = 0
    seconds_saving: float = 0.0
    seconds_loading: float = 0.0


class Mover(Protocol):
    """Moves chunks for one worker. Every submitted ticket and load comes back from `poll` exactly once (I10)."""

    @property
    def usable_frames(self) -> int | None:
        """How many of the first frames can be copied to now; None: all."""

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """Before a forward is launched that may write ``rewritten``: it must come after the saves that still read them (I2).

        ``has_loads``: loads will be submitted in this step, perhaps after the forward was launched (as vLLM does since 0.30);
        they come after what was launched before now, and need not wait for that forward.
        """

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Gather; called after the forward that wrote the blocks and before any that may write them next (I2)."""

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Check and scatter; called between steps, the blocks belong to waiting requests."""

    def poll(self) -> Finished: ...

    def drain(self) -> Finished:
        """Wait for everything in flight: engine sleep, shutdown."""

    def close(self) -> None:
        """Wait for everything in flight and give back what was taken; the mover is not used afterwards."""
