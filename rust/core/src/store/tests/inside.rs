//! Tests a store's private state: panics under the lock, and disks that open late or hang.

use std::sync::Arc;
use std::time::Duration;

use super::super::disk::breaker::HANG_AFTER;
use super::super::disk::jobs::{Job, JobResult, Written};
use super::super::disk::time_shares::Direction;
use super::super::disk::transitions::WRITE_SLICE;
use super::super::disk::work::{Clearing, DiskOpening, DiskWork};
use super::super::state::State;
use super::super::{Changes, DiskSettings, Lookup, Prefix, Progress, Store, StoreConfig, Tiers};
use crate::evict::Eviction;
use crate::index::{DiskEvent, DiskState};
use crate::key::{ChunkKey, KeyChain};
use crate::test_support::one_prefix::StoreExt;
use crate::tier::disk::{DiskEntry, DiskMeta, SlotId};
use crate::tier::host::HostTier;

fn host_only() -> StoreConfig {
    StoreConfig {
        frame_sizes: 4096_u64.into(),
        host_bytes: 8 * 4096,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [0; 32],
        disk: None,
        now_s: 0,
        limits: crate::store::TenantLimits::default(),
    }
}

/// After a panic under the lock, every lookup misses and guards can still be dropped.
#[test]
fn a_store_misses_after_a_panic_under_its_lock() {
    let store = Store::open(&host_only()).unwrap();
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).unwrap();
    chain.append_tokens(&[1, 2, 3]).unwrap();
    let mut reserved = store.reserve(&chain, 0..3).unwrap();
    let last = reserved.chunks.pop();
    assert_eq!(store.commit(reserved.chunks), 2);
    let lease = store.acquire(&chain);
    assert_eq!(lease.poll().ready_units, 2);
    let listener = store.watch(9);
    let inner = Arc::clone(&store.inner);
    let panicked =
        std::thread::spawn(move || inner.with_state(|_| panic!("panic requested by the test")))
            .join();
    assert!(panicked.is_err());
    assert_eq!(store.lookup(&chain), Lookup::default());
    let Changes { rows, lost } = listener.changes(&chain.keys()[..1], 9);
    assert!(
        lost && rows == [(chain.keys()[0], Tiers::default())],
        "every reported chunk must be removed"
    );
    assert_eq!(store.acquire(&chain).poll(), Progress::default());
    assert_eq!(lease.frames(), []);
    assert_eq!(store.reserve(&chain, 0..3).unwrap().num_dropped, 3);
    assert_eq!(store.commit(last), 0);
    assert_eq!(store.discard(chain.keys()), 0);
    store.clear();
    assert!(!store.flush(Duration::MAX));
    assert!(store.stats().iter().all(|(_, value)| *value == 0));
    drop(lease);
    store.close(Duration::ZERO);
}

#[test]
fn changes_are_logged_only_for_a_listener() {
    let store = Store::open(&host_only()).unwrap();
    let is_logging = || store.inner.with_state(|state| state.change_log.is_some());
    assert_eq!(is_logging(), Some(false));
    let (one, other) = (store.watch(9), store.watch(9));
    drop(one);
    assert_eq!(is_logging(), Some(true));
    drop(other);
    assert_eq!(is_logging(), Some(false));
}

/// After a panic under the lock, waiting disk threads exit, and closing the store does not wait for
/// them.
#[test]
fn disk_threads_end_when_the_lock_is_poisoned() {
    let dir = tempfile::tempdir().unwrap();
    let disk = DiskSettings {
        dir: dir.path().to_owned(),
        cap_bytes: 64 << 20,
        num_threads: 3,
        description: String::new(),
    };
    let config = StoreConfig {
        frame_sizes: 4096_u64.into(),
        host_bytes: 8 * 4096,
        eviction: Eviction::Lru,
        available_bytes: None,
        namespace: [0; 32],
        disk: Some(disk),
        now_s: 0,
        limits: crate::store::TenantLimits::default(),
    };
    let store = Store::open(&config).unwrap();
    let inner = Arc::clone(&store.inner);
    let panicked =
        std::thread::spawn(move || inner.with_state(|_| panic!("panic requested by the test")))
            .join();
    assert!(panicked.is_err());
    let threads = std::mem::take(&mut *store.threads.lock().unwrap());
    assert_eq!(threads.len(), 3);
    for thread in threads {
        thread.join().unwrap();
    }
    store.close(Duration::ZERO);
    assert!(Store::open(&config).unwrap().take_events().is_empty(), "the directory was released");
}

