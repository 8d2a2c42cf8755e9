"""Decides when to examine running requests for complete units.

In any step, most requests complete no unit, and every forward pass waits for this decision. A
request is due once its frontier (computed plus scheduled tokens) reaches its stored value. While
every request advances by one token per step, the due steps are predicted. Otherwise, all frontiers
are compared with the stored values in bulk.
"""

from collections.abc import Iterable, Sequence
from itertools import compress, count
from operator import add, ge, gt

from kvloft.plan.request_state import NEVER
from kvloft.seam.ids import ReqId

STEADY_STEPS = 8
"""Number of steady steps before the first prediction. A prediction costs as much as a few bulk
comparisons.
"""


class SaveSchedule:
    """The running requests, in the order of the step's lists, and their due frontiers."""

    def __init__(self) -> None:
        self.running: list[ReqId] = []
        self._before: list[int] = []
        """Each request's due frontier, minus one."""
        self._predicted: dict[int, list[int]] | None = None
        """Positions of due requests by step. None while steps are unpredictable."""
        self._step = self._num_steady = 0
        self._next_sum: int | None = None
        """The next step's sum of ``computed`` if each request advances by one token."""

    def line_up(self, running: Iterable[ReqId], due_at: Iterable[int]) -> None:
        self.running, self._before = [], []
        self.add(running, due_at)

    def add(self, running: Iterable[ReqId], due_at: Iterable[int]) -> None:
        self.running += running
        self._before += [frontier - 1 for frontier in due_at]
        self._next_sum = None

    def due(self, computed: Sequence[int], scheduled: Iterable[int] | None) -> Sequence[int]:
        """Return the positions of the requests that are due.

        ``computed`` and ``scheduled`` are token counts. ``scheduled`` is None if each request gets
        one token.
        """
        if scheduled is not None:
            self._next_sum = None
            return list(compress(count(), map(gt, map(add, computed, scheduled), self._before)))
        total = sum(computed)
        # No request advances by more than one token, so equal sums mean that all requests advanced.
        is_steady, self._next_sum = total == self._next_sum, total + len(computed)
        self._num_steady = self._num_steady + 1 if is_steady else 0
        self._step += 1
        if self._num_steady < STEADY_STEPS:
            self._predicted = None
            return list(compress(count(), map(ge, computed, self._before)))
        if self._predicted is None:
            self._predicted = {}
            for position, (before, tokens) in enumerate(zip(self._before, computed, strict=True)):
                if before < NEVER - 1:
                    due_step = self._step + max(before - tokens, 0)
                    self._predicted.setdefault(due_step, []).append(position)
        return self._predicted.pop(self._step, ())

    def put(self, positions: Iterable[int], computed: Sequence[int], due_at: Iterable[int]) -> None:
        """Store the next due frontiers of the requests at ``positions``.

        ``computed`` holds each running request's number of computed tokens in this step.
        """
        before, predicted, step = self._before, self._predicted, self._step
        if predicted is None:
            for position, frontier in zip(positions, due_at, strict=True):
                before[position] = frontier - 1
            return
        for position, frontier in zip(positions, due_at, strict=True):
            before[position] = last = frontier - 1
            num_steps = last - computed[position]
            due_step = step + num_steps if num_steps > 1 else step + 1
            if due_step in predicted:
                predicted[due_step].append(position)
            elif frontier < NEVER:
                predicted[due_step] = [position]
