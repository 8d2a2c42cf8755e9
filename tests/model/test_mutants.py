"""Each mutant is seen by the correctness machine, and by what it breaks."""

import re
import traceback

import pytest

from .group_mutants import GROUP_MUTANTS
from .machine import GroupMachine, Machine, check, several_groups
from .mutants import MUTANTS, Mutant

SEEDS = (1, 2, 3)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_machine_sees(mutant: Mutant) -> None:
    judge(mutant, Machine)


@pytest.mark.parametrize("mutant", GROUP_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_machine_sees_in_several_groups(mutant: Mutant) -> None:
    judge(mutant, GroupMachine)


def judge(mutant: Mutant, machine: type[Machine]) -> None:
    said = verdict(mutant, machine)
    assert said is not None, f"not seen: {mutant.bug}"
    assert re.search(mutant.says, said), f"seen, but as something else: {said}"


def verdict(mutant: Mutant, machine: type[Machine]) -> str | None:
    """What the machine says of a mutant; None: nothing."""
    if mutant.where:
        machine = type(machine.__name__, (machine,), {"shapes": several_groups(mutant.where)})
    with pytest.MonkeyPatch.context() as mp:
        mutant.patch(mp)
        for seed in SEEDS:
            try:
                check(machine, examples=100, first_seed=seed, shrinks=False)
            except Exception as error:
                return "".join(traceback.format_exception_only(error)).partition("Failing test case")[0]
    return None
