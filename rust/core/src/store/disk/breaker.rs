//! A circuit breaker that pauses reads from or writes to a failing or hung tier, then probes the
//! tier with one operation at a time.
//!
//! This module does not read a clock. Callers pass in the time.

use std::time::Duration;

/// Number of consecutive errors that open the breaker.
const MAX_ERRORS: u32 = 4;
/// An operation that has been running this long counts as hung.
pub(crate) const HANG_AFTER: Duration = Duration::from_secs(5);
/// Delay before the first probe. The delay doubles after each failed probe.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

/// What the outcome of an operation says about the tier's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IoOutcome {
    /// The tier works. A read of damaged bytes also counts as a success.
    Succeeded,
    /// The operation failed because of the tier.
    Failed,
    /// The outcome says nothing about the tier, for example because the file system is full.
    Neutral,
}

impl IoOutcome {
    pub(crate) fn of(has_succeeded: bool) -> Self {
        if has_succeeded { Self::Succeeded } else { Self::Failed }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    num_errors: u32,
    /// Length of the current pause, or zero while the breaker is closed.
    backoff: Duration,
    /// Earliest time at which the next operation can start.
    pub(crate) retry_at: Duration,
    /// Ticket of the operation probing the tier.
    probe: Option<u64>,
    pub(crate) num_trips: u64,
}

impl Breaker {
    pub(crate) fn is_open(&self) -> bool {
        !self.backoff.is_zero()
    }

    /// Returns true if operations may be queued, because the breaker is closed or a probe is due.
    pub(crate) fn accepts(&self, now: Duration) -> bool {
        now >= self.retry_at
    }

    pub(crate) fn may_begin(&self, now: Duration) -> bool {
        self.accepts(now) && self.probe.is_none()
    }

    pub(crate) fn begin(&mut self, operation: u64) {
        self.probe = self.is_open().then_some(operation);
    }

    /// Lets another operation probe the tier if `operation` is the current probe.
    pub(crate) fn end_probe(&mut self, operation: u64) {
        self.probe = self.probe.filter(|probe| *probe != operation);
    }

    /// Records the outcome of an operation, which may have started before the current probe.
    pub(crate) fn end(&mut self, operation: u64, outcome: IoOutcome, now: Duration) {
        self.end_probe(operation);
        match outcome {
            IoOutcome::Succeeded => *self = Self { num_trips: self.num_trips, ..Self::default() },
            IoOutcome::Failed => {
                self.num_errors += 1;
                if self.is_open() || self.num_errors >= MAX_ERRORS {
                    self.trip(now);
                }
            }
            IoOutcome::Neutral => {}
        }
    }

    /// Opens the breaker or extends the pause. Does nothing before the next probe is due, so that
    /// operations that started before the breaker opened do not extend the pause.
    pub(crate) fn trip(&mut self, now: Duration) {
        if self.accepts(now) {
            self.num_trips += u64::from(!self.is_open());
            self.backoff = (self.backoff * 2).clamp(FIRST_BACKOFF, LONGEST_BACKOFF);
            self.retry_at = now + self.backoff;
        }
    }
}
