//! Tests how the tier behaves when a chosen system call fails.

use crate::io::SizeClass;
use std::io;
use std::sync::Arc;

use super::super::DiskRoot;
use super::super::files::{OpenFiles, OsFiles};
use super::*;
use crate::io::direct::RawFile;
use crate::test_support::faults::{Call, EIO, ENOSPC, EOPNOTSUPP, Fault, FaultFiles, Rule};
use crate::{Error, ErrorKind};

/// Lets `n` changes succeed, then makes one change fail.
fn refuse_once(files: &FaultFiles, n: u64, number: i32) {
    files.inject(Rule::new(Fault::Refuse(number)).after(n).times(1));
}

fn faulty(config: &DiskConfig) -> (DiskTier, FaultFiles) {
    let files = FaultFiles::default();
    let (tier, _) = DiskTier::open_with_files(config, &std::sync::Arc::default(), &files).unwrap();
    (tier, files)
}

fn try_put(tier: &DiskTier, i: u32) -> Result<SlotId, Error> {
    let slot = tier.reserve(SizeClass(0)).expect("a slot");
    tier.write(slot, &meta_of(i), &frame_of(i, 0))
        .map(|()| slot)
        .inspect_err(|_| tier.free(slot).unwrap())
}

#[test]
fn test_a_write_without_room_is_an_io_error_and_the_slot_is_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 3);
    let (tier, files) = faulty(&config);
    let kept = put(&tier, 0);
    for call in 0..3 {
        refuse_once(&files, call, ENOSPC);
        let error = try_put(&tier, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        let source =
            std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.and_then(io::Error::raw_os_error), Some(ENOSPC));
    }
    let stats = tier.stats();
    assert_eq!((stats.slots_used, stats.slots_reserved), (1, 0));
    assert_eq!(get(&tier, kept, 0).unwrap(), frame_of(0, 0).to_vec());
    let again = try_put(&tier, 1).unwrap();
    assert_eq!(get(&tier, again, 1).unwrap(), frame_of(1, 0).to_vec());
}

#[test]
fn test_a_slot_that_refused_a_write_is_tried_last() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 3);
    for call in 0..3 {
        let (tier, files) = faulty(&config);
        tier.free(tier.reserve(SizeClass(0)).expect("the files have grown")).unwrap();
        let slot = tier.reserve(SizeClass(0)).unwrap();
        refuse_once(&files, call, EIO);
        assert_eq!(
            tier.write(slot, &meta_of(1), &frame_of(1, 0)).unwrap_err().kind(),
            ErrorKind::Io
        );
        tier.free(slot).unwrap();
        assert_eq!((tier.stats().slots_used, tier.stats().slots_reserved), (0, 0));
        let order: Vec<_> = (0..3).map(|_| tier.reserve(SizeClass(0)).unwrap()).collect();
        assert_eq!(order[2], slot, "the failed slot must be reserved last");
    }
}

#[test]
fn test_a_write_that_never_reached_its_record_gives_its_slot_back_without_io() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 1));
    for call in 0..2 {
        let slot = tier.reserve(SizeClass(0)).expect("the slot was returned");
        files.inject(Rule::new(Fault::Refuse(EIO)).after(call));
        assert!(tier.write(slot, &meta_of(0), &frame_of(0, 0)).is_err());
        tier.free(slot).expect("the slot's record must be empty");
        files.heal();
    }
}

#[test]
fn test_a_record_that_landed_although_its_write_was_refused_is_forgotten_with_the_slot() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2);
    let (tier, files) = faulty(&config);
    let slot = tier.reserve(SizeClass(0)).unwrap();
    // The first write to the index clears the record, and the second writes the new record.
    files.inject(
        Rule::new(Fault::Torn(128, Some(EIO))).on(&[Call::Write]).in_file("index").after(1),
    );
    assert!(tier.write(slot, &meta_of(0), &frame_of(0, 0)).is_err());
    files.heal();
    tier.free(slot).unwrap();
    drop(tier);
    assert!(open(&config).1.is_empty(), "the chunk of a failed write must not be found");
}

