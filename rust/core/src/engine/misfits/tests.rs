//! Tests that a few misfits affect only their own keys, that many affect all chunks, and that
//! trials detect when chunks fit again.

use super::*;

fn key(nth: u64) -> ChunkKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&nth.to_le_bytes());
    ChunkKey(bytes)
}

/// Saves one-chunk prompts whose chunks fit if `fits` is true, and returns the number of misfits.
fn save(misfits: &mut Misfits, prompts: std::ops::Range<u64>, fits: bool) -> u64 {
    let before = misfits.num_failed;
    for prompt in prompts {
        let is_compact = !misfits.candidates(&(0..1)).is_empty() && misfits.may_fit(&key(prompt));
        if is_compact && !fits {
            misfits.add(key(prompt));
        } else {
            misfits.count_saved(is_compact);
        }
    }
    misfits.num_failed - before
}

#[test]
fn a_few_misfits_concern_their_own_keys() {
    let mut misfits = Misfits::default();
    assert_eq!(save(&mut misfits, 0..1000, true), 0);
    assert_eq!(save(&mut misfits, 1000..1063, false), 63);
    assert_eq!(misfits.candidates(&(0..8)), 0..8);
    assert!(!misfits.may_fit(&key(1003)) && misfits.may_fit(&key(2000)));
    assert_eq!(save(&mut misfits, 1000..1063, false), 0, "misfits get larger frames");
}

#[test]
fn many_misfits_concern_all_chunks_until_trials_fit() {
    let mut misfits = Misfits::default();
    assert_eq!(save(&mut misfits, 0..64, false), 64);
    assert!(misfits.candidates(&(0..8)).is_empty());
    let num = save(&mut misfits, 64..10_064, false);
    assert!((100..160).contains(&num), "{num} of 10,000 chunks were trials");
    assert_eq!(save(&mut misfits, 10_064..20_064, true), 0);
    assert_eq!(misfits.candidates(&(0..8)), 0..8, "the chunks fit again");
}

#[test]
fn a_trial_is_the_last_unit_of_a_request() {
    let mut misfits = Misfits::default();
    save(&mut misfits, 0..64, false);
    (0..TRIAL_EVERY).for_each(|_| misfits.count_saved(false));
    assert_eq!(misfits.candidates(&(3..3)), 3..3);
    assert_eq!(misfits.candidates(&(3..8)), 7..8);
    assert_eq!(misfits.candidates(&(3..8)), 8..8);
}

#[test]
fn a_change_is_noticed_after_many_fits() {
    let mut misfits = Misfits::default();
    assert_eq!(save(&mut misfits, 0..1_000_000, true), 0);
    let num = save(&mut misfits, 1_000_000..1_010_000, false);
    assert!(num < 500, "{num} of 10,000 chunks did not fit");
}

#[test]
fn no_more_keys_are_kept_than_have_room() {
    let mut misfits = Misfits::default();
    (0..=MAX_KEYS as u64).for_each(|nth| misfits.add(key(nth)));
    assert!(misfits.keys.len() == 1 && !misfits.may_fit(&key(MAX_KEYS as u64)));
}
