//! The table against the standard map, with keys that collide.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

/// Few hashes, so that runs wrap around and meet; the last byte tells keys apart.
fn key(number: u32) -> ChunkKey {
    let mut key = [0; 32];
    key[..4].copy_from_slice(&(number % 7).wrapping_mul(0x9249_2492).to_le_bytes());
    key[4..8].copy_from_slice(&number.to_le_bytes());
    ChunkKey(key)
}

proptest! {
    #[test]
    fn it_is_a_map(room in 0..20usize, steps in prop::collection::vec((0..4u8, 0..40u32), 0..200)) {
        let (mut table, mut model) = (Table::default(), HashSet::new());
        table.reserve(room);
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

/// A map that marks removed entries is full of marks after so many, and cleans up or grows.
#[test]
fn a_full_table_never_grows_nor_is_it_built_again() {
    const NUM: u32 = 10_000;
    let number_key = |number: u32| ChunkKey(*blake3::hash(&number.to_le_bytes()).as_bytes());
    let mut table = Table::default();
    table.reserve(NUM as usize);
    let (place, num_slots) = (table.slots.as_ptr(), table.slots.len());
    for number in 0..20 * NUM {
        if number >= NUM {
            table.remove(&number_key(number - NUM), ChunkId(number - NUM));
        }
        table.insert(&number_key(number), ChunkId(number));
    }
    assert_eq!((table.slots.as_ptr(), table.slots.len(), table.len()), (place, num_slots, NUM as usize));
    let num_used = table.slots.iter().filter(|slot| slot.1 != 0).count();
    assert_eq!(num_used, NUM as usize, "nothing is left of what was removed");
}