#[test]
fn a_discard_while_the_tier_is_opened_holds() {
    let host = HostTier::create(4 * 4096, &4096_u64.into()).unwrap();
    let mut state = State::new(host, Eviction::Lru.policy(4), Eviction::Lru.policy(4));
    state.disk.opening = DiskOpening::Opening;
    let (key, parent) = (ChunkKey([1; 32]), ChunkKey([0; 32]));
    state.discard(&[key]);
    assert!(!state.recover_some(), "no tier was attached yet");
    let slot = SlotId(0);
    let meta = DiskMeta { key, parent, depth: 0, saved_s: 0 };
    assert!(state.end_opening(vec![DiskEntry { slot, meta, sequence: 0 }], Vec::new()));
    while state.recover_some() {}
    assert_eq!(state.index.get(&key), None);
}

fn found(number: u32) -> DiskEntry {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&number.to_le_bytes());
    let slot = SlotId(number);
    let meta = DiskMeta { key: ChunkKey(key), parent: ChunkKey([9; 32]), depth: 0, saved_s: 0 };
    DiskEntry { slot, meta, sequence: 0 }
}

/// Even if a disk takes weeks to open, memory use must not grow with every discarded chunk.
#[test]
fn too_many_discards_before_the_disk_is_opened_clear_it() {
    let host = HostTier::create(4 * 4096, &4096_u64.into()).unwrap();
    let mut state = State::new(host, Eviction::Lru.policy(4), Eviction::Lru.policy(4));
    state.disk.opening = DiskOpening::Opening;
    for number in 0..200_000 {
        state.discard(&[found(number).meta.key]);
    }
    assert!(state.disk.rejected.len() < 100_000, "the list grows with every discard");
    assert!(state.end_opening((0..4).rev().map(found).collect(), Vec::new()));
    while state.recover_some() {}
    assert_eq!((0..4).find_map(|number| state.index.get(&found(number).meta.key)), None);
    assert!(
        matches!(state.next_job(), Some((_, Job::Clear(_)))),
        "a restart must not find the chunks"
    );
}

#[test]
fn too_many_discards_while_chunks_are_entered_free_the_others() {
    let host = HostTier::create(4 * 4096, &4096_u64.into()).unwrap();
    let mut state = State::new(host, Eviction::Lru.policy(4), Eviction::Lru.policy(4));
    assert!(state.end_opening((0..600).rev().map(found).collect(), Vec::new()));
    assert!(state.recover_some(), "one slice is indexed, and chunks remain");
    for number in 1000..200_000 {
        state.discard(&[found(number).meta.key]);
    }
    assert!(state.disk.rejected.len() < 100_000, "the list grows with every discard");
    while state.recover_some() {}
    assert_eq!(state.index.get(&found(599).meta.key), None);
    assert!(state.index.get(&found(0).meta.key).is_some());
    assert!(matches!(state.next_job(), Some((_, Job::Free { .. }))));
    super::check::check(&state).unwrap();
}

#[test]
fn no_call_waits_for_a_disk_whose_threads_all_hang() {
    let second = Duration::from_secs(1);
    let mut work = DiskWork { num_threads: 2, clearing: Clearing::Wanted, ..DiskWork::default() };
    work.begin(1, Direction::Read, false, Duration::ZERO);
    work.begin(2, Direction::Write, true, Duration::ZERO);
    assert!(!work.cannot_settle_by(2 * second) && work.find_hangs(5 * second));
    assert!(work.cannot_settle_by(5 * second), "the tier is paused");
    assert!(
        work.cannot_settle_by(60 * second),
        "a probe is due, but no thread is available to run it"
    );
    work.in_flight.pop();
    assert!(!work.cannot_settle_by(60 * second), "a thread is available again");
}