#[test]
fn test_a_chunk_that_cannot_be_forgotten_stays_with_its_caller_and_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2);
    let (tier, files) = faulty(&config);
    let slot = put(&tier, 0);
    for clear in [false, true] {
        refuse_once(&files, 0, EIO);
        if clear {
            assert_eq!(tier.clear().unwrap(), [slot]);
        } else {
            assert_eq!(tier.free(slot).unwrap_err().kind(), ErrorKind::Io);
        }
        assert_eq!(get(&tier, slot, 0).unwrap(), frame_of(0, 0).to_vec());
    }
    assert_eq!(tier.stats().slots_used, 1);
    assert_ne!(tier.reserve(SizeClass(0)).ok(), Some(slot));
    assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
    drop(tier);
    let (tier, found) = open(&config);
    assert_eq!(numbers(&found), [0]);
    tier.free(found[0].slot).unwrap();
    drop(tier);
    assert!(open(&config).1.is_empty());
}

#[test]
fn test_short_transfers_are_finished() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2);
    let (tier, files) = faulty(&config);
    for most in [1, 77, 4096, 5000] {
        files.heal();
        files.inject(Rule::new(Fault::Short(most)).on(&[Call::Read, Call::Write]));
        let slot = put(&tier, most.try_into().unwrap());
        assert_eq!(
            get(&tier, slot, most.try_into().unwrap()).unwrap(),
            frame_of(most.try_into().unwrap(), 0).to_vec()
        );
        tier.free(slot).unwrap();
    }
}

#[test]
fn test_a_failing_read_is_an_io_error_and_harms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 2));
    let slot = put(&tier, 0);
    for call in 0..2 {
        files.inject(Rule::new(Fault::Refuse(EIO)).on(&[Call::Read]).after(call).times(1));
        assert_eq!(get(&tier, slot, 0).unwrap_err().kind(), ErrorKind::Io);
    }
    assert_eq!(get(&tier, slot, 0).unwrap(), frame_of(0, 0).to_vec());
}

#[test]
fn test_files_that_cannot_grow_stop_growing_and_keep_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path(), 64);
    let first = {
        config.cap_bytes = budget::dir_bytes(2, FRAME, 0);
        let (tier, _) = open(&config);
        [put(&tier, 0), put(&tier, 1)]
    };
    config.cap_bytes = budget::dir_bytes(64, FRAME, 0);
    let (tier, files) = faulty(&config);
    files.inject(Rule::new(Fault::Refuse(ENOSPC)));
    assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
    assert_eq!(tier.stats().slots, 2);
    let size = |kind: &str| std::fs::metadata(slot_file(&config, kind)).unwrap().len();
    assert_eq!(
        [size("frames"), size("index")],
        [2 * FRAME, 256],
        "a failed attempt to grow must release its bytes"
    );
    assert!(tier.stats().grow_errors >= 6, "must retry with smaller steps, down to one slot");
    assert_eq!(tier.take_events().len(), 1, "must be logged once, not on every step");
    let num_errors = tier.stats().grow_errors;
    assert!((0..514).all(|_| tier.reserve(SizeClass(0)).is_err()));
    assert!(
        tier.stats().grow_errors < 100 * num_errors,
        "growth must not be retried on every call"
    );
    assert!(tier.take_events().is_empty(), "must not be logged on every attempt");
    files.heal();
    for (i, slot) in (0..).zip(first) {
        assert_eq!(get(&tier, slot, i).unwrap(), frame_of(i, 0).to_vec());
    }
    // Space can be freed at any time, so growth is retried after a while, but not on every call.
    let asks =
        (1..1000).find(|_| tier.reserve(SizeClass(0)).is_ok()).expect("the tier must grow again");
    assert!(asks <= 257, "{asks}");
}

#[test]
fn test_files_that_could_not_grow_are_tried_again_soon_although_few_ask() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 64));
    files.inject(Rule::new(Fault::Refuse(ENOSPC)));
    assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
    files.heal();
    let is_there = (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        tier.reserve(SizeClass(0)).is_ok()
    });
    assert!(is_there, "the tier must grow again after a while");
}

