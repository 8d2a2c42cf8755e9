"""The interface of movers, which copy chunks between paged KV and frames.

`cpu.CpuMover` copies synchronously. The copies of a CUDA mover can take more than one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvloft.seam.ids import BlockId, Ticket
from kvloft.seam.plan import LoadPlan, LoadResult, SavePlan


@dataclass(slots=True)
class Finished:
    """The results of copies that finished since the last poll.

    ``bad_blocks`` holds the blocks whose load failed. ``misfits`` lists the tickets in ``failed``
    whose chunks did not fit into frames for compressed chunks.
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
    """Copies chunks. `poll` returns each submitted ticket and load exactly once (I10)."""

    @property
    def usable_bytes(self) -> int | None:
        """Return the number of writable bytes at the start of the arena, or None if all bytes are
        writable.
        """

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None:
        """Make the next forward pass, which can write to ``rewritten``, wait for saves that still
        read these blocks (I2).

        ``has_loads`` is True if loads will be submitted in this step. vLLM 0.30 and newer can
        submit loads after launching the forward pass. Loads wait for work launched before this
        call, but not for the forward pass.
        """

    def wait_for_saves(self, blocks: Sequence[BlockId]) -> None:
        """Block until no save reads ``blocks``, because another connector may write them."""

    def submit_saves(self, plans: Sequence[SavePlan]) -> None:
        """Gather chunks after the current forward pass and before a later pass overwrites them
        (I2).
        """

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None:
        """Verify and scatter chunks into blocks of requests that are waiting for the load. Call
        this method once per step.
        """

    def poll(self) -> Finished: ...

    def drain(self) -> Finished:
        """Wait for all in-flight copies and return the results. This is used before sleep and
        shutdown.
        """

    def close(self) -> None:
        """Wait for all in-flight copies and release all resources."""
