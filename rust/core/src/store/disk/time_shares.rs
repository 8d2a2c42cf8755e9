//! Fair shares of disk time: which direction, reads or writes, gets the next disk thread.
//!
//! Each direction is charged the time of its jobs: an estimate when one begins, the measured time
//! when it ends. The direction with less time goes first. A direction without work forfeits its
//! unused time, so it cannot accumulate time and later occupy every thread. Pure state: times are
//! passed in.

use std::time::Duration;

/// Direction of a job. Each has a breaker.
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

/// Charge of a job before any was measured. Not zero, so that the first jobs alternate.
const FIRST_CHARGE: Duration = Duration::from_millis(1);
/// Number of jobs within which the estimate follows a new duration.
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

    /// Takes the unused time of a direction without work.
    pub(crate) fn forfeit(&mut self, direction: Direction) {
        let other = self.used[direction.other() as usize];
        let used = &mut self.used[direction as usize];
        *used = other.max(*used);
    }

    /// Charges a job that begins; returns the charge, for `end`.
    pub(crate) fn begin(&mut self, direction: Direction) -> Duration {
        let charge = self.estimate[direction as usize];
        self.used[direction as usize] += charge;
        charge
    }

    /// Replaces the charge of a job with the time that it took.
    pub(crate) fn end(&mut self, direction: Direction, charge: Duration, took: Duration) {
        let (used, estimate) =
            (&mut self.used[direction as usize], &mut self.estimate[direction as usize]);
        *used = (*used + took).saturating_sub(charge);
        *estimate = (*estimate * (JOBS_TO_FOLLOW - 1) + took.max(Duration::from_micros(1)))
            / JOBS_TO_FOLLOW;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Jobs of each direction that a thread took, one at a time, while both always have work.
    fn jobs(shares: &mut TimeShares, num: u32, took: [Duration; 2]) -> [u32; 2] {
        let mut counts = [0; 2];
        for _ in 0..num {
            let direction = shares.first();
            let charge = shares.begin(direction);
            shares.end(direction, charge, took[direction as usize]);
            counts[direction as usize] += 1;
        }
        counts
    }

    #[test]
    fn jobs_of_equal_length_alternate() {
        assert_eq!(jobs(&mut TimeShares::default(), 100, [Duration::from_millis(3); 2]), [50, 50]);
    }

    #[test]
    fn slow_writes_get_as_much_time_as_fast_reads() {
        let took = [Duration::from_millis(1), Duration::from_millis(9)];
        let [reads, writes] = jobs(&mut TimeShares::default(), 1000, took);
        assert!(
            (880..=920).contains(&reads) && writes == 1000 - reads,
            "{reads} reads, {writes} writes"
        );
    }

    #[test]
    fn two_threads_that_begin_together_serve_both_directions() {
        let mut shares = TimeShares::default();
        let first = shares.first();
        shares.begin(first);
        assert_eq!(shares.first(), first.other());
    }

    #[test]
    fn an_idle_direction_gains_no_credit() {
        let mut shares = TimeShares::default();
        for _ in 0..100 {
            shares.forfeit(Direction::Write);
            let charge = shares.begin(Direction::Read);
            shares.end(Direction::Read, charge, Duration::from_millis(5));
        }
        shares.forfeit(Direction::Write);
        assert_eq!(jobs(&mut shares, 10, [Duration::from_millis(5); 2]), [5, 5]);
    }
}
