//! Tests that reads and writes share disk time fairly and that an idle direction builds up no
//! credit.

use super::*;

/// Runs `num` jobs one at a time. Both directions always have work. Returns the number of jobs run
/// in each direction.
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
