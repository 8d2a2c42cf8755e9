"""The correctness machine with mostly hits: earlier prompts are requested again, unchanged, cut, or
with another turn.

All other rules of `ServedMachine` apply too, with shapes of the same kinds. It provides the many
hits of the long form; this file has only the rules for them and their data.
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
"""Repeat ``count`` earlier requests, from the ``first``-last on; ``cut`` drops this many tokens,
one more per request, up to ten.
"""


@st.composite
def busy_groups(draw: st.DrawFn, names: tuple[str, ...] = SERVED) -> Shape:
    """Shapes of the served models; some run many requests in one step."""
    shape = draw(served_groups(names))
    return replace(
        shape,
        max_seqs=draw(st.sampled_from([6, 16, 16])),
        max_batched_tokens=draw(st.sampled_from([16, 64, 64])),
    )


class BusyMachine(ServedMachine):
    """See the module."""

    shapes_of = staticmethod(busy_groups)
    shapes = busy_groups()
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Spec] = []
        """Over all engines on one disk."""

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
        """Empties vLLM's own cache, in an idle engine or under running requests, which then hit,
        too.
        """
        while patience and self.engine.unfinished:
            self._run(1)
            patience -= 1
        self.engine.reset(running=not patience, connector=False)
        self.ask_again(**how)

    def _changed(self, spec: Spec, nth: int, cut: int, is_next_turn: bool, max_tokens: int) -> Spec:
        """The next turn contains the answer, or its start. Embeddings and sessions are unchanged;
        media items stay whole.
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
    """The machine for one kind of group set, with separate counts."""
    return type("BusyMachine", (BusyMachine,), {"shapes": busy_groups((name,)), "seen": Counter()})


BUSY = {name: busy(name) for name in SERVED}
