//! Tests a tier within one process: written chunks can be read, freed chunks cannot, and no slot is
//! lost.

use super::*;
use crate::ErrorKind;
use crate::io::SizeClass;

#[test]
fn test_a_chunk_comes_back_in_this_life_and_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 8);
    let (tier, found) = open(&config);
    assert!(found.is_empty());
    let slots: Vec<_> = [0, 2, 6, 1].map(|i| (i, put(&tier, i))).into();
    for (i, slot) in &slots {
        assert_eq!(get(&tier, *slot, *i).unwrap(), frame_of(*i, 0).to_vec());
    }
    drop(tier);
    let (tier, found) = open(&config);
    assert_eq!(numbers(&found), [0, 2, 6, 1]);
    for (entry, (i, slot)) in found.iter().zip(&slots) {
        assert_eq!((entry.slot, entry.meta), (*slot, meta_of(*i)));
        assert_eq!(get(&tier, entry.slot, *i).unwrap(), frame_of(*i, 0).to_vec());
    }
    assert_eq!(tier.stats().recovered, 4);
}

#[test]
fn test_sequence_grows_over_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 8);
    for i in 0..4 {
        let (tier, found) = open(&config);
        assert_eq!(numbers(&found), (0..i).collect::<Vec<_>>());
        assert!(found.is_sorted_by(|a, b| a.sequence < b.sequence));
        put(&tier, i);
    }
}

#[test]
fn test_a_freed_chunk_is_gone_now_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 8);
    let (tier, _) = open(&config);
    let (a, b) = (put(&tier, 0), put(&tier, 1));
    tier.free(a).unwrap();
    assert_eq!(get(&tier, a, 0).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(
        get(&tier, b, 0).unwrap_err().kind(),
        ErrorKind::Corrupt,
        "the slot holds a different chunk"
    );
    drop(tier);
    assert_eq!(numbers(&open(&config).1), [1]);
}

#[test]
fn test_files_that_are_cut_under_a_tier_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2);
    let (tier, _) = open(&config);
    let slots = [put(&tier, 0), put(&tier, 1)];
    for (name, len) in [("frames", FRAME + 1), ("index", 5)] {
        let file = std::fs::File::options().write(true).open(slot_file(&config, name)).unwrap();
        file.set_len(len).unwrap();
        assert_eq!(get(&tier, slots[1], 1).unwrap_err().kind(), ErrorKind::Corrupt, "{name}");
    }
}

#[test]
fn test_every_slot_of_the_cap_can_be_had_again_and_again() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = open(&config(dir.path(), 5));
    for _ in 0..3 {
        let slots: Vec<_> = (0..5).map(|i| put(&tier, i)).collect();
        assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
        let stats = tier.stats();
        assert_eq!((stats.slots, stats.slots_used, stats.slots_reserved), (5, 5, 0));
        for slot in slots {
            tier.free(slot).unwrap();
        }
        let reserved: Vec<_> = (0..5).map(|_| tier.reserve(SizeClass(0)).unwrap()).collect();
        assert_eq!(tier.stats().slots_reserved, 5);
        assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
        for slot in reserved {
            tier.free(slot).unwrap();
        }
        assert_eq!((tier.stats().slots_reserved, tier.stats().slots_used), (0, 0));
    }
}

#[test]
fn test_freeing_twice_gives_the_slot_once() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = open(&config(dir.path(), 2));
    let slot = put(&tier, 0);
    tier.free(slot).unwrap();
    tier.free(slot).unwrap();
    tier.free(SlotId(77)).unwrap();
    assert!(tier.reserve(SizeClass(0)).is_ok() && tier.reserve(SizeClass(0)).is_ok());
    assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
}

#[test]
fn test_only_reserved_slots_and_whole_frames_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = open(&config(dir.path(), 2));
    let slot = put(&tier, 0);
    assert!(tier.write(slot, &meta_of(1), &frame_of(1, 0)).is_err());
    assert!(tier.write(SlotId(9), &meta_of(1), &frame_of(1, 0)).is_err());
    let free = tier.reserve(SizeClass(0)).unwrap();
    let short = tier.write(free, &meta_of(1), &[0; 4096]).unwrap_err();
    assert_eq!(short.kind(), ErrorKind::InvalidConfig);
    assert_eq!(get(&tier, slot, 0).unwrap(), frame_of(0, 0).to_vec());
    assert_eq!(
        tier.read(slot, &key_of(0), &mut [0; 4096]).unwrap_err().kind(),
        ErrorKind::InvalidConfig
    );
}

#[test]
fn test_unaligned_memory_is_read_and_written_too() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = open(&config(dir.path(), 2));
    let slot = tier.reserve(SizeClass(0)).unwrap();
    let len = usize::try_from(FRAME).unwrap();
    let mut odd = vec![0; len + 1];
    odd[1..].copy_from_slice(&frame_of(0, 0));
    tier.write(slot, &meta_of(0), &odd[1..]).unwrap();
    odd.fill(0xee);
    tier.read(slot, &key_of(0), &mut odd[1..]).unwrap();
    assert_eq!(odd[1..], *frame_of(0, 0));
    assert_eq!(
        get(&tier, slot, 0).unwrap(),
        odd[1..],
        "the aligned read must see the unaligned write"
    );
}

#[test]
fn test_clear_forgets_all_but_reserved_slots() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 5);
    let (tier, _) = open(&config);
    put(&tier, 0);
    let mine = tier.reserve(SizeClass(0)).unwrap();
    put(&tier, 1);
    assert_eq!(tier.clear().unwrap(), []);
    let stats = tier.stats();
    assert_eq!((stats.slots_used, stats.slots_reserved), (0, 1));
    tier.write(mine, &meta_of(4), &frame_of(4, 0)).unwrap();
    let others: Vec<_> = (0..4).map(|_| tier.reserve(SizeClass(0)).unwrap()).collect();
    assert!(!others.contains(&mine));
    assert_eq!(get(&tier, mine, 4).unwrap(), frame_of(4, 0).to_vec());
}

#[test]
fn test_a_closed_tier_says_so_and_gives_the_directory_up() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 5);
    let (tier, _) = open(&config);
    let slot = put(&tier, 0);
    let spare = tier.reserve(SizeClass(0)).unwrap();
    tier.close();
    tier.close();
    assert_eq!(tier.reserve(SizeClass(0)).ok(), None);
    assert_eq!(
        tier.write(spare, &meta_of(1), &frame_of(1, 0)).unwrap_err().kind(),
        ErrorKind::Closed
    );
    assert_eq!(get(&tier, slot, 0).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(tier.free(slot).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(tier.clear().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(numbers(&open(&config).1), [0], "a closed tier must not change the disk");
}

#[test]
fn test_threads_share_a_tier() {
    let dir = tempfile::tempdir().unwrap();
    let (tier, _) = open(&config(dir.path(), 12));
    std::thread::scope(|scope| {
        for t in 0..4_u32 {
            let tier = &tier;
            scope.spawn(move || {
                for round in 0..40 {
                    let i = t * 40 + round;
                    let slots = [i, i + 500].map(|i| (i, put(tier, i)));
                    for (i, slot) in slots {
                        assert_eq!(get(tier, slot, i).unwrap(), frame_of(i, 0).to_vec());
                        tier.free(slot).unwrap();
                    }
                }
            });
        }
    });
    let stats = tier.stats();
    assert_eq!((stats.slots_used, stats.slots_reserved), (0, 0));
}
