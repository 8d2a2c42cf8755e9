"""Pacing of disk reads: estimates whether waiting for chunks from disk is faster than computing
their tokens.

Two rates are measured: how fast chunks arrive from disk, including what writes take, and how fast
the engine computes prompt tokens. The disk's measurements fade within about a minute. A disk that
was not measured counts as fast, so it is tried at the start; one that was too slow is measured by
reads that no request waits for. Pure: the clock and all numbers are passed in.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloft.seam.ids import ReqId

DISK_HALF_LIFE_S = 5.0
ENGINE_HALF_LIFE_S = 30.0
WINDOW_S = 1.0
"""Seconds of reading, or of steps, after which older measurements count for half."""
PRIOR_READS = 4
"""The disk's rate is measured as if this many more chunks had arrived, in no time."""
PROBE_S = 0.5
"""Longest expected wait while the engine's rate is unknown."""
GRACE_S = 0.005
"""Tolerance for a wait that is expected to take longer than computing, because short times are hard
to estimate.
"""
MAX_SIZE_RATIO = 8
"""Steps with few tokens say little about longer prompts: one this many times longer is computed at
an unknown rate.
"""
SAMPLE_S = 0.01
"""Shortest time between two reads of the store's counters. Over a server each is a round trip."""


@dataclass(slots=True)
class FadingRate:
    """An amount and the seconds that it took. Older measurements count for less."""

    half_life_s: float
    amount: float = 0.0
    seconds: float = 0.0
    _faded_s: float = 0.0

    def fade(self, now: float) -> None:
        factor = 0.5 ** (max(0.0, now - self._faded_s) / self.half_life_s)
        self.amount *= factor
        self.seconds *= factor
        self._faded_s = now

    def add(self, now: float, amount: float, seconds: float) -> None:
        self.fade(now)
        factor = 0.5 ** (seconds / WINDOW_S)
        self.amount = self.amount * factor + amount
        self.seconds = self.seconds * factor + seconds


@dataclass(slots=True)
class DiskPacing:
    """Measured rates of the disk and the engine, and what both have yet to do."""

    num_done: int = 0
    """Chunks that the disk has read since the store was opened."""
    num_pending: int = 0
    """Chunks that wait to be read."""
    _is_measured: bool = False
    """The store counts the time of its reads."""
    _busy_us: int = 0
    _sampled_s: float = float("-inf")
    _disk: FadingRate = field(default_factory=lambda: FadingRate(DISK_HALF_LIFE_S))
    _engine: FadingRate = field(default_factory=lambda: FadingRate(ENGINE_HALF_LIFE_S))
    _longest_step: int = 0
    _steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4))
    """Steps in flight: when each was planned, and its prompt tokens."""
    _step_ended_s: float = float("-inf")

    # -- measurements ---------------------------------------------------------------------------

    def is_sample_due(self, now: float) -> bool:
        return now - self._sampled_s >= SAMPLE_S

    def observe_disk(self, now: float, stats: Mapping[str, int]) -> None:
        """Record the store's counters: chunks read, the time in which any was wanted, and chunks
        that wait.
        """
        self._sampled_s = now
        num_done, busy_us = stats.get("disk_reads", 0), stats.get("disk_read_busy_us")
        if busy_us is None:
            return
        if self._is_measured and num_done >= self.num_done and busy_us >= self._busy_us:
            self._disk.add(now, num_done - self.num_done, (busy_us - self._busy_us) / 1e6)
        self._is_measured, self.num_done, self._busy_us = True, num_done, busy_us
        self.num_pending = stats.get("reads_pending", 0)

    def observe_reads_wanted(self, num_chunks: int) -> int:
        """Count chunks wanted since the last sample; returns the value of `num_done` at which they
        will have been read.
        """
        self.num_pending += num_chunks
        return self.num_done + self.num_pending

    def observe_step_begin(self, now: float, num_prompt_tokens: int) -> None:
        self._steps.append((now, num_prompt_tokens))

    def observe_step_end(self, now: float) -> None:
        """Record the end of the oldest step in flight. It ran since it was planned, or since the
        step before it ended.
        """
        if not self._steps:
            return
        begin, num_tokens = self._steps.popleft()
        if num_tokens > 0:
            self._engine.add(now, num_tokens, now - max(begin, self._step_ended_s))
            self._longest_step = max(self._longest_step, num_tokens)
        self._step_ended_s = now

    @property
    def is_disk_idle(self) -> bool:
        """True if no chunk waits to be read: then a read for which no request waits delays none,
        and measures the disk.
        """
        return self.num_pending == 0

    # -- estimates ------------------------------------------------------------------------------

    def expected_read_s(self, num_chunks: int) -> float:
        """Return the seconds until the disk has read this many more chunks."""
        return num_chunks * self._disk.seconds / (self._disk.amount + PRIOR_READS)

    def expected_compute_s(self, num_tokens: int) -> float | None:
        """Return the seconds that the engine needs for this many prompt tokens; None if its rate is
        unknown.
        """
        if self._engine.seconds <= 0 or num_tokens > MAX_SIZE_RATIO * self._longest_step:
            return None
        return num_tokens * self._engine.seconds / self._engine.amount

    def pays(
        self, now: float, *, num_ahead: int, num_chunks: int, num_tokens: int, backlog_s: float
    ) -> bool:
        """Return whether to wait for ``num_chunks``, which hold ``num_tokens``, behind
        ``num_ahead`` chunks of others.

        ``backlog_s``: time until the engine would begin to compute them. It pays to wait for all if
        they arrive before they would be computed, and for the first of them if it arrives before
        the engine would begin.
        """
        if not self._is_measured or num_chunks <= 0:
            return True
        self._disk.fade(now)
        read_s = self.expected_read_s(num_ahead + num_chunks)
        if (compute_s := self.expected_compute_s(num_tokens)) is None:
            return read_s < backlog_s + PROBE_S
        comes_first = self.expected_read_s(num_ahead + 1) < backlog_s
        return comes_first or read_s < backlog_s + compute_s + GRACE_S


@dataclass(slots=True)
class PromptBacklog:
    """Prompt tokens of admitted requests that the engine has yet to compute. Requests that generate
    cost nothing here.
    """

    num_tokens: int = 0
    _left: dict[ReqId, int] = field(default_factory=dict)

    def enter(self, req_id: ReqId, num_tokens: int) -> None:
        """Record that a request was admitted and has this many prompt tokens to compute."""
        self.leave(req_id)
        if num_tokens > 0:
            self._left[req_id] = num_tokens
            self.num_tokens += num_tokens

    def leave(self, req_id: ReqId) -> None:
        """Remove a request that was preempted or finished."""
        self.num_tokens -= self._left.pop(req_id, 0)

    def compute(self, scheduled: Mapping[ReqId, int]) -> int:
        """Subtract the prompt tokens of a step, and return their number."""
        total = 0
        for req_id, left in list(self._left.items()):
            num_tokens = min(scheduled.get(req_id, 0), left)
            total += num_tokens
            self.enter(req_id, left - num_tokens)
        return total