#[test]
fn test_part_of_an_extension_is_taken_where_all_of_it_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 64));
    refuse_once(&files, 1, ENOSPC);
    assert!(tier.reserve(SizeClass(0)).is_ok());
    let stats = tier.stats();
    assert_eq!((stats.slots, stats.grow_errors), (32, 1));
}

#[test]
fn test_a_file_system_without_allocation_still_works() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 4));
    files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Allocate]));
    for i in 0..4 {
        let slot = put(&tier, i);
        assert_eq!(get(&tier, slot, i).unwrap(), frame_of(i, 0).to_vec());
    }
    assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
}

/// Opens two namespaces in a directory. Returns both namespaces, and the files of the second
/// namespace for fault injection.
fn two_namespaces(dir: &Path, root: &Arc<DiskRoot>) -> (DiskTier, DiskTier, FaultFiles) {
    let (config, files) = (config(dir, 64), FaultFiles::default());
    let (first, _) = DiskTier::open_in(&config, root).unwrap();
    put(&first, 0);
    let config = DiskConfig { namespace: [2; 32], ..config };
    let (second, _) = DiskTier::open_with_files(&config, root, &files).unwrap();
    (first, second, files)
}

#[test]
fn test_a_full_file_system_costs_closed_namespaces_first() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second, files) = two_namespaces(dir.path(), &DiskRoot::shared());
    let first_dir = namespaces::dir_of(&config(dir.path(), 64));
    drop(first);
    let full = Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Allocate]);
    files.inject(full.times(second_steps(&second)));
    assert!(second.reserve(SizeClass(0)).is_ok(), "deleting the closed namespace must make room");
    assert!(!first_dir.exists());
    assert!(second.take_events().iter().any(|line| line.contains("deleted ")));
}

/// Returns the number of attempts to grow, each for half as many slots as the previous attempt.
fn second_steps(tier: &DiskTier) -> u64 {
    let extent = tier.enter().unwrap().extent_bytes(tier.config.cap_bytes) / FRAME;
    u64::from(extent.max(1).ilog2()) + 1
}

#[test]
fn test_a_write_to_a_full_file_system_costs_a_closed_namespace_first() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second, files) = two_namespaces(dir.path(), &DiskRoot::shared());
    drop(first);
    files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Allocate]));
    files.inject(Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Write]).in_file("frames").times(1));
    assert!(try_put(&second, 1).unwrap_err().is_no_space());
    try_put(&second, 1).expect("there must be space now");
    assert_eq!(second.stats().grow_errors, 0);
}

#[test]
fn test_a_full_file_system_asks_the_server_to_close_an_idle_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let root = DiskRoot::shared();
    let (first, second, files) = two_namespaces(dir.path(), &root);
    files.inject(Rule::new(Fault::Refuse(ENOSPC)));
    assert!(!root.take_short());
    assert_eq!(second.reserve(SizeClass(0)).ok(), None);
    assert!(root.take_short());
    drop(first);
}

#[test]
fn test_only_a_namespace_below_its_part_of_the_disk_lacks_space() {
    let dir = tempfile::tempdir().unwrap();
    let root = DiskRoot::shared();
    let fill = |tier: &DiskTier| (0..64).map_while(|_| tier.reserve(SizeClass(0)).ok()).count();
    let (first, second, _files) = two_namespaces(dir.path(), &root);
    assert!((1..64).contains(&fill(&second)), "the first namespace holds part of the disk");
    assert!(!root.take_short(), "the second namespace holds its part");
    drop((first, second));

    let alone = tempfile::tempdir().unwrap();
    let config = config(alone.path(), 64);
    let (first, _) = DiskTier::open_in(&config, &root).unwrap();
    fill(&first);
    let (second, _) =
        DiskTier::open_in(&DiskConfig { namespace: [2; 32], ..config.clone() }, &root).unwrap();
    assert_eq!(second.reserve(SizeClass(0)).ok(), None);
    assert!(root.take_short(), "the first namespace holds more than its part");
    drop(first);
}

