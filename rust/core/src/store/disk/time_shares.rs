//! Fair shares of disk time: picks reads or writes for the next free disk thread.
//!
//! Each direction is charged for its jobs: an estimate when a job starts, corrected to the measured
//! time when it completes. The direction with the lower total goes first. An idle direction
//! forfeits its unused time, so that it cannot save up time and later hog every thread. This module
//! does not read a clock. Callers pass in durations.

use std::time::Duration;

/// Direction of a job. Reads and writes have separate breakers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Direction {
    pub(crate) fn other(self) -> Self {
        if self == Self::Read { Self::Write } else { Self::Read }
    }
}

/// Initial estimate of a job's duration. The estimate is nonzero so that the first jobs alternate
/// between reads and writes.
const FIRST_CHARGE: Duration = Duration::from_millis(1);
/// Number of jobs over which the estimate adapts to a new duration.
const JOBS_TO_FOLLOW: u32 = 8;

/// Disk time used by reads and by writes.
#[derive(Debug)]
pub(crate) struct TimeShares {
    used: [Duration; 2],
    estimate: [Duration; 2],
}

impl Default for TimeShares {
    fn default() -> Self {
        Self { used: [Duration::ZERO; 2], estimate: [FIRST_CHARGE; 2] }
    }
}

impl TimeShares {
    /// Returns the direction that goes first if both have work.
    pub(crate) fn first(&self) -> Direction {
        let [read, write] = self.used;
        if write < read { Direction::Write } else { Direction::Read }
    }

    /// Discards an idle direction's unused time.
    pub(crate) fn forfeit(&mut self, direction: Direction) {
        let other = self.used[direction.other() as usize];
        let used = &mut self.used[direction as usize];
        *used = other.max(*used);
    }

    /// Charges a job when it starts. Returns the charge, which the caller must pass to `end`.
    pub(crate) fn begin(&mut self, direction: Direction) -> Duration {
        let charge = self.estimate[direction as usize];
        self.used[direction as usize] += charge;
        charge
    }

    /// Replaces a completed job's estimated charge with the measured time.
    pub(crate) fn end(&mut self, direction: Direction, charge: Duration, took: Duration) {
        let (used, estimate) =
            (&mut self.used[direction as usize], &mut self.estimate[direction as usize]);
        *used = (*used + took).saturating_sub(charge);
        *estimate = (*estimate * (JOBS_TO_FOLLOW - 1) + took.max(Duration::from_micros(1)))
            / JOBS_TO_FOLLOW;
    }
}

#[cfg(test)]
mod tests;
