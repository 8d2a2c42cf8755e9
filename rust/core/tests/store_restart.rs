//! Tests that removed chunks stay removed after a restart, even if the disk failed in between.
//!
//! Runs the real store on the real disk tier. File calls fail, sometimes after taking effect.
#![expect(clippy::unwrap_used, reason = "tests")]
mod store_common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvloft_core::evict::Eviction;
use kvloft_core::key::{KeyChain, SaltTag};
use kvloft_core::store::{Anchors, DiskSettings, Evict, Lookup, Prefix, Store, StoreConfig};
use kvloft_core::tier::disk::{DiskConfig, DiskTier};
use kvloft_testing::faults::{Call, EIO, Fault, FaultFiles, Rule};
use kvloft_testing::one_prefix::StoreExt;
use store_common::{FRAME, arena_of, chain, config, save, stat};

const LONG: Duration = Duration::from_secs(60);
/// A pause that is longer than the delay before a failed free is retried.
const PAUSE_MS: u64 = 61_000;
const RECORD_BYTES: u64 = 128;
const WRITES: &[Call] = &[Call::Write];

struct Place {
    dir: PathBuf,
    files: FaultFiles,
    /// How far the stores' clocks are ahead of real time, in milliseconds.
    ahead_ms: Arc<AtomicU64>,
    _kept: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let kept = tempfile::tempdir().unwrap();
        let (dir, ahead_ms) = (kept.path().join("disk"), Arc::default());
        Self { dir, files: FaultFiles::new(1), ahead_ms, _kept: kept }
    }

    /// Flushes the store. Advances its clock only while the store waits for a retry, because a
    /// running operation would be treated as a hang.
    fn settle(&self, store: &Store) {
        until("the disk settles", || {
            let is_settled = store.flush(Duration::from_secs(1));
            if !is_settled {
                self.ahead_ms.fetch_add(PAUSE_MS, Ordering::Relaxed);
            }
            is_settled
        });
    }

    fn open(&self) -> Store {
        let cap_bytes = 1 << 20;
        let settings = DiskSettings {
            dir: self.dir.clone(),
            cap_bytes,
            num_threads: 1,
            description: String::new(),
        };
        let (dir, files) = (self.dir.clone(), self.files.clone());
        let opener = move || {
            let config = DiskConfig {
                dir: dir.clone(),
                cap_bytes,
                frame_sizes: (FRAME as u64).into(),
                namespace: [7; 32],
                description: String::new(),
            };
            let (tier, found) =
                DiskTier::open_with_files(&config, &std::sync::Arc::default(), &files)?;
            Ok((Arc::new(tier) as Arc<_>, found))
        };
        let (start, ahead_ms) = (Instant::now(), Arc::clone(&self.ahead_ms));
        let clock =
            move || start.elapsed() + Duration::from_millis(ahead_ms.load(Ordering::Relaxed));
        let config = StoreConfig { disk: Some(settings), ..config(8, Eviction::Lru) };
        Store::with_tier(&config, None, Some(Box::new(opener)), Box::new(clock)).unwrap()
    }

    /// Returns how many chunks of `prompt` are found after a restart.
    fn found_later(&self, prompt: &KeyChain) -> u32 {
        let store = self.open();
        self.settle(&store);
        store.lookup(prompt).stored_units
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn save_all(store: &Store, prompt: &KeyChain) {
    assert_eq!(save(store, &arena_of(store), prompt, 0..prompt.num_blocks()), prompt.num_blocks());
}

/// Opens a store whose first write fails even though its record reaches the disk. Clearing the
/// record also fails.
fn with_a_refused_write_that_was_done(place: &Place) -> (Store, KeyChain) {
    let (store, prompt) = (place.open(), chain(&[1]));
    let to_index = |fault| Rule::new(fault).on(WRITES).in_file("index");
    place.files.inject(to_index(Fault::Torn(FRAME, Some(EIO))).after(1).times(1));
    place.files.inject(to_index(Fault::Refuse(EIO)).after(1));
    save_all(&store, &prompt);
    until("the write failed", || stat(&store, "disk_write_errors") == 1);
    place.files.heal();
    (store, prompt)
}

#[test]
fn a_failed_write_that_reached_the_disk_does_not_survive_a_discard() {
    let place = Place::new();
    let (store, prompt) = with_a_refused_write_that_was_done(&place);
    assert_eq!(store.discard(&prompt.keys()[..1]), 1);
    place.settle(&store);
    drop(store);
    assert_eq!(place.found_later(&prompt), 0);
}

#[test]
fn a_failed_write_that_reached_the_disk_does_not_survive_a_clear() {
    let place = Place::new();
    let (store, prompt) = with_a_refused_write_that_was_done(&place);
    store.clear();
    place.settle(&store);
    drop(store);
    assert_eq!(place.found_later(&prompt), 0);
}

/// The reopened store finds two records of a chunk and cannot clear the older record. The chunk is
/// discarded later.
#[test]
fn an_older_copy_that_the_open_could_not_free_does_not_survive_a_discard() {
    let place = Place::new();
    let (store, prompt) = (place.open(), chain(&[1]));
    save_all(&store, &prompt);
    assert!(store.flush(LONG));
    place.files.inject(Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("index").times(1));
    assert_eq!(store.discard(&prompt.keys()[..1]), 1);
    until("freeing the slot failed", || stat(&store, "disk_write_errors") == 1);
    save_all(&store, &prompt);
    until("the chunk is written to another slot", || stat(&store, "disk_writes") == 2);
    drop(store); // before the first removal is retried
    place.files.inject(Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("index"));
    let store = place.open();
    until("the prompt is found", || store.lookup(&prompt).stored_units == 1);
    place.files.heal();
    store.discard(&prompt.keys()[..1]);
    place.settle(&store);
    drop(store);
    assert_eq!(place.found_later(&prompt), 0);
}

/// The reopened store can neither read nor clear a record, which may belong to a removed chunk.
#[test]
fn an_unreadable_record_does_not_survive_a_removal() {
    let removals: [fn(&Store, &KeyChain); 3] = [
        |store, _| assert!(!store.clear()),
        |store, prompt| assert_eq!(store.discard(prompt.keys()), 0),
        |store, _| {
            let salt = Some(SaltTag::of("a tenant without chunks in the index"));
            let evicted = store.evict(Evict { salt, is_host_only: false }, Instant::now() + LONG);
            assert!(evicted.is_cut_short);
        },
    ];
    for remove in removals {
        let place = Place::new();
        let (store, prompt) = (place.open(), chain(&[1]));
        save_all(&store, &prompt);
        assert!(store.flush(LONG));
        drop(store);
        let refused = Rule::new(Fault::Refuse(EIO)).on(&[Call::Read, Call::Write]);
        place.files.inject(refused.in_file("index"));
        let num_writes = place.files.num_calls(Call::Write);
        let store = place.open();
        until("clearing failed", || place.files.num_calls(Call::Write) > num_writes);
        until("freeing the slot failed", || stat(&store, "disk_write_errors") == 1);
        assert!(store.flush(LONG), "nothing was removed");
        remove(&store, &prompt);
        assert!(!store.flush(Duration::ZERO), "a removed chunk may be on disk");
        place.files.heal();
        place.settle(&store);
        drop(store);
        assert_eq!(place.found_later(&prompt), 0);
    }
}

/// Clearing one record fails, but the other records must still be cleared.
#[test]
fn a_slot_that_cannot_be_freed_does_not_block_a_clear() {
    let place = Place::new();
    let store = place.open();
    let prompts: Vec<_> = (1..4).map(|token| chain(&[token])).collect();
    for prompt in &prompts {
        save_all(&store, prompt);
    }
    assert!(store.flush(LONG));
    // Inject faults for the first prompt's slot, before and during the clear.
    place.files.inject(Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("index").times(1));
    assert_eq!(store.discard(&prompts[0].keys()[..1]), 1);
    until("freeing the slot failed", || stat(&store, "disk_write_errors") == 1);
    place.files.inject(Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("index").times(1));
    store.clear();
    drop(store);
    assert_eq!(prompts[1..].iter().map(|prompt| place.found_later(prompt)).sum::<u32>(), 0);
}

/// The record of slot 2 can be neither written nor cleared until the disk is repaired.
#[test]
fn a_cleared_disk_is_used_although_a_slot_cannot_be_freed() {
    let place = Place::new();
    let store = place.open();
    let prompts: Vec<_> = (1..5).map(|token| chain(&[token])).collect();
    for prompt in &prompts[..3] {
        save_all(&store, prompt);
        assert!(store.flush(LONG));
    }
    place.files.inject(
        Rule::new(Fault::Refuse(EIO)).on(WRITES).in_file("index").at_offset(2 * RECORD_BYTES),
    );
    assert!(!store.clear(), "a chunk is left on disk");
    assert!(store.must_stay_open(), "reopening the directory would bring the chunk back");
    assert!(store.take_events().iter().any(|event| event.contains("could not be cleared")));
    save_all(&store, &prompts[3]);
    until("it is written", || stat(&store, "disk_writes") == 4);
    drop(store);
    let store = place.open();
    until("both are found", || stat(&store, "disk_used") == 2);
    assert_eq!(store.lookup(&prompts[2]).stored_units, 1);
    place.files.heal();
    assert!(store.clear() && !store.must_stay_open());
    drop(store);
    assert_eq!(prompts.iter().map(|prompt| place.found_later(prompt)).sum::<u32>(), 0);
}

/// A disk record can have a wrong depth, so all keys before an anchor must be compared once.
#[test]
fn a_prefix_found_on_disk_is_an_anchor_after_its_keys_were_compared() {
    let (place, prompt, other) =
        (Place::new(), chain(&[1, 2, 3, 4, 5, 6, 7, 8]), chain(&[9, 10, 11, 12, 13]));
    let before = place.open();
    save_all(&before, &prompt);
    assert!(before.flush(LONG));
    drop(before);
    let store = place.open();
    place.settle(&store);
    let ends: Vec<_> = (1..).zip(prompt.keys().iter().copied()).collect();
    let begun = |end: u32| Prefix {
        first: end - 1,
        keys: &prompt.keys()[end as usize - 1..],
        ..Prefix::from(&prompt)
    };
    assert_eq!(store.anchors(&ends), Anchors { num_known: 0, num_stored: 8 });
    assert_eq!(store.lookup(begun(8)), Lookup::default());
    assert_eq!(store.lookup(&prompt).stored_units, 8);
    assert_eq!(store.anchors(&ends), Anchors { num_known: 0, num_stored: 8 });

    // Read the whole prompt into host memory. Saving another prompt then takes frames from the end
    // of this prompt, so that its last chunks are only on disk.
    let whole = store.acquire(&prompt);
    assert_eq!(store.anchors(&ends), Anchors { num_known: 8, num_stored: 8 });
    until("the prompt is read", || whole.poll().ready_units == 8);
    drop(whole);
    save_all(&store, &other);
    assert_eq!(store.lookup(&prompt), Lookup { host_units: 3, stored_units: 8 });
    for end in 2..=8 {
        assert_eq!(store.lookup(begun(end)), Lookup { host_units: 3, stored_units: 8 }, "{end}");
    }
    let lease = store.acquire(begun(7));
    assert_eq!(lease.poll().ready_units + lease.poll().pending_units, 8);
    until("the prompt is read", || lease.poll().ready_units == 8);
    assert_eq!(lease.frames().iter().map(|frame| frame.key).collect::<Vec<_>>(), prompt.keys());
}