#[test]
fn test_a_namespace_with_its_part_of_the_disk_deletes_no_closed_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let root = DiskRoot::shared();
    let config = config(dir.path(), 64);
    let of = |number: u8| DiskConfig { namespace: [number; 32], ..config.clone() };
    let (closed, _) = DiskTier::open_in(&of(9), &root).unwrap();
    put(&closed, 0);
    drop(closed);
    let (first, _) = DiskTier::open_in(&of(1), &root).unwrap();
    for _ in 0..40 {
        first.reserve(SizeClass(0)).unwrap();
    }
    let (_second, _) = DiskTier::open_in(&of(2), &root).unwrap();
    let num_more = (0..64).map_while(|_| first.reserve(SizeClass(0)).ok()).count();
    assert!(num_more < 20, "{num_more}");
    assert!(namespaces::dir_of(&of(9)).exists());
}

#[test]
fn test_a_namespace_opens_on_a_full_file_system_with_a_closed_namespace() {
    #[derive(Debug)]
    struct Full<'a>(&'a Path);
    impl OpenFiles for Full<'_> {
        fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn RawFile>> {
            if self.0.exists() {
                return Err(io::Error::from_raw_os_error(ENOSPC));
            }
            OsFiles.open(path, direct)
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 64);
    drop(open(&config));
    let closed = namespaces::dir_of(&config);
    let config = DiskConfig { namespace: [2; 32], ..config };
    let opened = DiskTier::open_with_files(&config, &DiskRoot::shared(), &Full(&closed));
    put(&opened.unwrap().0, 0);
    assert!(!closed.exists());
}

/// Opens a tier on a file system that cannot preallocate and has space for `num_slots` frames.
fn small(config: &DiskConfig, num_slots: u64) -> (DiskTier, FaultFiles) {
    let (tier, files) = faulty(config);
    files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Allocate]));
    let beyond = Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Write]).in_file("frames");
    files.inject(beyond.from_offset(num_slots * FRAME));
    (tier, files)
}

#[test]
fn test_a_slot_that_has_blocks_comes_before_holes() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 8);
    let (tier, _files) = small(&config, 8);
    let slots = [put(&tier, 0), put(&tier, 1)];
    tier.free(slots[0]).unwrap();
    assert_eq!(tier.reserve(SizeClass(0)).ok(), Some(slots[0]));
    tier.free(slots[0]).unwrap();
    drop(tier);
    let (tier, found) = open(&config);
    assert_eq!(numbers(&found), [1]);
    tier.free(slots[1]).unwrap();
    assert_eq!(
        tier.reserve(SizeClass(0)).ok(),
        Some(slots[1]),
        "slots written by an earlier process have blocks"
    );
}

#[test]
fn test_a_slot_that_has_blocks_and_refused_a_write_comes_after_holes() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = small(&config(dir.path(), 3), 3);
    let slot = put(&tier, 0);
    tier.free(slot).unwrap();
    files.inject(Rule::new(Fault::Refuse(EIO)).on(&[Call::Write]).in_file("frames").times(1));
    assert_eq!(tier.reserve(SizeClass(0)).ok(), Some(slot));
    assert_eq!(tier.write(slot, &meta_of(1), &frame_of(1, 0)).unwrap_err().kind(), ErrorKind::Io);
    tier.free(slot).unwrap();
    let order: Vec<_> = (0..3).map(|_| tier.reserve(SizeClass(0)).unwrap()).collect();
    assert_eq!(order[2], slot, "a bad slot must be reserved last");
}

