"""A Hypothesis state machine that drives `Engine`, and a function that runs it a number of times
with a fixed seed.

Every rule is an event that can occur in an engine at any time. Hypothesis makes all random choices
so that it can shrink failures.
"""

import logging
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from .engine import Engine
from .groups import FULL, GROUPS, are_grouped, are_served
from .ledger import Ledger
from .shape import Shape, model_folder
from .symbols import ADAPTERS, VOCAB, Item, Spec, Turn, item_content, row_content

_pick = random.Random(7)
STORIES = [tuple(_pick.randrange(3, VOCAB) for _ in range(80)) for _ in range(3)]
STORIES.append(STORIES[0][:9] + STORIES[1][9:])
"""Prompts are prefixes of a few stories, so prompts share prefixes.

The last story diverges from the first story at position 9.
"""
FLAVOURS = ("salt", "adapter", "rows", "mixed", "item", "session", "no load", "prompt only")
IMAGES = ("image-a", "image-b")

SEVERAL = tuple(name for name, groups in GROUPS.items() if are_grouped(groups))
"""Includes models with a single group that keeps only part of a prefix."""
SERVED = tuple(name for name in SEVERAL if are_served(GROUPS[name]))
DRAFTERS = tuple(name for name, groups in GROUPS.items() if not are_grouped(groups))
"""Models with a single group, which also contains all draft layers."""
drafter_tokens = st.sampled_from([None, None, 24])
"""Draws the draft model's maximum context length, or None. Prompts have up to 40 tokens."""

MODEL = model_folder(Path(tempfile.mkdtemp(prefix="machine-model-")))


def make_spec(
    name: str, flavour: str, story: int, length: int, max_tokens: int, more: tuple[int, ...]
) -> Spec:
    """Return a request with the given flavor. Its prompt is a prefix of a story."""
    ids = STORIES[story][:length]
    return flavoured(Spec(name, ids, max_tokens, ids), flavour, more)


def flavoured(plain: Spec, flavour: str, more: tuple[int, ...]) -> Spec:
    """Apply a flavor: additional inputs that affect KV, or a different lifetime.

    ``more`` selects a variant, or is the next input of a session.
    """
    ids, length = plain.contents, len(plain.contents)
    if flavour == "salt":
        return replace(plain, salt="pepper")
    if flavour == "adapter":
        return replace(plain, adapter=ADAPTERS[more[0] % 2])
    if flavour in ("rows", "mixed"):
        return _with_rows(plain, mixed=flavour == "mixed")
    if flavour == "item":
        size = min(6, length)  # in vLLM, items with equal identifiers have equal sizes
        item = Item(f"{IMAGES[more[0] % 2]}-{size}", min(2, length - size), size)
        span = range(item.start, item.start + item.length)
        contents = tuple(
            item_content(t, item.identifier, i - item.start) if i in span else t
            for i, t in enumerate(ids)
        )
        return replace(plain, contents=contents, items=(item,))
    if flavour == "session":
        return replace(
            plain,
            max_tokens=min(plain.max_tokens, 4),
            turns=(Turn(more[:6], min(plain.max_tokens, 4)),),
        )
    return replace(
        plain,
        skips_cache=flavour == "no load",
        saves="prompt" if flavour == "prompt only" else None,
    )


def _with_rows(plain: Spec, *, mixed: bool) -> Spec:
    """Replace tokens with embedding rows.

    Equal ids have equal rows, so prompts with embeddings share prefixes.
    """
    ids = plain.contents
    rows = torch.tensor([[float(i), float(i * i), 1.0, 2.0] for i in ids])
    mask = tuple(i % 3 == 0 for i in ids) if mixed else None
    contents = tuple(
        token if mask and mask[i] else row_content(rows[i].numpy().tobytes())
        for i, token in enumerate(ids)
    )
    return replace(plain, contents=contents, ids=ids if mixed else None, embeds=rows, is_token=mask)


