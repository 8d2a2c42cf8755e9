"""Checks that the correctness machine detects each mutant by its effect.

CI runs only the mutants in ``IN_CI``; MODEL_MUTANTS=all (`make model-check`) runs all mutants.
"""

import os
import re
import traceback

import pytest

from .busy import BusyMachine
from .draft_mutants import DRAFT_MUTANTS
from .group_mutants import GROUP_MUTANTS
from .machine import DraftMachine, GroupMachine, Machine, ServedMachine, check
from .mutants import MUTANTS, Mutant
from .served_mutants import SERVED_MUTANTS
from .shape import HAS_GROUPS

SEEDS = range(1, 31)
IS_WHOLE = os.environ.get("MODEL_MUTANTS") == "all"
IN_CI = {
    "blocks_of_a_chunk_are_reversed",
    "frames_are_sealed_in_place",
    "keys_without_salt",
    "last_block_of_a_drafter_is_kept",
    "last_group_is_missing_at_a_hit",
    "load_is_reported_twice",
    "local_chunk_is_not_loaded",
    "one_group_is_not_looked_up",
    "resumed_are_not_loaded",
    "saved_before_computed",
    "saved_before_the_forward",
    "state_is_saved_under_another_boundary",
    "states_are_not_looked_up",
    "all_groups_use_the_main_table",
    "unit_is_the_main_groups_block",
}
"""The mutants that are detected fastest, each in less than one CPU second."""


def chosen(mutants: list[Mutant]) -> list[Mutant]:
    return [mutant for mutant in mutants if IS_WHOLE or mutant.name in IN_CI]


def test_mutants_of_ci_exist() -> None:
    assert {
        mutant.name for mutant in MUTANTS + DRAFT_MUTANTS + GROUP_MUTANTS + SERVED_MUTANTS
    } >= IN_CI


@pytest.mark.parametrize("mutant", chosen(MUTANTS), ids=lambda mutant: mutant.name)
def test_the_machine_sees(mutant: Mutant) -> None:
    judge(mutant, Machine)


@pytest.mark.parametrize("mutant", chosen(DRAFT_MUTANTS), ids=lambda mutant: mutant.name)
def test_the_machine_detects_with_a_draft_model(mutant: Mutant) -> None:
    judge(mutant, DraftMachine)


@pytest.mark.parametrize("mutant", chosen(GROUP_MUTANTS), ids=lambda mutant: mutant.name)
def test_the_machine_sees_in_several_groups(mutant: Mutant) -> None:
    judge(mutant, GroupMachine)


@pytest.mark.skipif(
    not HAS_GROUPS,
    reason="only vLLM 0.32 and newer give connectors enough information about multiple groups",
)
@pytest.mark.parametrize("mutant", chosen(SERVED_MUTANTS), ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("machine", [ServedMachine, BusyMachine] if IS_WHOLE else [ServedMachine])
def test_the_machine_detects_with_served_groups(machine: type[Machine], mutant: Mutant) -> None:
    judge(mutant, machine)


def judge(mutant: Mutant, machine: type[Machine]) -> None:
    said = verdict(mutant, machine)
    assert said is not None, f"not detected: {mutant.bug}"
    assert re.search(mutant.says, said), f"detected, but with a different message: {said}"


def verdict(mutant: Mutant, machine: type[Machine]) -> str | None:
    """Return the machine's message for a mutant, or None if it is not detected."""
    if mutant.where:
        machine = type(machine.__name__, (machine,), {"shapes": machine.shapes_of(mutant.where)})
    with pytest.MonkeyPatch.context() as mp:
        mutant.patch(mp)
        for seed in SEEDS:
            try:
                check(machine, examples=100, first_seed=seed, shrinks=False)
            except Exception as error:
                # Hypothesis raises an exception group if it cannot reproduce the failure.
                found = getattr(error, "exceptions", [error])
                return "".join(traceback.format_exception_only(found[0])).partition(
                    "Failing test case"
                )[0]
    return None