#[test]
fn test_a_slot_that_keeps_refusing_writes_is_not_retried_while_others_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = small(&config(dir.path(), 2), 2);
    let (mut kept, bad) = (put(&tier, 0), tier.reserve(SizeClass(0)).unwrap());
    tier.free(bad).unwrap();
    for number in 0..900 {
        tier.free(kept).unwrap();
        kept = put(&tier, number);
    }
    let bad = if kept == bad { SlotId(1 - bad.number()) } else { bad };
    files.inject(Rule::new(Fault::Refuse(EIO)).on(&[Call::Write]).in_file("frames"));
    let mut num_failed = 0;
    while let Ok(slot) = tier.reserve(SizeClass(0)) {
        assert_eq!(slot, bad);
        assert!(tier.write(slot, &meta_of(1), &frame_of(1, 0)).is_err());
        tier.free(slot).unwrap();
        num_failed += 1;
    }
    assert!((4..20).contains(&num_failed), "{num_failed}");
    files.heal();
    let mut num_written = 0;
    while tier.reserve(SizeClass(0)).is_err() {
        tier.free(kept).unwrap();
        kept = put(&tier, num_written);
        assert_ne!(kept, bad);
        num_written += 1;
        assert!(num_written < 2000, "the failure may have been temporary");
    }
    assert!(num_written > 500, "{num_written}");
    assert_eq!((tier.stats().slots_used, tier.stats().slots_reserved), (1, 1));
}

#[test]
fn test_files_grow_before_a_slot_that_keeps_refusing_writes_is_retried() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&config(dir.path(), 20_000));
    let bad = tier.reserve(SizeClass(0)).unwrap();
    let num_slots = tier.stats().slots;
    for _ in 1..num_slots {
        tier.reserve(SizeClass(0)).unwrap();
    }
    files.inject(Rule::new(Fault::Refuse(EIO)).on(&[Call::Write]).in_file("frames"));
    let mut slot = bad;
    for _ in 0..20 {
        assert!(tier.write(slot, &meta_of(1), &frame_of(1, 0)).is_err());
        tier.free(slot).unwrap();
        slot = tier.reserve(SizeClass(0)).unwrap();
        if slot != bad {
            break;
        }
    }
    assert_ne!(slot, bad);
    assert!(tier.stats().slots > num_slots);
}

#[test]
fn test_a_full_file_system_without_allocation_takes_writes_to_slots_that_have_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = small(&config(dir.path(), 64), 4);
    let mut slots: Vec<_> = (0..4).map(|i| put(&tier, i)).collect();
    assert!(try_put(&tier, 4).unwrap_err().is_no_space());
    assert_eq!(
        tier.reserve(SizeClass(0)).ok(),
        None,
        "a hole was reserved; writing to it would fail too"
    );
    for i in 4..20 {
        tier.free(slots.remove(0)).unwrap();
        slots.push(try_put(&tier, i).unwrap());
    }
    assert!(
        (16..20)
            .zip(&slots)
            .all(|(i, slot)| get(&tier, *slot, i).unwrap() == frame_of(i, 0).to_vec())
    );
    let events = tier.take_events();
    assert_eq!((events.len(), tier.stats().grow_errors), (1, 1), "{events:?}");
    assert!(events[0].contains("is full; evicting chunks"), "{events:?}");
    // Space can be freed at any time, so holes are retried after a while, but not on every call.
    assert!((0..200).all(|_| tier.reserve(SizeClass(0)).is_err()));
    files.heal();
    let asks =
        (200..1000).find(|_| tier.reserve(SizeClass(0)).is_ok()).expect("the tier must grow again");
    assert!(asks <= 257, "{asks}");
}

#[test]
fn test_a_full_file_system_that_stays_full_is_logged_once() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _files) = small(&config(dir.path(), 64), 4);
    let slots: Vec<_> = (0..4).map(|i| put(&tier, i)).collect();
    let mut refuse_next = |num_tries: u64| {
        let slot = (0..1000)
            .find_map(|_| tier.reserve(SizeClass(0)).ok())
            .expect("must reserve a hole after a while");
        assert!(tier.write(slot, &meta_of(9), &frame_of(9, 0)).unwrap_err().is_no_space());
        tier.free(slot).unwrap();
        assert_eq!(tier.stats().grow_errors, num_tries);
        tier.take_events().len()
    };
    assert_eq!((1..5).map(&mut refuse_next).collect::<Vec<_>>(), [1, 0, 0, 0]);
    assert!(
        (0..4).zip(slots).all(|(i, slot)| get(&tier, slot, i).unwrap() == frame_of(i, 0).to_vec())
    );
}
