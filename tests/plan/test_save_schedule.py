"""Compares the save schedule with a check of every running request. A request is due once its
frontier reaches its threshold.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloft.plan import save_schedule
from kvloft.plan.request_state import NEVER
from kvloft.plan.save_schedule import SaveSchedule
from kvloft.seam.ids import ReqId

BLOCK = 4


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_schedule, "STEADY_STEPS", 2)


@settings(max_examples=400)
@given(seed=st.integers(0, 1 << 32), odd=st.sampled_from([0.0, 0.02, 0.3]))
def test_requests_are_due_when_their_frontier_reaches_the_threshold(seed: int, odd: float) -> None:
    """Requests are added and removed, advance by multiple tokens, or are set back (by a failed load
    or rejected draft tokens).
    """
    rng, names, ours = Random(seed), iter(range(1000)), SaveSchedule()
    computed: dict[ReqId, int] = {}
    due_at: dict[ReqId, int] = {}
    lined_up: list[ReqId] = []
    for _ in range(60):
        if not computed or rng.random() < odd:
            name = ReqId(str(next(names)))
            computed[name], due_at[name] = rng.randrange(40), rng.choice([NEVER, rng.randrange(60)])
        if len(computed) > 1 and rng.random() < odd:
            del computed[rng.choice(list(computed))]
        if rng.random() < odd:
            name = rng.choice(list(computed))
            computed[name] = rng.randrange(computed[name] + 1)
        running = list(computed)
        if lined_up != running:
            if lined_up == running[: len(lined_up)] and rng.random() < 0.5:
                ours.add(
                    running[len(lined_up) :], [due_at[name] for name in running[len(lined_up) :]]
                )
            else:
                ours.line_up(running, [due_at[name] for name in running])
            lined_up = running
        one_each = rng.random() >= odd
        given = {name: 1 if one_each else rng.randrange(1, 6) for name in running}
        due = ours.due(
            [computed[name] for name in running],
            None if one_each else [given[name] for name in running],
        )
        frontiers = {name: computed[name] + given[name] for name in running}
        assert sorted(due) == [
            i for i, name in enumerate(running) if frontiers[name] >= due_at[name]
        ]
        for position in due:
            name = running[position]
            due_at[name] = rng.choice(
                [
                    NEVER,
                    frontiers[name] + 1,
                    (frontiers[name] // BLOCK + 1) * BLOCK,
                    frontiers[name] - 1,
                ]
            )
        ours.put(
            due,
            [computed[name] for name in running],
            [due_at[running[position]] for position in due],
        )
        computed = {name: frontiers[name] for name in running}


def test_steady_steps_need_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """If steady steps compared every request, they would be as expensive as the first steps."""
    ours, num_tokens = SaveSchedule(), [5, 9]
    ours.line_up([ReqId("a"), ReqId("b")], [16, NEVER])
    for step in range(20):
        if step == 3:
            monkeypatch.delattr(save_schedule, "ge")
        assert list(ours.due(num_tokens, None)) == ([0] if step == 10 else []), step
        if step == 10:
            ours.put([0], num_tokens, [NEVER])
        num_tokens = [tokens + 1 for tokens in num_tokens]