@st.composite
def one_group(draw: st.DrawFn, has_drafter: bool = False) -> Shape:
    """Draw a shape with a single full-attention group, which may contain draft layers."""
    groups = GROUPS[draw(st.sampled_from(DRAFTERS))] if has_drafter else (FULL,)
    num_drafts = draw(st.sampled_from([1, 2, 3] if has_drafter else [0, 0, 2]))
    return Shape(
        groups,
        async_scheduling=draw(st.booleans()),
        v2=draw(st.booleans()),
        caching=draw(st.sampled_from([True, True, False])),
        num_blocks=draw(st.sampled_from([16, 24, 60])),
        num_drafts=num_drafts,
        policy=draw(st.sampled_from(["recompute", "recompute", "recompute", "fail"])),
        host_frames=draw(st.sampled_from([6, 40, 400, 400, 400])),
        num_ranks=draw(st.sampled_from([1, 2])),
        has_disk=draw(st.sampled_from([False, False, True])),
        early_results=draw(st.booleans()),
        kv_groups=draw(st.sampled_from(["one", "one", "all"])),
        drafter_tokens=draw(drafter_tokens) if has_drafter else None,
    )


@st.composite
def several_groups(draw: st.DrawFn, names: tuple[str, ...] = SEVERAL) -> Shape:
    """Draw a shape of a hybrid model without kvloft. The shape may include a draft model."""
    groups = GROUPS[draw(st.sampled_from(names))]
    has_drafter = any(group.is_draft for group in groups)
    has_local = any(group.kind == "local" for group in groups)
    return Shape(
        groups,
        async_scheduling=draw(st.booleans()),
        v2=draw(st.booleans()),
        num_blocks=draw(st.sampled_from([12, 20])) * len(groups),
        num_drafts=draw(st.sampled_from([1, 2]))
        if has_drafter
        else 0
        if has_local
        else draw(st.sampled_from([0, 0, 2])),
        early_results=has_drafter,
        marks_drafts=draw(st.booleans()),
    )


@st.composite
def served_groups(draw: st.DrawFn, names: tuple[str, ...] = SERVED) -> Shape:
    """Draw a shape with multiple groups that kvloft supports.

    In most shapes, the arena has enough frames for all saves.
    """
    groups = GROUPS[draw(st.sampled_from(names))]
    has_drafter, kinds = any(group.is_draft for group in groups), {group.kind for group in groups}
    num_drafts = draw(
        st.sampled_from([1, 2] if has_drafter else [0] if "local" in kinds else [0, 0, 2])
    )
    return Shape(
        groups,
        async_scheduling=draw(st.booleans()),
        v2=draw(st.booleans()),
        kv_groups="all",
        caching="state" in kinds or draw(st.sampled_from([True, True, False])),
        num_blocks=draw(st.sampled_from([16, 24, 60])) * len(groups),
        num_drafts=num_drafts,
        policy=draw(st.sampled_from(["recompute", "recompute", "recompute", "fail"])),
        host_frames=draw(st.sampled_from([20, 60, 900, 900, 900])) * len(groups),
        num_ranks=draw(st.sampled_from([1, 2])),
        has_disk=draw(st.sampled_from([False, False, True])),
        early_results=has_drafter or (num_drafts > 0 and draw(st.booleans())),
        drafter_tokens=draw(drafter_tokens) if has_drafter else None,
        marks_drafts=draw(st.booleans()),
    )


class Arrival(NamedTuple):
    """A future request.

    ``course`` is the index of the flavor in the menu, or a negative number for no flavor. ``more``
    is the next input of a session.
    """

    story: int
    length: int
    max_tokens: int
    course: int
    more: tuple[int, ...]


