//! Circuit breaker: pauses reads or writes of a tier that fails or hangs, and probes it with one
//! operation at a time.
//!
//! Pure state: times are of the store's clock and passed in.

use std::time::Duration;

/// Consecutive errors that open it.
const MAX_ERRORS: u32 = 4;
/// An operation that takes longer hangs.
pub(crate) const HANG_AFTER: Duration = Duration::from_secs(5);
/// Time until the first probe; each failed probe doubles it.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    num_errors: u32,
    /// Zero while closed.
    backoff: Duration,
    /// When the next operation may begin.
    pub(crate) retry_at: Duration,
    /// The operation that probes the tier.
    probe: Option<u64>,
    pub(crate) num_trips: u64,
}

impl Breaker {
    pub(crate) fn is_open(&self) -> bool {
        !self.backoff.is_zero()
    }

    /// Returns true if work may be queued: it is closed, or a probe is due.
    pub(crate) fn accepts(&self, now: Duration) -> bool {
        now >= self.retry_at
    }

    pub(crate) fn may_begin(&self, now: Duration) -> bool {
        self.accepts(now) && self.probe.is_none()
    }

    pub(crate) fn begin(&mut self, operation: u64) {
        self.probe = self.is_open().then_some(operation);
    }

    /// Records the end of an operation: success, failure, or neither (None). The probe may be a
    /// later operation.
    pub(crate) fn end(&mut self, operation: u64, is_well: Option<bool>, now: Duration) {
        self.probe = self.probe.filter(|probe| *probe != operation);
        match is_well {
            Some(true) => *self = Self { num_trips: self.num_trips, ..Self::default() },
            Some(false) => {
                self.num_errors += 1;
                if self.is_open() || self.num_errors >= MAX_ERRORS {
                    self.trip(now);
                }
            }
            None => {}
        }
    }

    /// Opens it, or keeps it open for longer. Operations that began before it opened change nothing
    /// until a probe is due.
    pub(crate) fn trip(&mut self, now: Duration) {
        if self.accepts(now) {
            self.num_trips += u64::from(!self.is_open());
            self.backoff = (self.backoff * 2).clamp(FIRST_BACKOFF, LONGEST_BACKOFF);
            self.retry_at = now + self.backoff;
        }
    }
}
