//! Tests namespaces with multiple size classes: recovery, lower size limits, changed frame sizes,
//! and the inspect and verify reports.

use std::fs;

use super::super::{Damage, Verifier, inspect};
use super::*;
use crate::test_support::faults::{Call, EOPNOTSUPP, Fault, FaultFiles, Rule, blocks};
use crate::{Error, ErrorKind};

pub(super) const SIZES: [u64; 3] = [4096, 12288, 40960];
pub(super) const SMALL: SizeClass = SizeClass(0);
pub(super) const MIDDLE: SizeClass = SizeClass(1);
pub(super) const LARGE: SizeClass = SizeClass(2);

/// Returns the config for a directory with space for 40 of the largest frames.
pub(super) fn sized(dir: &Path, sizes: &[u64]) -> DiskConfig {
    let cap_bytes = budget::dir_bytes(40, 40960, budget::map_bytes(3));
    DiskConfig { cap_bytes, frame_sizes: sizes.to_vec().into(), ..config(dir, 1) }
}

pub(super) fn faulty(config: &DiskConfig) -> (DiskTier, FaultFiles) {
    let files = FaultFiles::default();
    files.watch(&config.dir);
    (DiskTier::open_with_files(config, &std::sync::Arc::default(), &files).unwrap().0, files)
}

pub(super) fn buffer(tier: &DiskTier, slot: SlotId) -> PageBuffer {
    PageBuffer::new(usize::try_from(tier.frame_bytes(slot.class())).unwrap())
}

pub(super) fn write(tier: &DiskTier, slot: SlotId, i: u32) -> Result<(), Error> {
    let mut frame = buffer(tier, slot);
    fill(&mut frame, i, 0);
    tier.write(slot, &DiskMeta { depth: 0, ..meta_of(i) }, &frame)
}

pub(super) fn is_whole(tier: &DiskTier, slot: SlotId, i: u32) -> bool {
    let (mut frame, mut expected) = (buffer(tier, slot), buffer(tier, slot));
    fill(&mut expected, i, 0);
    tier.read(slot, &key_of(i), &mut frame).is_ok_and(|()| *frame == *expected)
}

/// Writes chunks of a class until no slot is free.
pub(super) fn fill_up(tier: &DiskTier, class: SizeClass, first: u32) -> Vec<(u32, SlotId)> {
    let mut all = Vec::new();
    while let Ok(slot) = tier.reserve(class) {
        let i = first + u32::try_from(all.len()).unwrap();
        write(tier, slot, i).unwrap();
        all.push((i, slot));
    }
    all
}

pub(super) fn are_whole(tier: &DiskTier, all: &[(u32, SlotId)]) -> bool {
    all.iter().all(|(i, slot)| is_whole(tier, *slot, *i))
}

#[test]
fn test_a_restart_finds_the_chunks_of_all_sizes_in_files_that_are_longer_than_the_cap() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, _files) = faulty(&config);
    let mut small = fill_up(&tier, SMALL, 0);
    // Free every second slot, so that the end of the file remains in use.
    let freed: Vec<_> = small.iter().copied().step_by(2).collect();
    small.retain(|chunk| !freed.contains(chunk));
    for (_, slot) in &freed {
        tier.free(*slot).unwrap();
    }
    let middle = fill_up(&tier, MIDDLE, 500);
    assert!(middle.len() > 50);
    drop(tier);
    for _ in 0..2 {
        let (tier, found) = open(&config);
        assert_eq!(found.len(), small.len() + middle.len());
        assert!(are_whole(&tier, &small) && are_whole(&tier, &middle));
        let stats = tier.stats();
        assert!(stats.bytes <= config.cap_bytes && stats.bytes >= blocks(dir.path()), "{stats:?}");
        assert_eq!((stats.dropped_over_cap, stats.fresh_starts), (0, 0));
        assert!(tier.reserve(LARGE).is_err(), "the tier must be full");
    }
}

