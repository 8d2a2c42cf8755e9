"""A variant of the correctness machine that repeats earlier prompts (unchanged, truncated, or with
another turn), so that most requests have hits.

This module extends `ServedMachine` with rules for repeated requests and with their data. In long
runs, the variant produces most of the hits.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .machine import SERVED, Machine, ServedMachine, served_groups
from .shape import Shape
from .symbols import Spec

again = {
    "first": st.integers(0, 30),
    "count": st.integers(6, 40),
    "cut": st.integers(0, 9),
    "is_next_turn": st.booleans(),
    "max_tokens": st.sampled_from([1, 1, 2, 5, 12]),
    "ahead": st.integers(0, 8),
}
"""Arguments of a rule that repeats ``count`` earlier requests, from newest to oldest, starting
``first`` requests before the newest.

``cut`` is the number of tokens to remove from the first repeated request. Each later request loses
one more token, modulo ten.
"""


@st.composite
def busy_groups(draw: st.DrawFn, names: tuple[str, ...] = SERVED) -> Shape:
    """Draw the shape of a supported model. Some shapes run many requests in one step."""
    shape = draw(served_groups(names))
    return replace(
        shape,
        max_seqs=draw(st.sampled_from([6, 16, 16])),
        max_batched_tokens=draw(st.sampled_from([16, 64, 64])),
    )


class BusyMachine(ServedMachine):
    """The machine with repeated requests (see the module docstring)."""

    shapes_of = staticmethod(busy_groups)
    shapes = busy_groups()
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Spec] = []
        """All requests of the engines that share a disk."""

    def _ask(self, spec: Spec) -> None:
        self.asked.append(spec)
        super()._ask(spec)

    @precondition(lambda self: self.engine)
    @rule(**again)
    def ask_again(self, first: int, count: int, ahead: int, **change: Any) -> None:
        before = self.asked[-1 - first % len(self.asked) :: -1] * count
        for i, spec in enumerate(before[:count]):
            self.num_arrived += 1
            self._ask(replace(self._changed(spec, i, **change), id=f"r{self.num_arrived}"))
        self._run(ahead)

    @precondition(lambda self: self.engine)
    @rule(**again, patience=st.integers(0, 40))
    def forget_and_ask_again(self, patience: int, **how: Any) -> None:
        """Clear vLLM's own cache, either in an idle engine or while requests run.

        In the second case, vLLM preempts the running requests, so these requests also have hits.
        """
        while patience and self.engine.unfinished:
            self._run(1)
            patience -= 1
        self.engine.reset(running=not patience, connector=False)
        self.ask_again(**how)

    def _changed(self, spec: Spec, nth: int, cut: int, is_next_turn: bool, max_tokens: int) -> Spec:
        """Return ``spec``, truncated or continued by another turn.

        The next turn contains the output or the beginning of the output. Embeddings and sessions
        are not changed, and media items are never truncated.
        """
        if spec.embeds is not None or spec.turns:
            return spec
        more = (*spec.truth(), *range(3, 9)) if is_next_turn else ()
        contents, ids = spec.contents + more, spec.ids + more
        least = max([1, *(item.start + item.length for item in spec.items)])
        length = max(least, min(self.most_tokens(), len(ids) - (cut + nth) % 10))
        max_tokens = min(max_tokens, self.engine.shape.longest - length - 1)
        return replace(
            spec,
            contents=contents[:length],
            ids=ids[:length],
            max_tokens=max_tokens,
            skips_cache=False,
        )


def busy(name: str) -> type[Machine]:
    """Return a machine for the group set ``name``, with separate event counters."""
    return type("BusyMachine", (BusyMachine,), {"shapes": busy_groups((name,)), "seen": Counter()})


BUSY = {name: busy(name) for name in SERVED}
