"""Tests the choice between waiting for the disk and computing: first the estimates alone, then
runs with many requests and disks of known speed.
"""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_store import ModelStore
from sim_checks import settle
from sim_engine import SymbolicEngine
from sim_request import Request, Setup
from sim_scenes import serve

from kvloft.plan.disk_pacing import (
    GRACE_S,
    MAX_STEPS,
    PRIOR_READS,
    DiskPacing,
    PromptBacklog,
)

PROMPT_TOKENS, NUM_PROMPTS = 64, 40
TOKENS_PER_S = 6400.0
"""The compute rate of the simulated engine, which takes 10 ms per prompt."""
STEP_S = 0.0005


def pacing(*, read_s: float | None = None, tokens_per_s: float | None = None) -> DiskPacing:
    """Return a DiskPacing that has measured these rates."""
    made = DiskPacing()
    made.observe_disk(0.0, {"disk_reads": 0, "disk_read_busy_us": 0, "reads_pending": 0})
    if read_s is not None:
        num_reads = 1000 * PRIOR_READS
        made.observe_disk(
            0.0,
            {
                "disk_reads": num_reads,
                "disk_read_busy_us": int(1e6 * read_s * num_reads),
                "reads_pending": 0,
            },
        )
    if tokens_per_s is not None:
        made.observe_step_end(0.0, made.observe_step_begin(-1.0, int(tokens_per_s)))
    return made


def waits(
    made: DiskPacing,
    *,
    ahead: int = 0,
    chunks: int = 10,
    tokens: int = 1000,
    backlog_s: float = 0.0,
    now: float = 0.0,
) -> bool:
    return made.pays(
        now, num_ahead=ahead, num_chunks=chunks, num_tokens=tokens, backlog_s=backlog_s
    )


def test_a_disk_faster_than_the_engine_is_waited_for_and_a_slower_one_is_not() -> None:
    assert waits(pacing(read_s=0.01, tokens_per_s=5000))
    assert not waits(pacing(read_s=0.03, tokens_per_s=5000))


def test_a_check_waits_for_any_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskPacing, "always_pays", True)
    assert waits(pacing(read_s=3.0, tokens_per_s=5000), ahead=100)


def test_chunks_of_others_ahead_count() -> None:
    assert not waits(pacing(read_s=0.01, tokens_per_s=5000), ahead=20)


def test_a_line_of_prompts_leaves_a_slow_disk_time_for_all_chunks_or_the_first() -> None:
    made = pacing(read_s=0.03, tokens_per_s=5000)
    assert waits(made, backlog_s=0.2)
    assert waits(made, backlog_s=0.04), "the first chunk is read before the engine could start"
    assert not waits(made, backlog_s=0.02)


def test_an_engine_of_unknown_speed_waits_for_half_a_second_at_most() -> None:
    assert waits(pacing(read_s=0.04))
    assert not waits(pacing(read_s=0.06))
    assert not waits(pacing(read_s=0.06, tokens_per_s=100)), (
        "steps of 100 tokens do not determine the rate for 1000 tokens"
    )


def test_a_disk_that_was_slow_is_tried_again_after_a_minute() -> None:
    made = pacing(read_s=0.1, tokens_per_s=5000)
    assert not waits(made, now=5.0)
    assert waits(made, now=120.0)


def test_a_disk_that_delivers_nothing_becomes_slow_while_it_is_waited_for() -> None:
    made = pacing(tokens_per_s=5000)
    assert waits(made)
    made.observe_disk(0.5, {"disk_reads": 0, "disk_read_busy_us": 500_000, "reads_pending": 10})
    assert not waits(made, now=0.5)


def test_a_store_that_does_not_count_its_reads_is_waited_for() -> None:
    made = DiskPacing()
    made.observe_disk(0.0, {"frames": 3})
    assert waits(made)


def test_a_restarted_store_is_not_a_measurement() -> None:
    made = pacing(read_s=0.01, tokens_per_s=5000)
    made.observe_disk(0.0, {"disk_reads": 1, "disk_read_busy_us": 10_000_000, "reads_pending": 0})
    assert waits(made)


