//! Tests a tier whose index has sectors that can be neither read nor written.

use std::path::Path;
use std::sync::Arc;

use super::super::remove_closed::remove_from;
use super::*;
use crate::ErrorKind;
use crate::test_support::faults::{Call, EIO, Fault, FaultFiles, Rule};

/// Returns a tier that held 70 chunks before its index became unreadable at these offsets, the
/// chunks found, and the files.
fn reopened_with_unreadable_index(
    dir: &Path,
    offsets: &[u64],
) -> crate::Result<(DiskTier, Vec<DiskEntry>, FaultFiles)> {
    let config = config(dir, 1000);
    let (tier, _) = open(&config);
    for number in 0..70 {
        put(&tier, number);
    }
    drop(tier);
    let files = FaultFiles::new(1);
    let unreadable = Rule::new(Fault::Refuse(EIO)).on(&[Call::Read]).in_file("index");
    files.inject(unreadable.at_offset(0).times(1)); // the first read covers all records
    for &offset in offsets {
        files.inject(unreadable.at_offset(offset));
        let records = (offset..offset + 4096).step_by(128);
        let unwritable = Rule::new(Fault::Refuse(EIO)).on(&[Call::Write]).in_file("index");
        records.for_each(|at| files.inject(unwritable.at_offset(at)));
    }
    let (tier, found) = DiskTier::open_with_files(&config, &Arc::default(), &files)?;
    Ok((tier, found, files))
}

#[test]
fn test_an_unreadable_sector_of_the_index_loses_only_its_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let (_, found, _) = reopened_with_unreadable_index(dir.path(), &[]).unwrap();
    assert_eq!(numbers(&found), (0..70).collect::<Vec<_>>());
    let dir = tempfile::tempdir().unwrap();
    let (tier, found, _) = reopened_with_unreadable_index(dir.path(), &[4096]).unwrap();
    // Chunks 32 to 63 and their children are lost.
    assert_eq!(numbers(&found), (0..32).chain(64..66).collect::<Vec<_>>());
    let num_free = 1000 - 70;
    for number in 70..70 + num_free {
        put(&tier, number); // slots with unreadable records are not reserved
    }
}

#[test]
fn test_opening_fails_if_many_index_sectors_are_unreadable() {
    let offsets: Vec<_> = (0..9).map(|sector| 4096 * sector).collect();
    let dir = tempfile::tempdir().unwrap();
    let Err(error) = reopened_with_unreadable_index(dir.path(), &offsets) else { panic!("opened") };
    assert_eq!(error.kind(), ErrorKind::Io);
}

#[test]
fn test_an_eviction_is_cut_short_if_an_uncleared_slot_may_hold_a_matching_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, found, files) = reopened_with_unreadable_index(dir.path(), &[4096]).unwrap();
    assert_eq!(tier.uncleared().len(), 32);
    let removed = remove_from(&tier, found, |_| true);
    assert!(removed.is_cut_short, "{removed:?}");
    files.heal();
    let removed = remove_from(&tier, Vec::new(), |_| true);
    assert!(!removed.is_cut_short && tier.uncleared().is_empty(), "{removed:?}");
    drop(tier);
    assert!(open(&config(dir.path(), 1000)).1.is_empty());
}

/// If the ancestors were removed, the next eviction would not find the chunk.
#[test]
fn test_an_eviction_keeps_the_ancestors_of_a_chunk_that_it_cannot_remove() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 8);
    let (tier, _) = open(&config);
    let slots: Vec<_> = (0..7).map(|number| put(&tier, number)).collect();
    drop(tier);
    let files = FaultFiles::new(1);
    let (tier, found) = DiskTier::open_with_files(&config, &Arc::default(), &files).unwrap();
    let record = 128 * u64::from(slots[2].number());
    let unwritable = Rule::new(Fault::Refuse(EIO)).on(&[Call::Write]).in_file("index");
    files.inject(unwritable.at_offset(record));
    let removed = remove_from(&tier, found, |_| true);
    assert_eq!((removed.num_chunks, removed.is_cut_short), (5, true));
    drop(tier);
    let (tier, found) = open(&config);
    assert_eq!(numbers(&found), [0, 2], "chunk 2 is a child of chunk 0");
    let removed = remove_from(&tier, found, |_| true);
    assert_eq!((removed.num_chunks, removed.is_cut_short), (2, false));
}
