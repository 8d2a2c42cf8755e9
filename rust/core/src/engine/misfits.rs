//! Chunks that did not fit a frame for compressed chunks; the next time they get a larger one.
//!
//! Real KV of bfloat16 is so alike in size that this is rare. If KV does not compress at all, all
//! chunks get larger frames after the first few misfits.

use rustc_hash::FxHashSet;

use crate::key::ChunkKey;

/// Maximum number of stored keys; when it is exceeded, all are dropped.
const MAX_KEYS: usize = 1 << 16;
/// After this many misfits, and if at most `FEW_FITS` times as many chunks fit, no chunk is
/// expected to fit.
const MANY: u64 = 64;
const FEW_FITS: u64 = 4;

#[derive(Debug, Default)]
pub(super) struct Misfits {
    keys: FxHashSet<ChunkKey>,
    num_failed: u64,
    num_saved: u64,
}

impl Misfits {
    /// Chunks were saved.
    pub(super) fn add_saved(&mut self, num: usize) {
        self.num_saved += num as u64;
    }

    /// A chunk did not fit.
    pub(super) fn add(&mut self, key: ChunkKey) {
        if self.keys.len() >= MAX_KEYS {
            self.keys.clear();
        }
        self.keys.insert(key);
        self.num_failed += 1;
    }

    /// Number of chunks that did not fit.
    pub(super) fn num(&self) -> u64 {
        self.num_failed
    }

    /// Whether no chunk is expected to fit.
    pub(super) fn are_all(&self) -> bool {
        self.num_failed >= MANY && self.num_saved <= FEW_FITS * self.num_failed
    }

    /// Whether a chunk is expected to fit.
    pub(super) fn may_fit(&self, key: &ChunkKey) -> bool {
        !self.keys.contains(key)
    }

    /// True if there were no misfits, so that no key needs a lookup.
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(nth: usize) -> ChunkKey {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&nth.to_le_bytes());
        ChunkKey(bytes)
    }

    #[test]
    fn a_few_misfits_concern_their_own_keys_and_many_all() {
        let mut misfits = Misfits::default();
        misfits.add_saved(1000);
        (0..63).for_each(|nth| misfits.add(key(nth)));
        assert!(!misfits.may_fit(&key(3)) && misfits.may_fit(&key(100)) && !misfits.are_all());
        (63..300).for_each(|nth| misfits.add(key(nth)));
        assert!(misfits.are_all(), "1000 of 1300 fit");
        misfits.add_saved(1000);
        assert!(!misfits.are_all());
    }

    #[test]
    fn no_more_keys_are_kept_than_have_room() {
        let mut misfits = Misfits::default();
        (0..=MAX_KEYS).for_each(|nth| misfits.add(key(nth)));
        assert!(misfits.keys.len() == 1 && !misfits.may_fit(&key(MAX_KEYS)));
    }
}
