"""The correctness machine on the unbroken product, bounded; MODEL_HOURS makes it long (`make model-check HOURS=n`)."""

import os
import time
from collections.abc import Iterator

import pytest

from .machine import DraftMachine, GroupMachine, Machine, ServedMachine, check

HOURS = float(os.environ.get("MODEL_HOURS", "0"))


@pytest.fixture(params=[Machine, DraftMachine, ServedMachine, GroupMachine], ids=["one group", "drafter", "several groups", "no connector"])
def machine(request: pytest.FixtureRequest) -> Iterator[type[Machine]]:
    """Of either kind; its counts begin at nothing."""
    kind: type[Machine] = request.param
    kind.seen.clear()
    yield kind
    kind.seen.clear()


def test_every_block_that_is_read_holds_its_content(machine: type[Machine]) -> None:
    check(machine, examples=120)
    wanted = {"steps", "preemptions", "blocks read"} | ({"saves", "loads", "offers"} if machine is not GroupMachine else set())
    assert wanted <= {name for name, count in machine.seen.items() if count > 20}, f"the machine has grown tame: {machine.seen}"


@pytest.mark.skipif(not HOURS, reason="the long form: make model-check HOURS=n")
def test_for_hours() -> None:
    deadline = time.monotonic() + HOURS * 3600
    first_seed = int(os.environ.get("MODEL_SEED", "1000"))
    while time.monotonic() < deadline:
        first_seed += 1
        print(f"seed {first_seed}", dict(Machine.seen + DraftMachine.seen + GroupMachine.seen), flush=True)
        check(Machine, examples=200, first_seed=first_seed, steps=50)
        check(DraftMachine, examples=200, first_seed=first_seed, steps=50)
        check(GroupMachine, examples=200, first_seed=first_seed, steps=50)
