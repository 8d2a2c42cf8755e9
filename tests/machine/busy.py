"""The correctness machine where most requests hit: what was asked before is asked again, as it was, cut, or a turn further.

Everything else that may happen to `ServedMachine` happens here, too, in shapes of the same kinds. It is for the many hits of the
long form; only rules and what is remembered for them are here.
"""

from collections import Counter
from dataclasses import replace
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .machine import SERVED, Machine, ServedMachine, served_groups
from .symbols import Spec

again = {
    "first": st.integers(0, 30), "count": st.integers(1, 12), "cut": st.integers(-6, 12), "max_tokens": st.integers(1, 4),
    "ahead": st.integers(0, 8),
}  # fmt: skip
"""``count`` requests of before, from the ``first``-last on; ``cut``: so many tokens shorter, each one more; below 0, longer."""


class BusyMachine(ServedMachine):
    """See the module."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Spec] = []
        """In all lives on one disk."""

    def _ask(self, spec: Spec) -> None:
        self.asked.append(spec)
        super()._ask(spec)

    @precondition(lambda self: self.engine)
    @rule(**again)
    def ask_again(self, first: int, count: int, cut: int, max_tokens: int, ahead: int) -> None:
        before = self.asked[-1 - first % len(self.asked) :: -1] * count
        for i, spec in enumerate(before[:count]):
            self.num_arrived += 1
            self._ask(replace(self._changed(spec, cut + i if cut >= 0 else cut, max_tokens), id=f"r{self.num_arrived}"))
        self._run(ahead)

    @precondition(lambda self: self.engine)
    @rule(**again, patience=st.integers(10, 60))
    def forget_and_ask_again(self, first: int, count: int, cut: int, max_tokens: int, ahead: int, patience: int) -> None:
        """vLLM's own cache is emptied: of an engine that came to rest in time, or under running requests, which then hit, too."""
        while patience and self.engine.unfinished:
            self._run(1)
            patience -= 1
        self.engine.reset(running=not patience, connector=False)
        self.ask_again(first, count, cut, max_tokens, ahead)

    def _changed(self, spec: Spec, cut: int, max_tokens: int) -> Spec:
        """Embeddings and sessions stay as they are; media keep their items whole."""
        if spec.embeds is not None or spec.turns:
            return spec
        most = self.most_tokens()
        contents, ids = spec.contents, spec.ids
        if cut < 0:  # the next turn, with the answer or the begin of it
            more = (*spec.truth(), *range(3, 3 - cut))
            contents, ids = contents + more, ids + more
        least = max([1, *(item.start + item.length for item in spec.items)])
        length = max(least, min(most, len(ids) - max(0, cut)))
        max_tokens = min(max_tokens, self.engine.shape.longest - length - 1)
        return replace(spec, contents=contents[:length], ids=ids[:length], max_tokens=max_tokens, skips_cache=False)


def busy(name: str) -> type[Machine]:
    """The machine for one kind of group set, whose counts are its own."""
    return type("BusyMachine", (BusyMachine,), {"shapes": served_groups((name,)), "seen": Counter()})


BUSY = {name: busy(name) for name in SERVED}
