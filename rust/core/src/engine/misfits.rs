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
    /// Number of chunks that did not fit.
    pub(super) num_failed: u64,
    pub(super) num_saved: u64,
}

impl Misfits {
    pub(super) fn add(&mut self, key: ChunkKey) {
        if self.keys.len() >= MAX_KEYS {
            self.keys.clear();
        }
        self.keys.insert(key);
        self.num_failed += 1;
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
mod tests;