#[test]
fn a_hang_is_logged_once_until_no_job_is_hung() {
    let second = Duration::from_secs(1);
    let (mut state, _) = unwritten(1);
    state.disk.begin(1, Direction::Read, false, Duration::ZERO);
    state.disk.begin(2, Direction::Write, false, second);
    let mut num_logged = Vec::new();
    for time in [5, 6, 7] {
        state.set_time(time * second);
        num_logged.push(std::mem::take(&mut state.events).len());
    }
    for ticket in [1, 2] {
        state.disk.in_flight.retain(|job| job.ticket != ticket);
        state.end_hang(ticket);
        num_logged.push(std::mem::take(&mut state.events).len());
    }
    assert_eq!(num_logged, [1, 0, 0, 0, 1]);
}

#[test]
fn a_probe_that_hangs_lets_another_thread_probe() {
    let second = Duration::from_secs(1);
    let mut work = DiskWork { num_threads: 3, ..DiskWork::default() };
    work.begin(1, Direction::Read, false, Duration::ZERO);
    assert!(work.find_hangs(5 * second));
    let probe_at = work.read_breaker.retry_at;
    assert!(work.read_breaker.may_begin(probe_at));
    work.begin(2, Direction::Read, false, probe_at);
    assert!(!work.read_breaker.may_begin(probe_at), "one probe at a time");
    assert!(work.find_hangs(probe_at + 5 * second));
    let retry_at = work.read_breaker.retry_at;
    assert!(retry_at > probe_at + 5 * second && work.read_breaker.may_begin(retry_at));
}

#[test]
fn a_check_that_hangs_pauses_the_tier_until_it_ends() {
    let second = Duration::from_secs(1);
    let mut state = State::new(
        HostTier::create(4 * 4096, &4096_u64.into()).unwrap(),
        Eviction::Lru.policy(4),
        Eviction::Lru.policy(4),
    );
    state.disk.num_threads = 1;
    assert!(state.end_opening(Vec::new(), Vec::new()));
    assert_eq!(state.begin_check(), None, "the tier was just opened");
    state.set_time(second);
    let look = state.begin_check().expect("a check is due");
    state.set_time(4 * second);
    assert_eq!(state.begin_check(), None, "only one check may run at a time");
    assert!(state.disk.accepts_reads(state.now));
    state.set_time(6 * second);
    assert!(!state.disk.accepts_reads(state.now) && state.disk.cannot_settle_by(60 * second));
    state.end_check(look, None);
    assert!(state.disk.accepts_reads(state.now) && !state.disk.is_broken());
    assert_eq!(state.disk.opening, DiskOpening::Open);
}

/// When the tier opens, a chunk that was already queued for writing can turn out to be on disk.
#[test]
fn a_chunk_that_is_found_on_disk_unblocks_its_children() {
    let mut state = State::new(
        HostTier::create(4 * 4096, &4096_u64.into()).unwrap(),
        Eviction::Lru.policy(4),
        Eviction::Lru.policy(4),
    );
    let mut chain = KeyChain::new(ChunkKey([9; 32]), 1).unwrap();
    chain.append_tokens(&[1, 2]).unwrap();
    state.disk.opening = DiskOpening::Opening;
    let reserved = state.reserve(&(Prefix::from(&chain), 0..2).into()).chunks;
    for (id, _) in &reserved {
        assert_eq!(state.commit(*id), 1);
    }
    let (parent, child) = (reserved[0].0, reserved[1].0);
    state.change_disk(child, DiskEvent::Block);
    state.disk.blocked.insert(parent, vec![child]);
    let meta = DiskMeta { key: chain.keys()[0], parent: chain.root(), depth: 0, saved_s: 0 };
    assert!(state.end_opening(vec![DiskEntry { slot: SlotId(0), meta, sequence: 0 }], Vec::new()));
    while state.recover_some() {}
    assert_eq!(state.index[parent].disk, DiskState::Stored(SlotId(0)));
    assert!(matches!(state.next_job(), Some((_, Job::Write { id, .. })) if id == child));
    super::check::check(&state).unwrap();
}

