//! Tests that hole punching moves space between size classes without ever exceeding the size limit.

use std::collections::BTreeSet;
use std::fs;

use super::super::DiskRoot;
use super::super::budget::SlotCount;
use super::super::slots::{SlotState, Slots};
use super::classes::{LARGE, SIZES, SMALL, are_whole, faulty, fill_up, is_whole, sized, write};
use super::*;
use crate::test_support::faults::{Call, ENOSPC, EOPNOTSUPP, Fault, Rule, blocks};

#[test]
fn test_slots_of_one_size_make_room_for_another_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, files) = faulty(&config);
    let mut small = fill_up(&tier, SMALL, 0);
    assert!(small.len() > 350, "a single size must be able to use the whole cap: {}", small.len());
    assert_eq!(tier.reserve(LARGE).ok(), None);
    let mut large = Vec::new();
    for (nth, (_, slot)) in small.drain(..200).enumerate() {
        tier.free(slot).unwrap();
        if let Ok(slot) = tier.reserve(LARGE) {
            assert!(
                nth + 1 >= 10 * (large.len() + 1),
                "large frames use more space than was freed"
            );
            let i = 500 + u32::try_from(large.len()).unwrap();
            write(&tier, slot, i).unwrap();
            large.push((i, slot));
        }
    }
    assert!(large.len() >= 18, "only {} large frames replaced 200 small frames", large.len());
    assert!(are_whole(&tier, &small) && are_whole(&tier, &large));
    for (_, slot) in large.drain(..) {
        tier.free(slot).unwrap();
    }
    let refilled = fill_up(&tier, SMALL, 600);
    assert!(refilled.len() >= 180, "only {} small frames replaced large frames", refilled.len());
    assert!(are_whole(&tier, &small) && are_whole(&tier, &refilled));
    let most = files.most_blocks();
    assert!(most <= config.cap_bytes, "{most} of {}", config.cap_bytes);
    assert!(tier.stats().bytes <= config.cap_bytes && tier.stats().bytes >= blocks(dir.path()));
    assert_eq!((tier.stats().grow_errors, tier.take_events().len()), (0, 0));
}

#[test]
fn test_a_smaller_chunk_uses_the_room_of_a_larger_one() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _files) = faulty(&sized(dir.path(), &SIZES));
    let large = fill_up(&tier, LARGE, 0);
    assert_eq!((large.len(), tier.reserve(SMALL).ok()), (40, None));
    tier.free(large[3].1).unwrap();
    assert!(fill_up(&tier, SMALL, 100).len() >= 9);
    assert!(are_whole(&tier, &large[4..]) && are_whole(&tier, &large[..3]));
}

#[test]
fn test_a_file_system_that_cannot_punch_keeps_each_size_its_slots_and_says_so_once() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, files) = faulty(&sized(dir.path(), &SIZES));
    files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Punch]));
    let mut small = fill_up(&tier, SMALL, 0);
    let freed: Vec<_> = small.drain(50..100).collect();
    for (_, slot) in &freed {
        tier.free(*slot).unwrap();
    }
    assert!((0..20).all(|_| tier.reserve(LARGE).is_err()));
    assert_eq!(tier.stats().grow_errors, 1, "growth must not be retried on every call");
    let events = tier.take_events();
    assert!(events.len() == 1 && events[0].contains("chunks of a different size"), "{events:?}");
    assert_eq!(fill_up(&tier, SMALL, 600).len(), 50, "only free slots of the same size are used");
    assert!(are_whole(&tier, &small));
    small.drain(..30).for_each(|(_, slot)| tier.free(slot).unwrap());
    files.heal();
    let is_there = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        tier.reserve(LARGE).is_ok()
    });
    assert!(is_there, "growth must be retried");
}

