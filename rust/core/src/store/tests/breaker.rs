//! Tests for opening, probing and closing the circuit breaker.

use std::time::Duration;

use super::super::disk::breaker::{Breaker, IoOutcome};

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn fail(breaker: &mut Breaker, now: Duration) {
    breaker.begin(1);
    breaker.end(1, IoOutcome::Failed, now);
}

#[test]
fn four_errors_in_a_row_open_it_and_one_success_starts_the_count_again() {
    let mut breaker = Breaker::default();
    for _ in 0..3 {
        fail(&mut breaker, seconds(10));
    }
    breaker.end(1, IoOutcome::Succeeded, seconds(10));
    for _ in 0..3 {
        fail(&mut breaker, seconds(10));
    }
    breaker.end(1, IoOutcome::Neutral, seconds(10));
    assert!(!breaker.is_open() && breaker.may_begin(seconds(10)));
    fail(&mut breaker, seconds(10));
    assert!(breaker.is_open() && !breaker.accepts(seconds(10)));
    assert_eq!(breaker.num_trips, 1);
}

#[test]
fn one_probe_at_a_time_and_each_failed_one_doubles_the_wait_up_to_a_minute() {
    let mut breaker = Breaker::default();
    breaker.trip(seconds(0));
    let (mut now, mut waits) = (seconds(0), Vec::new());
    for _ in 0..8 {
        waits.push(breaker.retry_at.saturating_sub(now).as_secs());
        // The result of an operation that started before the breaker opened is ignored.
        breaker.end(1, IoOutcome::Failed, now);
        now = breaker.retry_at;
        assert!(
            !breaker.accepts(now.saturating_sub(Duration::from_millis(1)))
                && breaker.may_begin(now)
        );
        breaker.begin(1);
        assert!(!breaker.may_begin(now) && breaker.accepts(now));
        breaker.end(1, IoOutcome::Failed, now);
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
    assert_eq!(breaker.num_trips, 1);
    breaker.begin(1);
    breaker.end(1, IoOutcome::Succeeded, now);
    assert!(!breaker.is_open() && breaker.may_begin(now));
}

#[test]
fn an_older_operation_does_not_end_the_probe_of_a_later_one() {
    let mut breaker = Breaker::default();
    breaker.begin(1);
    breaker.begin(2);
    breaker.trip(seconds(0));
    let now = breaker.retry_at;
    breaker.begin(3);
    breaker.end(1, IoOutcome::Neutral, now);
    assert!(!breaker.may_begin(now), "operation 3 is still probing");
    breaker.end(3, IoOutcome::Failed, now);
    let now = breaker.retry_at;
    assert!(breaker.may_begin(now));
    breaker.begin(4);
    breaker.end(2, IoOutcome::Succeeded, now);
    assert!(breaker.may_begin(now), "operation 2 has succeeded");
}
