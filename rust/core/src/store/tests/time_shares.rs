//! Tests how reads and writes share disk time and in which order chunks leave host memory. Jobs run
//! one at a time, without threads.

use std::time::Duration;

use super::super::lookup::Prefix;
use super::super::state::State;
use super::jobs::{Run, Under};
use super::steps::{Io, Step, prompt_chain};
use crate::evict::Eviction;

impl Run {
    /// Saves a prompt's first `stop` blocks.
    fn save(&mut self, prompt: usize, stop: u32) {
        self.take(&Step::Save { prompt, stop });
    }

    /// Returns the number of a prompt's blocks in host memory.
    fn in_host(&mut self, prompt: usize) -> u32 {
        let chain = prompt_chain(prompt);
        self.state.find(&Prefix::from(&chain)).host_units
    }

    /// Runs one job that lasts `took`. Returns the job's letter (R, W or F), or None if there is no
    /// job.
    fn do_job(&mut self, took: Duration) -> Option<char> {
        self.take_job();
        let letter = match self.in_flight.last()?.1 {
            Under::Read { .. } => 'R',
            Under::Write { .. } => 'W',
            Under::Free { .. } | Under::Clear { .. } => 'F',
        };
        self.state.set_time(self.state.now + took);
        while !self.in_flight.is_empty() {
            self.go(0, Io::Works);
        }
        Some(letter)
    }
}

/// Prepares six chunks to read and six chunks to write, with enough frames for all of them.
fn reads_and_writes() -> Run {
    let mut run = Run::new(18, 64, Eviction::Lru, 2);
    run.save(0, 6);
    run.finish_jobs();
    run.state.host_policy.spare_unwritten(false);
    run.state.evict_all_from_host();
    assert_eq!(run.in_host(0), 0);
    run.take(&Step::Acquire { prompt: 0, num_blocks: 6 });
    run.save(63, 6);
    run
}

impl State {
    fn evict_all_from_host(&mut self) {
        while let Some(victim) = self.host_victim(None) {
            self.evict(victim);
        }
    }
}

#[test]
fn reads_and_writes_of_equal_length_alternate() {
    let mut run = reads_and_writes();
    let order: String = std::iter::from_fn(|| run.do_job(Duration::from_millis(2))).collect();
    assert_eq!(order, "RWRWRWRWRWRW");
    run.end(true);
}

#[test]
fn two_threads_are_never_both_reading_while_chunks_wait_to_be_written() {
    let mut run = reads_and_writes();
    run.take_job();
    run.take_job();
    let is_read = |(_, job): &(u64, Under)| matches!(job, Under::Read { .. });
    assert_eq!(run.in_flight.iter().filter(|job| is_read(job)).count(), 1);
    run.end(true);
}

#[test]
fn reads_that_fail_leave_all_threads_to_writes() {
    let mut run = reads_and_writes();
    run.state.disk.read_breaker.trip(run.state.now);
    let order: String =
        std::iter::from_fn(|| run.do_job(Duration::from_millis(2))).take(6).collect();
    assert_eq!(order, "WWWWWW");
    run.end(true);
}

/// Fills eight frames: six with recently used chunks that are also on disk, and two with unwritten
/// chunks.
fn two_unwritten() -> Run {
    let mut run = Run::new(8, 64, Eviction::Lru, 1);
    run.save(63, 6);
    run.finish_jobs();
    run.save(0, 2);
    run.take(&Step::Acquire { prompt: 63, num_blocks: 6 });
    run.take(&Step::Release { nth: 0 });
    run
}

#[test]
fn a_chunk_that_waits_to_be_written_leaves_host_memory_last() {
    let mut run = two_unwritten();
    run.save(2, 2); // shares its first chunk with prompt 0
    assert_eq!((run.in_host(0), run.in_host(63)), (2, 5));
    assert_eq!(run.state.stats().disk_unwritten, 0);
    run.end(true);
}

#[test]
fn unwritten_chunks_of_a_disk_that_takes_no_writes_leave_like_others() {
    let mut run = two_unwritten();
    run.state.disk.write_breaker.trip(run.state.now);
    run.save(2, 2);
    assert_eq!((run.in_host(0), run.in_host(63)), (1, 6));
    assert_eq!(run.state.stats().disk_unwritten, 1);
    run.end(false);
}

#[test]
fn unwritten_chunks_take_no_more_than_half_of_host_memory_from_others() {
    let mut run = two_unwritten();
    run.save(2, 4); // saves three more chunks
    assert_eq!((run.in_host(0), run.in_host(63), run.state.stats().disk_pending), (2, 3, 5));
    run.save(2, 5);
    assert_eq!(
        (run.in_host(0), run.in_host(63)),
        (1, 3),
        "five of eight chunks are unwritten, so the least recently used chunk must be evicted"
    );
    run.end(false);
}

#[test]
fn time_of_reads_counts_once_for_any_number_of_leases() {
    let mut run = reads_and_writes();
    while run.do_job(Duration::from_millis(10)).is_some() {}
    let stats = run.state.stats();
    assert_eq!(
        (stats.disk_reads, stats.disk_read_us, stats.disk_read_busy_us),
        (6, 60_000, 110_000)
    );
    run.take(&Step::Wait { millis: 500 });
    assert_eq!(run.state.stats().disk_read_busy_us, 110_000, "no read was requested");
    run.end(true);
}