def test_steps_that_overlap_are_measured_one_after_the_other() -> None:
    made, numbers = DiskPacing(), []
    for nth in range(10):  # each step is planned when the previous step starts
        numbers.append(made.observe_step_begin(nth, 100))
        if nth:
            made.observe_step_end(nth + 1.0, numbers[nth - 1])
    assert made.expected_compute_s(100) == pytest.approx(1.0, rel=0.15)


def test_empty_steps_whose_ends_are_not_reported_do_not_change_the_rate() -> None:
    """While a single request waits for the disk, vLLM runs empty steps and does not report their
    end.
    """
    made, now = DiskPacing(), 0.0
    for nth in range(40):
        for _ in range(5):
            assert made.observe_step_begin(now, 0) is None
            now += 0.001
        num_tokens, seconds = (1000, 1.0) if nth % 10 == 0 else (0, 0.01)
        number = made.observe_step_begin(now, num_tokens)
        made.observe_step_end(now := now + seconds, number)
    assert made.expected_compute_s(1000) == pytest.approx(1.0, rel=0.02)


def test_a_step_whose_end_is_not_reported_is_dropped() -> None:
    made = DiskPacing()
    for nth in range(100):
        number = made.observe_step_begin(nth, 100)
        if nth == 99:
            made.observe_step_end(nth + 1.0, number)
    assert len(made._steps) < MAX_STEPS
    assert made.expected_compute_s(100) == pytest.approx(1.0)


@given(
    read_s=st.floats(1e-5, 1.0),
    rate=st.floats(1e3, 1e6),
    ahead=st.integers(0, 100),
    chunks=st.integers(1, 100),
    backlog_s=st.floats(0, 10),
)
def test_waiting_is_never_expected_to_end_later_than_computing(
    read_s: float, rate: float, ahead: int, chunks: int, backlog_s: float
) -> None:
    made = pacing(read_s=read_s, tokens_per_s=rate)
    tokens = min(16 * chunks, int(rate))
    compute_s = tokens / int(rate)
    if waits(made, ahead=ahead, chunks=chunks, tokens=tokens, backlog_s=backlog_s):
        by_disk = read_s * (ahead + chunks) * 1000 / 1001
        first = read_s * (ahead + 1) * 1000 / 1001
        assert by_disk <= backlog_s + compute_s + GRACE_S + 1e-3 or first <= backlog_s + 1e-3
    elif ahead == 0:
        assert read_s * chunks >= backlog_s + compute_s - 1e-3


def test_the_backlog_counts_the_rest_of_admitted_prompts() -> None:
    line = PromptBacklog()
    line.enter("a", 100)
    line.enter("b", 50)
    assert (line.compute({"a": 60, "b": 70, "c": 9}), line.num_tokens) == (110, 40)
    line.leave("a")
    line.leave("a")
    assert line.num_tokens == 0


def test_recent_reads_count_more_than_those_before_them() -> None:
    made = pacing(tokens_per_s=5000)
    made.observe_disk(0.0, {"disk_reads": 10, "disk_read_busy_us": 1_000_000, "reads_pending": 0})
    assert not waits(made)
    for nth in range(1, 7):
        num_reads, busy_us = 10 + 500 * nth, 1_000_000 + 500_000 * nth
        made.observe_disk(
            0.0, {"disk_reads": num_reads, "disk_read_busy_us": busy_us, "reads_pending": 0}
        )
    assert waits(made)


# -- many requests ---------------------------------------------------------------------------------


@dataclass
class TimedStore(ModelStore):
    """A store that reads ``chunks_per_s`` chunks per second from disk, one at a time."""

    chunks_per_s: float = 1.0
    busy_s: float = 0.0
    num_read: int = 0
    _credit: float = 0.0

    def advance(self, seconds: float) -> None:
        if not self.reading:
            self._credit = 0.0
            return
        self.busy_s += seconds
        self._credit += seconds * self.chunks_per_s
        num_reads = min(int(self._credit), len(self.reading))
        self._credit -= num_reads
        self.num_read += num_reads
        self.tick(num_reads)

    def stats(self) -> dict[str, int]:
        return {
            "disk_reads": self.num_read,
            "disk_read_busy_us": int(1e6 * self.busy_s),
            "reads_pending": len(self.reading),
        }