/// Returns a state with an open disk tier and a prefix of `num_chunks` chunks that are not on disk.
pub(super) fn unwritten(num_chunks: u32) -> (State, KeyChain) {
    let host = HostTier::create((u64::from(num_chunks) + 4) * 4096, &4096_u64.into()).unwrap();
    let policy = || Eviction::Lru.policy(num_chunks as usize);
    let mut state = State::new(host, policy(), policy());
    assert!(state.end_opening(Vec::new(), Vec::new()));
    let mut chain = KeyChain::new(ChunkKey([1; 32]), 1).unwrap();
    chain.append_tokens(&(0..num_chunks).collect::<Vec<_>>()).unwrap();
    let reserved = state.reserve(&(Prefix::from(&chain), 0..num_chunks).into()).chunks;
    let num_visible: u32 = reserved.iter().map(|(id, _)| state.commit(*id)).sum();
    assert_eq!(num_visible, num_chunks);
    (state, chain)
}

#[test]
fn a_write_that_hangs_does_not_stop_slots_from_being_freed() {
    let (mut state, chain) = unwritten(2);
    let Some((first, Job::Write { id, frame, .. })) = state.next_job() else { panic!() };
    state.end_job(first, JobResult::Write { id, frame, outcome: Written::In(SlotId(0)) });
    let Some((hung, Job::Write { id, frame, .. })) = state.next_job() else { panic!() };
    state.discard(chain.keys());
    while state.is_removing() {
        state.remove_slice();
    }
    assert_eq!(state.disk.to_free, [SlotId(0)]);
    assert!(state.next_job().is_none(), "the chunk is a child of the chunk that was removed");
    state.set_time(HANG_AFTER);
    state.set_time(HANG_AFTER + Duration::from_secs(600)); // the breakers allow a probe
    assert!(matches!(state.next_job(), Some((_, Job::Free { slots, .. })) if slots == [SlotId(0)]));
    state.end_job(hung, JobResult::Write { id, frame, outcome: Written::In(SlotId(1)) });
    assert_eq!(state.disk.to_free, [SlotId(1)]);
}

/// Any number of chunks can wait for a chunk to be written.
#[test]
fn chunks_that_wait_for_a_write_are_blocked_and_dropped_in_slices() {
    let num_chunks = 4 * WRITE_SLICE;
    let (mut state, _) = unwritten(u32::try_from(num_chunks).unwrap());
    let Some((first, Job::Write { id, frame, .. })) = state.next_job() else { panic!() };
    let num_blocked = |state: &State| {
        state.index.iter().filter(|(_, entry)| entry.disk == DiskState::Blocked).count()
    };
    for nth in 1..4 {
        assert!(state.next_job().is_none());
        assert_eq!(num_blocked(&state), nth * WRITE_SLICE);
        assert!(std::mem::take(&mut state.disk.is_search_cut_short), "the search must continue");
    }
    assert!(state.next_job().is_none() && !state.disk.is_search_cut_short);
    assert_eq!(num_blocked(&state), num_chunks - 1);
    state.end_job(first, JobResult::Write { id, frame, outcome: Written::Failed(None) });
    assert_eq!(num_blocked(&state), 3 * WRITE_SLICE - 1);
    assert!(state.disk.has_jobs(), "a disk thread must drop the rest");
    while state.drop_some_blocked() {}
    assert_eq!(num_blocked(&state), 0);
    assert_eq!(state.stats().disk_dropped, num_chunks as u64 - 1);
    super::check::check(&state).unwrap();
}

/// Recovery takes 96 bytes per chunk, which a store with millions of chunks must release.
#[test]
fn the_list_of_chunks_found_is_freed() {
    let host = HostTier::create(4 * 4096, &4096_u64.into()).unwrap();
    let mut state = State::new(host, Eviction::Lru.policy(4), Eviction::Lru.policy(4));
    assert!(state.end_opening((0..300_000).map(found).collect(), Vec::new()));
    let mut num_left = state.disk.found.len();
    while state.recover_some() {
        num_left = num_left.min(state.disk.found.len());
        assert!(state.disk.found.capacity() <= num_left + (1 << 16));
    }
    assert_eq!(state.disk.found.capacity(), 0);
}
