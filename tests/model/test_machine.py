"""The correctness machine on the unbroken product, bounded; MODEL_HOURS makes it long (`make model-check HOURS=n`)."""

import os
import time

from .machine import Machine, check

HOURS = float(os.environ.get("MODEL_HOURS", "0"))


def test_one_group_is_served_right_whatever_happens() -> None:
    check(Machine, examples=150)


def test_for_hours() -> None:
    deadline = time.monotonic() + HOURS * 3600
    first_seed = int(os.environ.get("MODEL_SEED", "1000"))
    while time.monotonic() < deadline:
        first_seed += 1
        print(f"seed {first_seed}", flush=True)
        check(Machine, examples=200, first_seed=first_seed, steps=50)
