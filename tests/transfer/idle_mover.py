"""A mover that accepts all copies and completes none."""

from collections.abc import Sequence

from kvloft.seam.ids import BlockId
from kvloft.seam.plan import LoadPlan, SavePlan
from kvloft.transfer.mover import Finished


class IdleMover:
    """Implements ``kvloft.transfer.mover.Mover``."""

    usable_bytes: int | None = None

    def begin_step(self, rewritten: Sequence[BlockId], *, has_loads: bool = False) -> None: ...

    def wait_for_saves(self, blocks: Sequence[BlockId]) -> None: ...

    def submit_saves(self, plans: Sequence[SavePlan]) -> None: ...

    def submit_loads(self, plans: Sequence[LoadPlan]) -> None: ...

    def poll(self) -> Finished:
        return Finished()

    def drain(self) -> Finished:
        return self.poll()

    def close(self) -> None: ...