#[test]
fn test_a_chunk_of_one_size_comes_back_after_its_parent_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, _) = open(&config);
    for (i, class) in [(0, LARGE), (2, SMALL), (6, MIDDLE), (1, MIDDLE), (4, SMALL)] {
        let slot = tier.reserve(class).unwrap();
        let mut frame = buffer(&tier, slot);
        fill(&mut frame, i, 0);
        tier.write(slot, &meta_of(i), &frame).unwrap();
    }
    drop(tier);
    let (tier, found) = open(&config);
    assert_eq!(numbers(&found), [0, 2, 6, 1, 4]);
    assert!(found.is_sorted_by(|a, b| a.sequence < b.sequence));
    assert!(found.iter().zip(numbers(&found)).all(|(entry, i)| is_whole(&tier, entry.slot, i)));
    tier.clear().unwrap();
    assert_eq!(tier.stats().slots_used, 0);
    drop(tier);
    assert!(open(&config).1.is_empty());
}

#[test]
fn test_a_smaller_cap_takes_from_each_size_its_part() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, _) = open(&config);
    for i in 0..60 {
        let slot = tier.reserve(SizeClass(u8::try_from(i % 3).unwrap())).unwrap();
        write(&tier, slot, i).unwrap();
    }
    drop(tier);
    let small = DiskConfig { cap_bytes: config.cap_bytes / 2, ..config };
    let (tier, found) = open(&small);
    let num_of = |class| found.iter().filter(|entry| entry.slot.class() == class).count();
    let nums = [SMALL, MIDDLE, LARGE].map(num_of);
    assert!(nums.iter().all(|num| (10..20).contains(num)), "{nums:?}");
    assert_eq!(tier.stats().dropped_over_cap, 60 - found.len() as u64);
    assert!(found.iter().zip(numbers(&found)).all(|(entry, i)| is_whole(&tier, entry.slot, i)));
    assert!(blocks(dir.path()) <= small.cap_bytes && tier.stats().bytes <= small.cap_bytes);
}

#[test]
fn test_a_smaller_cap_takes_free_slots_before_chunks() {
    for can_punch in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let config = sized(dir.path(), &SIZES);
        let (tier, _) = open(&config);
        let large = fill_up(&tier, LARGE, 0);
        large[..38].iter().for_each(|(_, slot)| tier.free(*slot).unwrap());
        drop(tier);
        let files = FaultFiles::default();
        if !can_punch {
            files.inject(Rule::new(Fault::Refuse(EOPNOTSUPP)).on(&[Call::Punch]));
        }
        let small = DiskConfig { cap_bytes: config.cap_bytes / 2, ..config };
        let (tier, found) =
            DiskTier::open_with_files(&small, &std::sync::Arc::default(), &files).unwrap();
        assert_eq!(found.len(), if can_punch { 2 } else { 0 });
        assert!(blocks(dir.path()) <= small.cap_bytes && tier.stats().bytes <= small.cap_bytes);
        assert!(tier.reserve(LARGE).is_ok());
        assert_eq!(
            tier.reserve(SMALL).is_ok(),
            can_punch,
            "free slots of the other size must be kept"
        );
    }
}

#[test]
fn test_other_frame_sizes_keep_the_chunks_of_those_that_are_still_used() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, _) = open(&config);
    for (i, class) in [(0, SMALL), (1, MIDDLE), (2, LARGE)] {
        write(&tier, tier.reserve(class).unwrap(), i).unwrap();
    }
    drop(tier);
    let (tier, found) = open(&sized(dir.path(), &[8192, 40960, 4096]));
    assert_eq!(numbers(&found), [0, 2]);
    assert_eq!([found[0].slot.class(), found[1].slot.class()], [SizeClass(2), SizeClass(1)]);
    assert!(is_whole(&tier, found[0].slot, 0) && is_whole(&tier, found[1].slot, 2));
    assert_eq!((tier.stats().fresh_starts, tier.take_events().len()), (0, 1));
    drop(tier);
    assert!(!namespaces::dir_of(&config).join("frames-12288.dat").exists());
    let (tier, found) = open(&sized(dir.path(), &[16384]));
    assert_eq!((found.len(), tier.stats().fresh_starts), (0, 1));
}

