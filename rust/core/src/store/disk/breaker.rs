//! Leaves one direction of a tier alone while it fails or hangs, and lets one operation at a time find out whether it is well.
//!
//! Pure state: times are of the store's clock and passed in.

use std::time::Duration;

/// Errors in a row that open it.
const MAX_ERRORS: u32 = 4;
/// An operation under way for longer hangs.
pub(crate) const HANG_AFTER: Duration = Duration::from_secs(5);
/// Time until the first probe; each one that fails doubles it.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Breaker {
    num_errors: u32,
    /// Zero while closed.
    backoff: Duration,
    /// When the next operation may begin.
    pub(crate) retry_at: Duration,
    /// The operation that finds out.
    probe: Option<u64>,
    pub(crate) num_trips: u64,
}

impl Breaker {
    pub(crate) fn is_open(&self) -> bool {
        !self.backoff.is_zero()
    }

    /// Whether work for the tier is accepted: it is well, or a probe is due.
    pub(crate) fn accepts(&self, now: Duration) -> bool {
        now >= self.retry_at
    }

    /// Whether an operation may begin.
    pub(crate) fn may_begin(&self, now: Duration) -> bool {
        self.accepts(now) && self.probe.is_none()
    }

    pub(crate) fn begin(&mut self, operation: u64) {
        self.probe = self.is_open().then_some(operation);
    }

    /// An operation ended: well, badly, or without saying anything about the tier. The probe may be a later one, which goes on.
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

    /// Opens, or stays open for longer. What began before it opened changes nothing until a probe is due.
    pub(crate) fn trip(&mut self, now: Duration) {
        if self.accepts(now) {
            self.num_trips += u64::from(!self.is_open());
            self.backoff = (self.backoff * 2).clamp(FIRST_BACKOFF, LONGEST_BACKOFF);
            self.retry_at = now + self.backoff;
        }
    }
}
