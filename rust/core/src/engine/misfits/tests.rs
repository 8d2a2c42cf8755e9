//! Tests that a few misfits affect only their own keys, while many misfits affect all chunks.

use super::*;

fn key(nth: usize) -> ChunkKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&nth.to_le_bytes());
    ChunkKey(bytes)
}

#[test]
fn a_few_misfits_concern_their_own_keys_and_many_all() {
    let mut misfits = Misfits::default();
    misfits.num_fits += 1000;
    (0..63).for_each(|nth| misfits.add(key(nth)));
    assert!(!misfits.may_fit(&key(3)) && misfits.may_fit(&key(100)) && !misfits.are_all());
    (63..300).for_each(|nth| misfits.add(key(nth)));
    assert!(misfits.are_all(), "only 1000 of 1300 chunks fit");
    misfits.num_fits += 1000;
    assert!(!misfits.are_all());
}

#[test]
fn no_more_keys_are_kept_than_have_room() {
    let mut misfits = Misfits::default();
    (0..=MAX_KEYS).for_each(|nth| misfits.add(key(nth)));
    assert!(misfits.keys.len() == 1 && !misfits.may_fit(&key(MAX_KEYS)));
}
