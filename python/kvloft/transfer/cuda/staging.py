"""One direction's staging ring: slots of HBM, allocated once, each free again when an event of its last user has passed.

It must not know what is staged. Reuse is ordered on the GPU: the next user's stream waits, never the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvloft.transfer.cuda import driver

DEFAULT_BYTES: Final = 64 << 20
"""Of both directions together."""
DEFAULT_SLOTS: Final = 2
_ALIGN: Final = 4096


@dataclass(frozen=True, slots=True)
class RingSize:
    """Slots of one direction."""

    num_slots: int
    slot_bytes: int

    @classmethod
    def of(cls, total_bytes: int, num_slots: int = DEFAULT_SLOTS) -> RingSize:
        """Half of ``total_bytes`` for each direction. Raises ValueError if a slot would be under 256 KiB."""
        slot_bytes = total_bytes // 2 // num_slots // _ALIGN * _ALIGN
        if slot_bytes < 256 << 10:
            raise ValueError(f"a staging ring of {total_bytes} bytes is too small; use at least {num_slots << 19}")
        return cls(num_slots, slot_bytes)


class Ring:
    """Slots taken in turn."""

    def __init__(self, size: RingSize, device: torch.device) -> None:
        self.size = size
        # Zeroed, so that the padding between chunks that travels along is nobody's old data.
        self._memory = torch.zeros(size.num_slots * size.slot_bytes + _ALIGN, dtype=torch.uint8, device=device)
        base = -(-self._memory.data_ptr() // _ALIGN) * _ALIGN
        self._slots = tuple(base + i * size.slot_bytes for i in range(size.num_slots))
        self._freed: list[driver.Event | None] = [None] * size.num_slots
        self._next = 0

    def take(self, stream: driver.Stream, freed: driver.Event) -> int:
        """The next slot's address, usable in ``stream`` from here on; it is free again once ``freed`` has been recorded and passed.

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
