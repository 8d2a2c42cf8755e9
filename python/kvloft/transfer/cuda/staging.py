"""One direction's staging ring: slots of HBM, allocated once, each free again when an event of its last user has passed.

It must not know what is staged. Reuse is ordered on the GPU: the next user's stream waits, never the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvloft.transfer.cuda import driver

DEFAULT_BYTES: Final = 80 << 20
"""Of one direction. A kernel that fills the GPU holds the next gather back for its whole length, so a ring must hold what the
link takes meanwhile: an 8192^3 matmul lasts 1.4 to 1.6 ms, 80 MiB 1.5 ms."""
DEFAULT_SLOTS: Final = 2
MIN_SLOT_BYTES: Final = 256 << 10
_ALIGN: Final = 4096


@dataclass(frozen=True, slots=True)
class RingSize:
    """Slots of one direction."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, total_bytes: int = DEFAULT_BYTES, num_slots: int = DEFAULT_SLOTS) -> RingSize:
        """Raises ValueError if a slot would be smaller than MIN_SLOT_BYTES."""
        slot_bytes = total_bytes // num_slots // _ALIGN * _ALIGN
        if slot_bytes < MIN_SLOT_BYTES:
            raise ValueError(f"a staging ring of {total_bytes} bytes is too small; use at least {num_slots * MIN_SLOT_BYTES}")
        return cls(num_slots, slot_bytes)

    def fitted(self, part_bytes: int) -> RingSize:
        """Slots of the nearest whole number of parts, if one fits at all: a slot that is not full keeps the link waiting."""
        if part_bytes > self.slot_bytes:
            return self
        return RingSize(self.num_slots, round(self.slot_bytes / part_bytes) * part_bytes)


class Ring:
    """Slots taken in turn."""

    def __init__(self, size: RingSize, device: torch.device) -> None:
        self.size = size
        # Zeroed, so that a mistake in what is copied could not show another process's old data.
        self._memory = torch.zeros(size.num_slots * size.slot_bytes + _ALIGN, dtype=torch.uint8, device=device)
        base = -(-self._memory.data_ptr() // _ALIGN) * _ALIGN
        self._slots = tuple(base + i * size.slot_bytes for i in range(size.num_slots))
        self._freed: list[driver.Event | None] = [None] * size.num_slots
        self._next = 0

    @property
    def next_slot(self) -> int:
        """Number of the slot that `take` gives out next."""
        return self._next

    def take(self, stream: driver.Stream, freed: driver.Event) -> int:
        """The next slot's address, usable in ``stream`` from here on; it is free again once ``freed`` has passed.

        ``freed`` must be recorded before the slot's next turn.
        """
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        before = self._freed[slot]
        if before is not None:
            stream.wait(before)
        self._freed[slot] = freed
        return self._slots[slot]

    @property
    def addresses(self) -> Sequence[int]:
        return self._slots
