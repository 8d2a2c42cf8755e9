//! Tests that no unrelated call waits for a hung system call, and that a directory never has two
//! owners.
//!
//! The tests assert the order of events, never a duration. A long timeout ends a deadlocked test.

use crate::io::SizeClass;
use crate::tier::NoSlot;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{JoinHandle, yield_now};
use std::time::Duration;

use super::*;
use crate::test_support::faults::{Call, Fault, FaultFiles, Rule};
use crate::{Error, ErrorKind};

const HUNG: Duration = Duration::from_secs(60);

/// Runs a call that must not hang and returns its result.
fn within<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    std::thread::spawn(move || send.send(work()));
    receive.recv_timeout(HUNG).expect("the call must not wait for a hung call")
}

struct Hanging {
    tier: Arc<DiskTier>,
    files: FaultFiles,
    config: DiskConfig,
    _dir: tempfile::TempDir,
}

impl Hanging {
    fn new(slots: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (config, files) = (config(dir.path(), slots), FaultFiles::default());
        let tier = Arc::new(
            DiskTier::open_with_files(&config, &std::sync::Arc::default(), &files).unwrap().0,
        );
        Self { tier, files, config, _dir: dir }
    }

    /// Runs `work` on a separate thread, and returns once a system call of a given kind hangs.
    fn hang<T: Send + 'static>(
        &self,
        call: &'static [Call],
        work: impl FnOnce(&DiskTier) -> T + Send + 'static,
    ) -> JoinHandle<T> {
        self.files.inject(Rule::new(Fault::Hang).on(call).times(1));
        let before = self.files.num_hung();
        let tier = Arc::clone(&self.tier);
        let thread = std::thread::spawn(move || work(&tier));
        while self.files.num_hung() == before {
            yield_now();
        }
        thread
    }

    fn with<T: Send + 'static>(&self, work: impl FnOnce(&DiskTier) -> T + Send + 'static) -> T {
        let tier = Arc::clone(&self.tier);
        within(move || work(&tier))
    }

    fn reopen(&self) -> Result<Vec<DiskEntry>, Error> {
        DiskTier::open(self.config.clone()).map(|(_, found)| found)
    }
}

#[test]
fn test_close_waits_for_nothing_and_the_last_call_inside_gives_the_directory_up() {
    for call in [&[Call::Write], &[Call::Read], &[Call::Allocate]] {
        let it = Hanging::new(4);
        let slot = put(&it.tier, 0);
        let spare: Vec<_> = (1..4).map(|_| it.tier.reserve(SizeClass(0)).unwrap()).collect();
        if call[0] == Call::Allocate {
            // A new, empty tier hangs while it grows its files.
            let fresh = Hanging::new(4);
            let hung = fresh.hang(call, |tier| tier.reserve(SizeClass(0)).ok());
            fresh.with(LocalTier::close);
            assert_eq!(fresh.reopen().unwrap_err().kind(), ErrorKind::Busy, "two owners");
            fresh.files.heal();
            hung.join().unwrap();
            fresh.reopen().expect("the last call must release the directory");
            continue;
        }
        let hung = it.hang(call, move |tier| {
            if call[0] == Call::Write {
                tier.write(spare[0], &meta_of(1), &frame_of(1, 0))
            } else {
                get(tier, slot, 0).map(drop)
            }
        });
        it.with(LocalTier::close);
        assert_eq!(it.with(move |tier| get(tier, slot, 0)).unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(it.reopen().unwrap_err().kind(), ErrorKind::Busy, "two owners");
        it.files.heal();
        hung.join().unwrap().expect("the call must succeed once the hang ends");
        let found = it.reopen().expect("the last call must release the directory");
        assert_eq!(numbers(&found), if call[0] == Call::Write { vec![0, 1] } else { vec![0] });
    }
}

#[test]
fn test_a_closed_tier_with_no_caller_inside_is_given_up_at_once() {
    let it = Hanging::new(2);
    put(&it.tier, 0);
    it.tier.close();
    assert_eq!(numbers(&it.reopen().unwrap()), [0]);
}

#[test]
fn test_growth_that_hangs_delays_neither_reads_nor_writes_nor_stats() {
    let dir = tempfile::tempdir().unwrap();
    // Create files with two slots, so that the third `reserve` below grows them.
    let small = config(dir.path(), 2);
    let _ = open(&small).0.reserve(SizeClass(0));
    let it = Hanging { config: config(dir.path(), 8), ..Hanging::new(1) };
    let (tier, _) =
        DiskTier::open_with_files(&it.config, &std::sync::Arc::default(), &it.files).unwrap();
    let it = Hanging { tier: Arc::new(tier), ..it };
    let (slot, spare) = (put(&it.tier, 0), it.tier.reserve(SizeClass(0)).unwrap());
    let grower = it.hang(&[Call::Allocate], |tier| tier.reserve(SizeClass(0)).ok());
    assert_eq!(it.with(|tier| tier.stats().slots), 2);
    assert_eq!(it.with(move |tier| get(tier, slot, 0)).unwrap(), frame_of(0, 0).to_vec());
    it.with(move |tier| tier.write(spare, &meta_of(1), &frame_of(1, 0))).unwrap();
    let mut outcomes = vec![it.with(|tier| tier.reserve(SizeClass(0)))];
    while outcomes.last() == Some(&Err(NoSlot::Growing)) {
        outcomes.push(it.with(|tier| tier.reserve(SizeClass(0))));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(outcomes.len() > 2, "no slot can be reserved while the files grow: {outcomes:?}");
    assert_eq!(
        outcomes.last(),
        Some(&Err(NoSlot::FullExceptSameSize)),
        "a hung thread must not stop writes"
    );
    it.with(move |tier| tier.free(slot)).unwrap();
    assert_eq!(
        it.with(|tier| tier.reserve(SizeClass(0)).ok()),
        Some(slot),
        "a free slot must be reservable"
    );
    it.files.heal();
    assert!(grower.join().unwrap().is_some());
    assert!(it.tier.reserve(SizeClass(0)).is_ok(), "growing must work again");
}

#[test]
fn test_a_write_that_hangs_delays_no_other_call() {
    let it = Hanging::new(4);
    let (slot, spare) = (put(&it.tier, 0), it.tier.reserve(SizeClass(0)).unwrap());
    let hung = it.hang(&[Call::Write], move |tier| tier.write(spare, &meta_of(1), &frame_of(1, 0)));
    assert_eq!(it.with(move |tier| get(tier, slot, 0)).unwrap(), frame_of(0, 0).to_vec());
    assert_eq!(it.with(|tier| tier.stats().slots_used), 1);
    it.with(move |tier| tier.free(slot)).unwrap();
    it.with(|tier| put(tier, 2));
    it.files.heal();
    hung.join().unwrap().unwrap();
}

#[test]
fn test_a_free_that_hangs_delays_no_other_call() {
    let it = Hanging::new(4);
    let (slot, other) = (put(&it.tier, 0), put(&it.tier, 1));
    let hung = it.hang(&[Call::Write], move |tier| tier.free(slot));
    assert_eq!(it.with(move |tier| get(tier, other, 1)).unwrap(), frame_of(1, 0).to_vec());
    assert_eq!(it.with(|tier| tier.stats().slots_used), 1);
    it.with(move |tier| tier.free(slot)).expect("a second free of the same slot does nothing");
    assert_ne!(it.with(|tier| put(tier, 2)), slot, "the slot is not free yet");
    it.files.heal();
    hung.join().unwrap().unwrap();
}
