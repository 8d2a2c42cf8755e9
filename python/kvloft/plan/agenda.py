"""When running requests are to be looked at again: most complete nothing in a step, and every forward waits for this.

A request is due once the frontier of its tokens has reached the one that was put down for it. In most steps all requests go on by
one token, and then it is known beforehand in which step each is due; in others all are compared, as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, count
from operator import add, ge, gt

from kvloft.plan.tracker import NEVER
from kvloft.seam.ids import ReqId

STEADY_STEPS = 8
"""So many steps in a row must have been of one token each before the next ones are foreseen: that costs as much as some steps."""


class Agenda:
    """The running requests in the order of the step's columns, and at which frontier each is due."""

    def __init__(self) -> None:
        self.running: list[ReqId] = []
        self._before: list[int] = []
        """One less than the frontier at which each is due."""
        self._foreseen: dict[int, list[int]] | None = None
        """Positions by step; None while that is not known."""
        self._step = self._num_steady = 0
        self._next_sum = -1
        """What the computed tokens add up to in the next step, if each request goes on by the token that it has in this one."""

    def line_up(self, running: Iterable[ReqId], due_at: Iterable[int]) -> None:
        """These requests run from now on, and no others."""
        self.running, self._before = [], []
        self.add(running, due_at)

    def add(self, running: Iterable[ReqId], due_at: Iterable[int]) -> None:
        """These run too, behind the others."""
        self.running += running
        self._before += [frontier - 1 for frontier in due_at]
        self._next_sum = -1

    def due(self, computed: Sequence[int], scheduled: Iterable[int] | None) -> Sequence[int]:
        """Positions of the requests that are due at ``computed`` tokens and the ``scheduled`` ones (None: one for each)."""
        if scheduled is not None:
            self._next_sum = -1
            return list(compress(count(), map(gt, map(add, computed, scheduled), self._before)))
        total = sum(computed)
        # No request goes on by more than it was given, so with this sum each went on by one.
        is_steady, self._next_sum = total == self._next_sum, total + len(computed)
        self._num_steady = self._num_steady + 1 if is_steady else 0
        self._step += 1
        if self._num_steady < STEADY_STEPS:
            self._foreseen = None
            return list(compress(count(), map(ge, computed, self._before)))
        if self._foreseen is None:
            self._foreseen = {}
            for position, (before, tokens) in enumerate(zip(self._before, computed, strict=True)):
                if before < NEVER - 1:
                    self._foreseen.setdefault(self._step + max(before - tokens, 0), []).append(position)
        return self._foreseen.pop(self._step, ())

    def put(self, positions: Iterable[int], computed: Sequence[int], due_at: Iterable[int]) -> None:
        """Requests at ``positions`` are due again at these frontiers; ``computed`` are all tokens of each in this step."""
        before, foreseen, step = self._before, self._foreseen, self._step
        if foreseen is None:
            for position, frontier in zip(positions, due_at, strict=True):
                before[position] = frontier - 1
            return
        for position, frontier in zip(positions, due_at, strict=True):
            before[position] = last = frontier - 1
            num_steps = last - computed[position]
            due_step = step + num_steps if num_steps > 1 else step + 1
            if due_step in foreseen:
                foreseen[due_step].append(position)
            elif frontier < NEVER:
                foreseen[due_step] = [position]