fn verify(dir: &Path) -> Vec<Damage> {
    Verifier::open(dir).unwrap().step(u64::MAX)
}

#[test]
fn test_inspect_and_verify_cover_all_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, _) = open(&config);
    for i in 0..6 {
        let slot = tier.reserve(SizeClass(u8::try_from(i % 3).unwrap())).unwrap();
        write(&tier, slot, i).unwrap();
    }
    let slots = tier.stats().slots;
    drop(tier);
    let info = inspect(dir.path()).unwrap().remove(0);
    assert_eq!((info.chunks, info.slots, info.problem), (6, slots, None));
    assert_eq!(info.frame_sizes, SIZES);
    assert_eq!(verify(dir.path()), []);
    let own = namespaces::dir_of(&config);
    let file = fs::File::options().write(true).open(own.join("frames-12288.dat")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 9], 12288 + 7).unwrap();
    fs::remove_file(own.join("frames-40960.dat")).unwrap();
    let mut damage: Vec<_> =
        verify(dir.path()).into_iter().map(|d| (d.frame_bytes, d.slot, d.problem)).collect();
    damage.sort();
    let lost = "frames-40960.dat is missing: its chunks are lost";
    let differs = (Some(12288), Some(1), "its checksum does not match".to_owned());
    assert_eq!(damage, [(None, None, lost.to_owned()), differs]);
    let info = inspect(dir.path()).unwrap().remove(0);
    assert_eq!((info.chunks, info.problem.as_deref()), (4, Some(lost)));
}

#[test]
fn test_a_file_of_one_size_is_not_believed_as_one_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let (tier, _) = open(&config);
    write(&tier, tier.reserve(SMALL).unwrap(), 0).unwrap();
    write(&tier, tier.reserve(MIDDLE).unwrap(), 1).unwrap();
    drop(tier);
    let own = namespaces::dir_of(&config);
    fs::copy(own.join("index-4096.dat"), own.join("index-12288.dat")).unwrap();
    let (tier, found) = open(&config);
    assert_eq!((numbers(&found), tier.stats().dropped_records), (vec![0], 1));
}

#[test]
fn test_a_size_class_that_does_not_exist_has_no_slots() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = open(&sized(dir.path(), &SIZES));
    assert_eq!((tier.reserve(SizeClass(3)).ok(), tier.frame_bytes(SizeClass(3))), (None, 0));
    let slot = SlotId::new(SizeClass(3), 0);
    let error = tier.read(slot, &key_of(0), &mut PageBuffer::new(4096)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    tier.free(slot).unwrap();
    let slot = tier.reserve(MIDDLE).unwrap();
    let error = tier.write(slot, &meta_of(0), &PageBuffer::new(4096)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
}

/// Stores chunks of two sizes in files whose total length exceeds the size limit. Returns the chunk
/// count.
fn long_files(config: &DiskConfig) -> usize {
    let (tier, _) = open(config);
    let small = fill_up(&tier, SMALL, 0);
    small.iter().step_by(2).for_each(|(_, slot)| tier.free(*slot).unwrap());
    small.len() / 2 + fill_up(&tier, MIDDLE, 500).len()
}

#[test]
fn test_punched_files_of_a_closed_namespace_count_their_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let config = sized(dir.path(), &SIZES);
    let num = long_files(&config);
    let cap_bytes = config.cap_bytes * 5 / 4;
    let own = DiskConfig { cap_bytes, ..config.clone() };
    let cap_bytes = config.cap_bytes + 64 * 1024;
    let other = DiskConfig { namespace: [1; 32], cap_bytes, ..config };
    let (tier, _) = open(&other);
    write(&tier, tier.reserve(SMALL).unwrap(), 0).unwrap();
    drop(tier);
    let (tier, found) = open(&own);
    assert_eq!(found.len(), num, "the namespace was deleted although both namespaces fit");
    drop(tier);
    assert_eq!(open(&other).1.len(), 1, "the namespace was deleted because holes were counted");
    assert!(blocks(dir.path()) <= cap_bytes);
}
