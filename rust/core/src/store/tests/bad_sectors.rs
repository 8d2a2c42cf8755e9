//! Tests how jobs treat slots that can never be freed, for example because of a bad sector.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use super::super::disk::breaker::HANG_AFTER;
use super::super::disk::jobs::{Job, JobResult, Written};
use super::super::disk::reopen::{CHECK_EVERY, Emptying};
use super::super::disk::work::Clearing;
use super::super::lookup::Prefix;
use super::super::state::State;
use super::inside::unwritten;
use crate::key::{ChunkKey, KeyChain};
use crate::tier::disk::SlotId;

#[test]
fn probes_alternate_between_writes_and_slots_that_could_not_be_freed() {
    let (mut state, _) = unwritten(2);
    state.disk.unfreed = vec![SlotId(9)];
    while state.disk.write_breaker.retry_at < Duration::from_secs(100) {
        state.disk.write_breaker.trip(state.disk.write_breaker.retry_at);
    }
    let mut probes = String::new();
    for _ in 0..4 {
        state.set_time(state.disk.write_breaker.retry_at);
        match state.next_job() {
            Some((ticket, Job::Free { slots, is_retry })) => {
                probes += "F";
                state.end_job(ticket, JobResult::Free { not_freed: slots, is_retry });
            }
            Some((ticket, Job::Write { id, frame, .. })) => {
                probes += "W";
                let outcome = Written::Failed(None);
                state.end_job(ticket, JobResult::Write { id, frame, outcome });
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(probes, "FWFW");
}

/// Takes the next job, which must free slots, and fails it after `time`.
fn fail_to_free(state: &mut State, time: Duration) {
    let Some((ticket, Job::Free { slots, is_retry })) = state.next_job() else { panic!() };
    state.set_time(state.now + time);
    assert_eq!(state.disk.is_broken(), time >= HANG_AFTER);
    state.end_job(ticket, JobResult::Free { not_freed: slots, is_retry });
}

/// A disk with bad sectors still stores chunks in the other sectors.
#[test]
fn slots_that_can_never_be_freed_do_not_pause_writes() {
    let (mut state, _) = unwritten(30);
    assert!(state.end_opening(Vec::new(), (100..400).map(SlotId).collect()));
    let mut tried = HashSet::new();
    for minute in 0..30 {
        state.set_time(Duration::from_secs(60 * minute));
        tried.extend(state.disk.unfreed.iter().rev().take(32).copied());
        fail_to_free(&mut state, Duration::ZERO);
        let Some((ticket, Job::Write { id, frame, .. })) = state.next_job() else { panic!() };
        let slot = SlotId(u32::try_from(minute).unwrap());
        state.end_job(ticket, JobResult::Write { id, frame, outcome: Written::In(slot) });
        assert!(!state.disk.is_broken());
    }
    assert_eq!(tried.len(), 300, "each slot is tried");
    assert!(state.disk.is_settled());
    state.discard(&[ChunkKey([9; 32])]);
    assert!(!state.disk.is_settled(), "the discarded chunk may be in a bad sector");
}

/// A disk can take seconds to report a bad sector.
#[test]
fn failed_retries_pause_reads_and_writes_only_while_they_hang() {
    for time in [Duration::ZERO, HANG_AFTER] {
        let (mut state, _) = unwritten(0);
        assert!(state.end_opening(Vec::new(), vec![SlotId(0)]));
        for nth in 0..10 {
            state.set_time(Duration::from_secs(100 * nth));
            fail_to_free(&mut state, time);
            assert!(state.next_job().is_none() && !state.disk.is_broken());
        }
    }
}

/// Without this order, threads that write continuously would never retry.
#[test]
fn slots_that_could_not_be_freed_are_retried_before_the_next_write() {
    let (mut state, _) = unwritten(1);
    let mut other = KeyChain::new(ChunkKey([2; 32]), 1).unwrap();
    other.append_tokens(&[1]).unwrap();
    for (id, _) in state.reserve(&(Prefix::from(&other), 0..1).into()).chunks {
        state.commit(id);
    }
    let Some((ticket, Job::Write { id, frame, .. })) = state.next_job() else { panic!() };
    state.disk.unfreed = (100..164).map(SlotId).collect();
    assert!(state.next_job().is_none(), "the chunk being written must not lose its parent");
    let outcome = Written::In(SlotId(0));
    state.end_job(ticket, JobResult::Write { id, frame, outcome });
    for num_left in [32, 0] {
        let Some((ticket, Job::Free { is_retry, .. })) = state.next_job() else { panic!() };
        assert_eq!(state.disk.unfreed.len(), num_left);
        state.end_job(ticket, JobResult::Free { not_freed: Vec::new(), is_retry });
    }
    assert!(matches!(state.next_job(), Some((_, Job::Write { .. }))));
}

/// If the directory is moved back, its chunks can be used unless some were removed.
#[test]
fn a_directory_with_a_bad_sector_is_cleared_only_if_chunks_were_removed() {
    for unfreed_may_be_removed in [false, true] {
        let (mut state, _) = unwritten(0);
        assert!(state.end_opening(Vec::new(), vec![SlotId(0)]));
        if unfreed_may_be_removed {
            state.discard(&[ChunkKey([9; 32])]);
        }
        remove_directory(&mut state);
        assert_eq!(state.disk.clearing == Clearing::Wanted, unfreed_may_be_removed);
        assert!(state.disk.unfreed.is_empty());
    }
}

#[test]
fn a_new_directory_has_no_removed_chunks() {
    let (mut state, _) = unwritten(0);
    state.discard(&[ChunkKey([9; 32])]);
    remove_directory(&mut state);
    assert!(state.end_opening(Vec::new(), vec![SlotId(0)]));
    assert!(state.disk.is_settled());
}

fn remove_directory(state: &mut State) {
    state.set_time(CHECK_EVERY);
    let ticket = state.begin_check().expect("a check is due");
    state.end_check(ticket, Some(Path::new("/memory")));
    assert_eq!(state.empty_removed(), Emptying::Done);
}

/// Without this limit, a server could never close a namespace on a disk with a bad sector.
#[test]
fn bad_sectors_keep_a_store_open_for_ten_minutes() {
    let (mut state, _) = unwritten(0);
    assert!(state.end_opening(Vec::new(), vec![SlotId(0)]));
    assert!(!state.must_stay_open());
    state.clear();
    let Some((ticket, Job::Clear(slots))) = state.next_job() else { panic!() };
    assert_eq!(slots, [SlotId(0)]);
    state.end_job(ticket, JobResult::Clear(slots, true));
    state.set_time(Duration::from_secs(599));
    assert!(state.must_stay_open());
    state.set_time(Duration::from_secs(600));
    assert!(!state.must_stay_open());
}

#[test]
fn a_disk_that_cannot_be_cleared_yet_keeps_a_store_open() {
    let (mut state, _) = unwritten(0);
    while state.disk.write_breaker.retry_at < Duration::from_secs(7200) {
        state.disk.write_breaker.trip(state.disk.write_breaker.retry_at);
    }
    state.clear();
    state.set_time(Duration::from_secs(3600));
    assert!(state.must_stay_open());
    state.set_time(state.disk.write_breaker.retry_at);
    let Some((ticket, Job::Clear(slots))) = state.next_job() else { panic!() };
    state.end_job(ticket, JobResult::Clear(slots, true));
    assert!(!state.must_stay_open());
    state.disk.to_free.push(SlotId(0));
    assert!(!state.must_stay_open(), "a chunk was removed after the clear, but not by a user");
}
