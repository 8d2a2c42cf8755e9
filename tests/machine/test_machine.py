"""Runs the correctness machine on the unmodified product for a limited time.

MODEL_HOURS=n adds a run of n hours (`make model-check HOURS=n`).
"""

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from .busy import BUSY, BusyMachine
from .machine import DraftMachine, GroupMachine, Machine, ServedMachine, check
from .shape import HAS_GROUPS

HOURS = float(os.environ.get("MODEL_HOURS", "0"))
EXAMPLES = 40
"""Number of engine lifetimes per machine. Together, these lifetimes take about ten CPU seconds."""
KINDS: dict[str, type[Machine]] = {
    "one group": Machine,
    "drafter": DraftMachine,
    "several groups": ServedMachine,
    "no connector": GroupMachine,
    "asked again": BusyMachine,
}
SEEN = {"steps", "preemptions", "blocks read"}
BESIDE_KVLOFT = SEEN | {"saves", "loads", "offers"}
WANTED = {
    "one group": BESIDE_KVLOFT | {"hits"},
    "drafter": BESIDE_KVLOFT | {"hits"},
    "several groups": BESIDE_KVLOFT | {"hits with multiple groups"},
    "no connector": SEEN,
    "asked again": BESIDE_KVLOFT | {"hits with multiple groups"},
}
"""Events that must occur in a meaningful run."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the name of each machine. The machine's event counters start at zero."""
    name: str = request.param
    if name in ("several groups", "asked again") and not HAS_GROUPS:
        pytest.skip(
            "only vLLM 0.32 and newer give connectors enough information about multiple groups"
        )
    KINDS[name].seen.clear()
    yield name
    KINDS[name].seen.clear()


def test_every_block_that_is_read_holds_its_content(kind: str) -> None:
    check(KINDS[kind], examples=EXAMPLES // 4 if kind == "asked again" else EXAMPLES)
    seen = KINDS[kind].seen
    assert WANTED[kind] <= {name for name, count in seen.items() if count > 20}, (
        f"the machine produces too few events: {seen}"
    )


@pytest.mark.skipif(not HOURS, reason="long run: make model-check HOURS=n")
def test_for_hours() -> None:
    deadline = time.monotonic() + HOURS * 3600
    round_number = int(os.environ.get("MODEL_SEED", "1000"))
    machines = [machine for machine in KINDS.values() if machine is not BusyMachine] + list(
        BUSY.values()
    ) * HAS_GROUPS
    while time.monotonic() < deadline:
        round_number += 1
        for nth, machine in enumerate(machines):
            check(
                machine,
                # Machines with multiple groups have the most failure modes.
                examples=50 if machine in BUSY.values() else 25,
                first_seed=100 * round_number + nth,
                steps=50,
            )
        total = sum(
            (machine.seen for machine in machines),
            Counter({"CPU seconds": round(time.process_time())}),
        )
        print(
            f"seed {round_number}:", ", ".join(f"{count} {name}" for name, count in total.items())
        )
        hits = ", ".join(
            f"{name} {machine.seen['hits'] + machine.seen['hits with multiple groups']}"
            for name, machine in BUSY.items()
        )
        print(f"  hits with many repeated requests: {hits}", flush=True)
        if (
            not gc.get_freeze_count()
        ):  # keeps the garbage collector from repeatedly examining vLLM's modules
            gc.collect()
            gc.freeze()