def makespan(chunks_per_s: float, *, loads: bool, num_warm: int = 4) -> float:
    return crowd(chunks_per_s, loads=loads, num_warm=num_warm)[0]


def crowd(chunks_per_s: float, *, loads: bool, num_warm: int = 4) -> tuple[float, SymbolicEngine]:
    """Run all prompts, which are stored only on disk. Return the time in seconds and the engine.

    The engine first computes ``num_warm`` uncached prompts to measure its compute rate.
    """
    setup = Setup(
        with_disk=True, num_blocks=4000, num_frames=4000, local_cache=False, max_running=64
    )
    engine = SymbolicEngine(setup, TimedStore(4000, with_disk=True, chunks_per_s=chunks_per_s))
    prompts = [
        [i // 3**d % 3 for d in range(8)] + [1] * (PROMPT_TOKENS - 7)
        for i in range(NUM_PROMPTS + num_warm)
    ]
    for i, prompt in enumerate(prompts[num_warm:]):
        serve(engine, Request(f"before{i}", list(prompt), 1))
    for entry in sorted(
        engine.store.entries.values(), key=lambda e: -len(engine.book.prefix_of[e.key])
    ):
        if entry.frame is not None:
            engine.store.evict(entry)
    assert isinstance(engine.store, TimedStore)
    engine.now += 1000.0
    for i, prompt in enumerate(prompts[:num_warm]):
        engine.add(Request(f"warm{i}", list(prompt), 1, skip_load=True))
    run(engine)
    begin = engine.now
    for i, prompt in enumerate(prompts[num_warm:]):
        engine.add(Request(f"r{i}", list(prompt), 1, skip_load=not loads))
    run(engine)
    settle(engine)
    return engine.now - begin, engine


def run(engine: SymbolicEngine) -> None:
    """Run steps with at most two prompts each. A step takes as long as its tokens require."""
    assert isinstance(engine.store, TimedStore)
    while engine.requests:
        engine.schedule(2 * PROMPT_TOKENS)
        seconds = STEP_S + sum(engine._num.values()) / TOKENS_PER_S
        engine.execute()
        engine.now += seconds
        engine.store.advance(seconds)
        engine.update()
        assert engine.now < 1e5


CHUNKS_PER_S = TOKENS_PER_S / 4
"""The rate of a disk that is as fast as the engine, in chunks per second."""


@pytest.mark.parametrize(
    ("speed", "most"), [(0.03, 1.1), (0.3, 1.1), (1.0, 1.0), (2.0, 0.8), (100.0, 0.1)]
)
def test_a_crowd_is_never_slower_than_computed_and_a_fast_disk_is_used(
    speed: float, most: float
) -> None:
    plain = makespan(CHUNKS_PER_S, loads=False)
    assert makespan(speed * CHUNKS_PER_S, loads=True) <= most * plain


def test_a_fresh_engine_with_a_slow_disk_soon_computes() -> None:
    plain = makespan(CHUNKS_PER_S, loads=False)
    assert makespan(0.03 * CHUNKS_PER_S, loads=True, num_warm=0) <= plain + 0.6


@pytest.mark.parametrize(("speed", "is_slow"), [(0.03, True), (100.0, False)])
def test_tokens_left_on_a_slow_disk_are_counted(speed: float, is_slow: bool) -> None:
    _, engine = crowd(speed * CHUNKS_PER_S, loads=True)
    num_slow, num_loaded = engine.core.counters["disk_slow_tokens"], engine.num_loaded_tokens
    assert num_slow + num_loaded <= NUM_PROMPTS * (PROMPT_TOKENS + 1)
    assert (num_slow > NUM_PROMPTS * PROMPT_TOKENS / 2) == is_slow
    assert is_slow or num_slow == 0
