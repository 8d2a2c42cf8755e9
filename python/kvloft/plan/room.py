"""GPU blocks of requests whose loads are under way, or have ended without their requests going on: never too many for all to go on.

vLLM 0.32 admits a load only if what such requests still need stays free. But with windows and local chunks it takes the null blocks
at a table's begin for blocks that are there, and keeps nothing free for those groups. A few long requests could then fill the
pool, each short of some blocks, and nothing would run again. So with several groups no load is offered unless the whole sequences
of all such requests fit into the pool together. Blocks of requests that run do not matter, for they end or are preempted.
It must not know who waits for room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvloft.plan.pins import Pins
from kvloft.seam.ids import ReqId
from kvloft.seam.shape import GroupShape
from kvloft.seam.store import KeyChain


class Need(NamedTuple):
    """Blocks of one request: its own at most, and strides of those that vLLM had of its prefix, which others may share."""

    own: int
    shared: list[tuple[bytes, int]]


@dataclass(slots=True, eq=False)
class Room:
    """``num_blocks``: of the pool. ``step_tokens``: of all steps that are under way at once, at most. ``num_drafts``: a step."""

    groups: Sequence[GroupShape]
    num_blocks: int
    step_tokens: int
    num_drafts: int = 0
    _needs: dict[ReqId, Need] = field(default_factory=dict)
    _users: Counter[tuple[bytes, int]] = field(default_factory=Counter)
    _num_taken: int = 0
    _pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        self._pins = Pins(self.num_blocks)

    def need(self, chain: KeyChain, num_tokens: int, local_tokens: int, loaded_tokens: int) -> Need:
        """Of a request with so many tokens: the first ``local_tokens`` vLLM has, and a load brings those to ``loaded_tokens``."""
        num_tokens += 1 + 2 * self.num_drafts
        ahead = min(self.step_tokens, num_tokens - loaded_tokens)
        own = 0
        for group in self.groups:
            whole = -(-num_tokens // group.block_tokens)
            match group.kind:
                case "full":
                    own += whole - local_tokens // group.block_tokens
                case "window" | "local":
                    own += min(whole, 2 + -(-(group.reach + ahead) // group.block_tokens))
                case "state":
                    own += min(whole, 3) + self.num_drafts
        if not (full := [group for group in self.groups if group.kind == "full"]):
            return Need(own, [])
        strides = self._pins.strides(chain, local_tokens // full[0].unit_tokens)
        per_unit = sum(group.blocks_per_unit for group in full)
        return Need(own, [(key, num_units * per_unit) for key, num_units in strides])

    def has(self, need: Need) -> bool:
        """Whether it fits beside all others; alone anything does, or vLLM says so."""
        more = sum(stride[1] for stride in need.shared if stride not in self._users)
        return not self._needs or self._num_taken + need.own + more <= self.num_blocks

    def take(self, req_id: ReqId, need: Need) -> None:
        """It is admitted with a load; what it had taken before was given back."""
        self._needs[req_id] = need
        self._num_taken += need.own
        for stride in need.shared:
            self._num_taken += 0 if stride in self._users else stride[1]
            self._users[stride] += 1

    def give_back(self, req_id: ReqId) -> bool:
        """It runs, or it ended. Says whether it had taken anything."""
        if (need := self._needs.pop(req_id, None)) is None:
            return False
        self._num_taken -= need.own
        for stride in need.shared:
            self._users[stride] -= 1
            if not self._users[stride]:
                del self._users[stride]
                self._num_taken -= stride[1]
        return True
