"""Each mutant is seen by the correctness machine, and by what it breaks."""

import re
import traceback

import pytest

from .machine import Machine, check
from .mutants import MUTANTS, Mutant

SEEDS = (1, 2, 3)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_machine_sees(mutant: Mutant) -> None:
    said = verdict(mutant)
    assert said is not None, f"not seen: {mutant.bug}"
    assert re.search(mutant.says, said), f"seen, but as something else: {said}"


def verdict(mutant: Mutant) -> str | None:
    """What the machine says of a mutant; None: nothing."""
    with pytest.MonkeyPatch.context() as mp:
        mutant.patch(mp)
        for seed in SEEDS:
            try:
                check(Machine, examples=100, first_seed=seed, shrinks=False)
            except Exception as error:
                return "".join(traceback.format_exception_only(error))
    return None
