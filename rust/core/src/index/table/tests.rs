//! Compares the table with a set from the standard library.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

/// Returns a different key with the given hash for each number, by solving [`hash`] for the key's
/// last word.
fn key_with_hash(number: u32, wanted: u32) -> ChunkKey {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    // Each step doubles the number of correct bits.
    let inverse = (0..6).fold(FACTOR, |inverse: u64, _| {
        inverse.wrapping_mul(2_u64.wrapping_sub(FACTOR.wrapping_mul(inverse)))
    });
    let words = [u64::from(number), 0, 0];
    let before =
        words.iter().fold(0, |hash: u64, word| (hash.rotate_left(29) ^ word).wrapping_mul(FACTOR));
    let last = before.rotate_left(29) ^ (u64::from(wanted) << 32).wrapping_mul(inverse);
    let mut key = [0; 32];
    key[..8].copy_from_slice(&words[0].to_le_bytes());
    key[24..].copy_from_slice(&last.to_le_bytes());
    let key = ChunkKey(key);
    assert_eq!(hash(&key), wanted);
    key
}

/// Returns a different key for each number. The keys have only four different hashes, which map to
/// a segment's last three slots and its first slot, so runs of full slots wrap around.
fn key(number: u32) -> ChunkKey {
    key_with_hash(number, [8189, 8190, 8191, 1 << 13][number as usize % 4])
}

impl Table {
    fn size_bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.slots.len() * size_of::<Slot>()).sum::<usize>()
            + 4 * self.directory.len()
    }
}

proptest! {
    #[test]
    fn it_is_a_map(steps in prop::collection::vec((0..4u8, 0..40u32), 0..200)) {
        let (mut table, mut model) = (Table::default(), HashSet::new());
        for (what, number) in steps {
            let known = model.contains(&number);
            match what {
                0 | 1 if !known => {
                    table.insert(&key(number), ChunkId(number));
                    model.insert(number);
                }
                2 => {
                    table.remove(&key(number), ChunkId(number));
                    table.remove(&key(number), ChunkId(number + 40));
                    model.remove(&number);
                }
                3 if number == 0 => {
                    table.clear();
                    model.clear();
                }
                _ => {}
            }
            prop_assert_eq!(table.len(), model.len());
            for number in 0..40 {
                let found = table.get(&key(number), |id| id.0 == number);
                prop_assert_eq!(found, model.contains(&number).then_some(ChunkId(number)));
            }
        }
    }
}

fn number_key(number: u32) -> ChunkKey {
    ChunkKey(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

fn assert_found(table: &Table, numbers: std::ops::Range<u32>, wanted: bool) {
    for number in numbers {
        let found = table.get(&number_key(number), |id| id.0 == number);
        assert_eq!(found, wanted.then_some(ChunkId(number)));
    }
}

/// A map with tombstones would be full of them after `NUM` removals and would have to rehash or
/// grow.
#[test]
fn replaced_entries_leave_no_tombstones() {
    const NUM: u32 = 100_000;
    let mut table = Table::default();
    for number in 0..NUM {
        table.insert(&number_key(number), ChunkId(number));
    }
    let size_bytes = table.size_bytes();
    for number in NUM..10 * NUM {
        table.remove(&number_key(number - NUM), ChunkId(number - NUM));
        table.insert(&number_key(number), ChunkId(number));
    }
    assert_found(&table, 9 * NUM..10 * NUM, true);
    assert_found(&table, 0..9 * NUM, false);
    let num_used: usize =
        table.segments.iter().flat_map(|segment| &segment.slots).filter(|slot| slot.1 != 0).count();
    assert_eq!(
        (num_used, table.len()),
        (NUM as usize, NUM as usize),
        "removed entries must not leave tombstones"
    );
    assert!(
        table.size_bytes() <= 2 * size_bytes,
        "{} bytes after {size_bytes}",
        table.size_bytes()
    );
}

#[test]
fn memory_follows_the_number_of_chunks() {
    let mut table = Table::default();
    assert_eq!(table.size_bytes(), 0);
    for number in 0..1 << 20 {
        table.insert(&number_key(number), ChunkId(number));
        let limit = (SEGMENT_SLOTS + 4 * table.len()) * size_of::<Slot>();
        assert!(
            table.size_bytes() <= limit,
            "{} bytes for {} entries",
            table.size_bytes(),
            table.len()
        );
    }
    table.clear();
    assert_eq!((table.size_bytes(), table.len()), (0, 0));
    assert_found(&table, 0..100, false);
}

/// An insertion moves at most one segment's entries, regardless of the table size.
#[test]
fn growing_moves_one_segment_at_a_time() {
    let mut table = Table::default();
    for number in 0..300_000 {
        let num_segments = table.segments.len();
        table.insert(&number_key(number), ChunkId(number));
        assert!(table.segments.len() <= num_segments + 1);
        assert!(table.segments.iter().all(|segment| segment.slots.len() == SEGMENT_SLOTS));
    }
}

/// Keys with equal hashes can come only from a damaged or forged file.
#[test]
fn keys_that_hash_alike_share_a_segment_that_grows() {
    let mut table = Table::default();
    let num = u32::try_from(SEGMENT_SLOTS).unwrap();
    let keys: Vec<_> = (0..num).map(|number| (key_with_hash(number, 1 << 31), number)).collect();
    for (key, number) in &keys {
        table.insert(key, ChunkId(*number));
    }
    assert_eq!(table.segments.iter().filter(|segment| segment.len > 0).count(), 1);
    for (key, number) in &keys {
        assert_eq!(table.get(key, |id| id.0 == *number), Some(ChunkId(*number)));
        table.remove(key, ChunkId(*number));
    }
    assert_eq!(table.len(), 0);
}