#[test]
fn test_a_full_file_system_has_the_room_of_evicted_chunks_of_another_size() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = sized(dir.path(), &SIZES);
    let mut small = fill_up(&open(&config).0, SMALL, 0);
    config.cap_bytes = 1 << 30;
    let (tier, files) = faulty(&config);
    // The rule must apply whenever no space is free, because growing is retried after 2 s.
    let full = Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Allocate]);
    files.inject(full);
    assert_eq!(tier.reserve(LARGE).ok(), None);
    files.heal();
    small.drain(..11).for_each(|(_, slot)| tier.free(slot).unwrap());
    let slot = tier.reserve(LARGE).expect("eleven small frames make enough room");
    write(&tier, slot, 999).unwrap();
    assert!(is_whole(&tier, slot, 999) && are_whole(&tier, &small));
    files.inject(full);
    assert_eq!(tier.reserve(LARGE).ok(), None);
}

#[test]
fn test_room_that_is_too_small_stays_where_it_is_and_files_end_with_a_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, files) = faulty(&config);
    let mut small = fill_up(&tier, SMALL, 0);
    small.drain(small.len() - 8..).for_each(|(_, slot)| tier.free(slot).unwrap());
    assert_eq!((tier.reserve(LARGE).ok(), files.num_calls(Call::Punch)), (None, 0));
    small.drain(small.len() - 8..).for_each(|(_, slot)| tier.free(slot).unwrap());
    assert!(tier.reserve(LARGE).is_ok() && files.num_calls(Call::Punch) > 0);
    let len = |name| fs::metadata(namespaces::dir_of(&config).join(name)).unwrap().len();
    let max_slots = small.len() as u64 + 15;
    assert!(len("frames-4096.dat") <= max_slots * 4096 && len("index-4096.dat") <= max_slots * 128);
    assert!(are_whole(&tier, &small));
}

#[test]
fn test_holes_make_no_room_on_a_full_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = sized(dir.path(), &SIZES);
    let tier = open(&config).0;
    let small = fill_up(&tier, SMALL, 0);
    small[..50].iter().for_each(|(_, slot)| tier.free(*slot).unwrap());
    drop(tier);
    config.cap_bytes = 1 << 30;
    let (tier, files) = faulty(&config);
    files.inject(Rule::new(Fault::Refuse(ENOSPC)).on(&[Call::Allocate]));
    assert!((0..20).all(|_| tier.reserve(LARGE).is_err()));
    assert_eq!(files.num_calls(Call::Punch), 0, "after a restart, no slot is known to have blocks");
}

#[test]
fn test_a_slot_whose_record_may_not_be_empty_is_not_punched() {
    let count = SlotCount { frame_bytes: 4096, slots: 4, filled: 4 };
    let uncleared = SlotId::new(SMALL, 2);
    let mut slots = Slots::found(SMALL, count, std::iter::empty(), &[uncleared], BTreeSet::new());
    assert_eq!(slots.take_for_punch(4, true), [0, 1, 3]);
    slots.punched([0, 1, 3].into_iter());
    assert_eq!((slots.count().filled, slots.reserved(), slots.end()), (1, 1, 3));
    assert_eq!((slots.take(), slots.take_failed()), (None, None));
    assert!(slots.leaving(uncleared).is_some_and(SlotState::may_have_record));
    slots.left(uncleared);
    assert_eq!(slots.take(), Some(uncleared));
    slots.refill([1].into_iter(), true);
    assert_eq!(slots.take(), Some(SlotId::new(SMALL, 1)));
}

#[test]
fn test_sizes_exchange_room_in_a_namespace_that_has_more_than_its_part() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let root = DiskRoot::shared();
    let open = |config: &DiskConfig| DiskTier::open_in(config, &root).unwrap().0;
    let first = open(&config);
    let mut small = fill_up(&first, SMALL, 0);
    let second = open(&DiskConfig { namespace: [1; 32], ..config.clone() });
    assert_eq!(second.reserve(SMALL).ok(), None);
    small.drain(..11).for_each(|(_, slot)| first.free(slot).unwrap());
    assert!(first.reserve(LARGE).is_ok(), "the tier has already claimed that space");
    assert!(blocks(dir.path()) <= config.cap_bytes);
}
