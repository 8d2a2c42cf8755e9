"""Estimates whether waiting for chunks from disk is faster than computing their tokens.

The estimate uses two measured rates: chunks read from disk per second (concurrent writes lower this
rate), and prompt tokens computed per second. Disk measurements lose their weight within about a
minute. An unmeasured disk is assumed to be fast, so the first requests use it. A disk that was too
slow is measured again with reads that no request waits for. The caller passes in the clock and all
measurements.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from kvloft.seam.ids import ReqId

DISK_HALF_LIFE_S = 5.0
ENGINE_HALF_LIFE_S = 30.0
WINDOW_S = 1.0
"""Duration of reads or steps, in seconds, that halves the weight of older measurements."""
PRIOR_READS = 4
"""Number of chunks added to the measured reads as if they took no time, so that a few slow reads do
not make the disk look too slow.
"""
PROBE_S = 0.5
"""Maximum time, in seconds, to wait for the disk while the engine's rate is unknown."""
GRACE_S = 0.005
"""Maximum time, in seconds, by which waiting may be slower than computing. The limit is above zero,
because short times are hard to estimate.
"""
MAX_STEPS = 64
"""Maximum number of in-flight steps. Older steps are dropped, because their end was never reported.
"""
MAX_SIZE_RATIO = 8
"""Maximum ratio of a prompt's length to the largest number of prompt tokens in a measured step. The
engine's rate counts as unknown for longer prompts, because small steps do not predict how long such
prompts take.
"""
SAMPLE_S = 0.01
"""Minimum interval between reads of the store's counters, in seconds. With a server, each read is a
round trip.
"""


@dataclass(slots=True)
class FadingRate:
    """An amount of work and its duration. Older measurements carry less weight."""

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
    """Measures disk and engine rates, and tracks queued work."""

    always_pays: ClassVar[bool] = False
    """True if requests wait for even the slowest disk, as in `kvloft check`."""
    num_done: int = 0
    """Number of chunks read from disk since the store opened."""
    num_pending: int = 0
    """Number of chunks in the read queue."""
    _is_measured: bool = False
    """True if the store measures its read times."""
    _busy_us: int = 0
    _sampled_s: float = float("-inf")
    _disk: FadingRate = field(default_factory=lambda: FadingRate(DISK_HALF_LIFE_S))
    _engine: FadingRate = field(default_factory=lambda: FadingRate(ENGINE_HALF_LIFE_S))
    _longest_step: int = 0
    _steps: dict[int, tuple[float, int]] = field(default_factory=dict)
    """For each in-flight step that computes prompt tokens, its planning time and number of prompt
    tokens.
    """
    _num_steps: int = 0
    _step_ended_s: float = float("-inf")

    # -- measurements ---------------------------------------------------------------------------

    def is_sample_due(self, now: float) -> bool:
        return now - self._sampled_s >= SAMPLE_S

    def observe_disk(self, now: float, stats: Mapping[str, int]) -> None:
        """Record the store's counters: chunks read, busy time and queued chunks."""
        self._sampled_s = now
        num_done, busy_us = stats.get("disk_reads", 0), stats.get("disk_read_busy_us")
        if busy_us is None:
            return
        if self._is_measured and num_done >= self.num_done and busy_us >= self._busy_us:
            self._disk.add(now, num_done - self.num_done, (busy_us - self._busy_us) / 1e6)
        self._is_measured, self.num_done, self._busy_us = True, num_done, busy_us
        self.num_pending = stats.get("reads_pending", 0)

    def observe_reads_wanted(self, num_chunks: int) -> int:
        """Record that chunks were queued for reading. Return the value of `num_done` after the last
        of these reads.
        """
        self.num_pending += num_chunks
        return self.num_done + self.num_pending

    def observe_step_begin(self, now: float, num_prompt_tokens: int) -> int | None:
        """Record a planned step. Return the step's number, or None if the step computes no prompt
        tokens. Steps need numbers, because vLLM does not report the end of every empty step.
        """
        if num_prompt_tokens == 0:
            return None
        self._num_steps += 1
        self._steps[self._num_steps] = (now, num_prompt_tokens)
        self._steps.pop(self._num_steps - MAX_STEPS, None)
        return self._num_steps

    def observe_step_end(self, now: float, number: int | None) -> None:
        """Record the end of step ``number``, or of a step with no prompt tokens if ``number`` is
        None. The step's time starts when it was planned or when the previous step ended, whichever
        is later.
        """
        if number is not None and (step := self._steps.pop(number, None)) is not None:
            begin, num_tokens = step
            self._engine.add(now, num_tokens, now - max(begin, self._step_ended_s))
            self._longest_step = max(self._longest_step, num_tokens)
        self._step_ended_s = now

    @property
    def is_disk_idle(self) -> bool:
        """True if no reads are queued, so a read that measures the disk would not delay any
        requests.
        """
        return self.num_pending == 0

    # -- estimates ------------------------------------------------------------------------------

    def expected_read_s(self, num_chunks: int) -> float:
        return num_chunks * self._disk.seconds / (self._disk.amount + PRIOR_READS)

    def expected_compute_s(self, num_tokens: int) -> float | None:
        """Return the expected time, in seconds, to compute ``num_tokens`` prompt tokens, or None if
        the engine's rate is unknown.
        """
        if self._engine.seconds <= 0 or num_tokens > MAX_SIZE_RATIO * self._longest_step:
            return None
        return num_tokens * self._engine.seconds / self._engine.amount

    def pays(
        self, now: float, *, num_ahead: int, num_chunks: int, num_tokens: int, backlog_s: float
    ) -> bool:
        """Return True if a request should wait for ``num_chunks`` chunks (``num_tokens`` tokens)
        behind ``num_ahead`` queued chunks.

        ``backlog_s`` is the time until the engine would start computing the tokens. Waiting pays
        off if the first chunk arrives before the engine would start, or if all chunks arrive before
        it would finish.
        """
        if self.always_pays or not self._is_measured or num_chunks <= 0:
            return True
        self._disk.fade(now)
        read_s = self.expected_read_s(num_ahead + num_chunks)
        if (compute_s := self.expected_compute_s(num_tokens)) is None:
            return read_s < backlog_s + PROBE_S
        is_first_early = self.expected_read_s(num_ahead + 1) < backlog_s
        return is_first_early or read_s < backlog_s + compute_s + GRACE_S


@dataclass(slots=True)
class PromptBacklog:
    """Counts the prompt tokens left to compute for admitted requests."""

    num_tokens: int = 0
    _left: dict[ReqId, int] = field(default_factory=dict)

    def enter(self, req_id: ReqId, num_tokens: int) -> None:
        """Record an admitted request with ``num_tokens`` prompt tokens left to compute."""
        self.leave(req_id)
        if num_tokens > 0:
            self._left[req_id] = num_tokens
            self.num_tokens += num_tokens

    def leave(self, req_id: ReqId) -> None:
        """Remove a preempted or finished request."""
        self.num_tokens -= self._left.pop(req_id, 0)

    def compute(self, scheduled: Mapping[ReqId, int]) -> int:
        """Subtract a step's prompt tokens, and return their number."""
        total = 0
        for req_id, left in list(self._left.items()):
            num_tokens = min(scheduled.get(req_id, 0), left)
            total += num_tokens
            self.enter(req_id, left - num_tokens)
        return total