crowds = st.lists(
    st.builds(
        Arrival,
        st.sampled_from([0, 0, 0, 1, 2, 3]),
        st.integers(1, 40),
        st.integers(1, 14),
        st.integers(-3, 2),
        st.lists(st.integers(3, 8), min_size=1, max_size=6).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


class Machine(RuleBasedStateMachine):
    """The state machine (see the module's docstring). Subclasses define the shapes."""

    shapes: ClassVar[Any] = one_group()
    shapes_of: ClassVar[Any]
    """Returns a strategy for shapes with one of the named group sets.

    Only machines with multiple groups use this strategy.
    """
    engine: Engine | None = None
    seen: ClassVar[Counter[str]] = Counter()
    """Counts of events in all engines so far."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: tempfile.TemporaryDirectory[str] | None = None
        self.num_arrived = 0
        self.menu: list[str] = []
        """Flavors of this engine's requests. The number of flavors is small, so requests share
        them.
        """

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        shape = data.draw(type(self).shapes, label="shape")
        if shape.has_disk:
            self.disk = tempfile.TemporaryDirectory(
                prefix="machine-disk-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None
            )
        self.menu = data.draw(
            st.lists(st.sampled_from(FLAVOURS), min_size=1, max_size=3), label="menu"
        )
        self._begin(shape, Ledger(shape.num_ranks, shape.groups))
        self.arrive(data.draw(crowds, label="crowd"), 0)

    def _begin(self, shape: Shape, ledger: Ledger) -> None:
        self.engine = Engine(
            MODEL, shape, self.num_arrived, Path(self.disk.name) if self.disk else None, ledger
        )

    # -- requests and steps
    # ------------------------------------------------------------------------------

    @rule(crowd=crowds, ahead=st.integers(0, 8))
    def arrive(self, crowd: list[Arrival], ahead: int) -> None:
        for arrival in crowd:
            self._add(arrival)
        self._run(ahead)

    def _add(self, arrival: Arrival) -> None:
        shape = self.engine.shape
        flavour = self.menu[arrival.course % len(self.menu)] if arrival.course >= 0 else "plain"
        if shape.num_drafts and flavour in ("rows", "mixed", "session"):
            # vLLM does not support embeddings with draft tokens. In sessions, it keeps the KV of
            # truncated draft tokens for the next input.
            flavour = "plain"
        length = max(1, min(arrival.length, self.most_tokens()))
        max_tokens = min(arrival.max_tokens, shape.longest - length - 1)
        self.num_arrived += 1
        self._ask(
            make_spec(
                f"r{self.num_arrived}", flavour, arrival.story, length, max_tokens, arrival.more
            )
        )

    def most_tokens(self) -> int:
        """Return the maximum number of tokens in a prompt."""
        longest = self.engine.shape.longest
        return longest - 24 if longest > 32 else longest // 2

    def _ask(self, spec: Spec) -> None:
        self.engine.add(spec)

    @rule(
        count=st.integers(1, 20),
        budget=st.sampled_from([16, 16, 7, 3, 1]),
        acceptance=st.sampled_from([0.6, 0.0, 1.0]),
        delay=st.sampled_from([0, 0, 2, 4]),
    )
    def run(self, count: int, budget: int, acceptance: float, delay: int) -> None:
        """Run steps with at most ``budget`` tokens each so that some requests are not scheduled.

        Copies are at most ``delay`` steps late.
        """
        engine = self.engine
        engine.trouble.max_delay = delay
        for worker in engine.workers:
            worker.acceptance = acceptance
        engine.scheduler.max_num_scheduled_tokens = budget
        self._run(count)
        engine.scheduler.max_num_scheduled_tokens = engine.shape.max_batched_tokens

    def _run(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine and self.engine.unfinished)
    @rule(which=st.integers(0, 20), ahead=st.integers(0, 3), loads=st.booleans())
    def abort(self, which: int, ahead: int, loads: bool) -> None:
        """Abort a request. With ``loads``, prefer a request whose load is in progress."""
        living = (self.engine.loading if loads else []) or self.engine.unfinished
        self.engine.abort(living[which % len(living)])
        self._run(ahead)

    @rule(ahead=st.integers(0, 6))
    def preempt_all(self, ahead: int) -> None:
        self.engine.reset(running=True, connector=False)
        self._run(ahead)

    @rule(running=st.booleans(), crowd=crowds, ahead=st.integers(0, 8))
    def replace_weights(self, running: bool, crowd: list[Arrival], ahead: int) -> None:
        self.engine.reset(running=running, connector=True)
        self.arrive(crowd, ahead)

    # -- faults
    # ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.engine and self.engine.shape.has_connector)
    @rule(
        save_failure=st.sampled_from([0.0, 0.3, 1.0]),
        load_failure=st.sampled_from([0.0, 0.3, 0.6]),
        count=st.integers(1, 10),
    )
    def copies_fail(self, save_failure: float, load_failure: float, count: int) -> None:
        self.engine.trouble.save_failure, self.engine.trouble.load_failure = (
            save_failure,
            load_failure,
        )
        self._run(count)
        self.engine.trouble.save_failure = self.engine.trouble.load_failure = 0.0

    @precondition(lambda self: self.engine and self.engine.shape.has_connector)
    @rule(rate=st.sampled_from([0.3, 1.0]), count=st.integers(1, 10))
    def dead_worker_writes(self, rate: float, count: int) -> None:
        """Simulate a dead engine's worker that writes to this engine's frames, as if a store had
        released the frames too early.
        """
        self.engine.trouble.strangers = rate
        self._run(count)
        self.engine.trouble.strangers = 0.0

    @precondition(
        lambda self: self.engine and self.engine.store is not None and self.engine.store.keys
    )
    @rule(which=st.integers(0, 50), ahead=st.integers(0, 8))
    def evict(self, which: int, ahead: int) -> None:
        keys = self.engine.store.keys
        self.engine.store.discard([keys[which % len(keys)]])
        self._run(ahead)

    @precondition(lambda self: self.engine and self.engine.shape.has_disk)
    @rule(patience=st.sampled_from([0, 1, 3, 1000]))
    def disk_slows_down(self, patience: int) -> None:
        self.engine.store.patience = patience

    @rule(seconds=st.sampled_from([0.1, 6.0, 70.0]), ahead=st.integers(0, 4))
    def time_passes(self, seconds: float, ahead: int) -> None:
        self.engine.now += seconds
        self._run(ahead)

    @precondition(
        lambda self: self.engine and self.engine.shape.has_disk and self.engine.num_steps > 10
    )
    @rule(has_new_weights=st.sampled_from([False, False, True]), crowd=crowds)
    def restart(self, has_new_weights: bool, crowd: list[Arrival]) -> None:
        """Abort all requests, shut down the engine and start another engine.

        The new engine finds the chunks on disk, unless it has different weights.
        """
        engine = self.engine
        for req_id in engine.unfinished:
            engine.abort(req_id)
        self._end()
        engine.ledger.new_life(has_new_weights=has_new_weights)
        self._begin(engine.shape, engine.ledger)
        self.arrive(crowd, 8)

    def _end(self) -> None:
        engine, self.engine = self.engine, None
        try:
            if not engine.is_broken:
                engine.settle()
        finally:
            self._count(engine)
            engine.close()

    def _count(self, engine: Engine) -> None:
        blocks = sum(worker.memory.num_checked for worker in engine.workers)
        self.seen.update(
            {
                "steps": engine.num_scheduled,
                "preemptions": engine.num_preempted,
                "blocks read": blocks,
            }
        )
        hits = "hits with multiple groups" if len(engine.shape.groups) > 1 else "hits"
        self.seen.update(
            {hits: engine.num_hits, f"{hits}, behind local ones": engine.num_mixed_hits}
        )
        self.seen[f"{hits}, async"] += engine.num_hits * engine.shape.async_scheduling
        self.seen[f"{hits}, with drafts"] += engine.num_hits * (engine.shape.num_drafts > 0)
        self.seen.update(
            {
                "loads": engine.num_loaded,
                "saves": engine.ledger.num_saved,
                "offers": engine.ledger.num_offered,
            }
        )
        engine.ledger.num_saved = engine.ledger.num_offered = 0

    def teardown(self) -> None:
        try:
            if self.engine is not None:
                self._end()
        finally:
            if self.disk is not None:
                self.disk.cleanup()


class DraftMachine(Machine):
    """Engines with kvloft and a draft model that shares the only group."""

    shapes = one_group(has_drafter=True)
    seen: ClassVar[Counter[str]] = Counter()


class ServedMachine(Machine):
    """Engines with kvloft and multiple groups."""

    shapes_of = staticmethod(served_groups)
    shapes = served_groups()
    seen: ClassVar[Counter[str]] = Counter()


class GroupMachine(Machine):
    """Engines with multiple groups and without kvloft. The machine compares vLLM's own prefix cache
    with its model of the groups.
    """

    shapes_of = staticmethod(several_groups)
    shapes = several_groups()
    seen: ClassVar[Counter[str]] = Counter()


def check(
    machine: type[Machine],
    *,
    examples: int,
    first_seed: int = 1,
    steps: int = 30,
    shrinks: bool = True,
) -> None:
    """Run the machine ``examples`` times. Equal seeds give equal runs.

    Raises an error that lists the breaches.
    """
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=phases,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    logging.disable(logging.ERROR)  # engines log many messages
    try:
        run_state_machine_as_test(seed(first_seed)(machine), settings=chosen)
    finally:
        logging.disable(logging.NOTSET)
