//! Remembers chunks that did not fit a frame for compressed chunks, so that their next save gets a
//! larger frame.
//!
//! Misfits are rare with real bfloat16 KV, because compressed sizes hardly vary. If KV does not
//! compress at all, all chunks get larger frames after the first `MANY` misfits.

use rustc_hash::FxHashSet;

use crate::key::ChunkKey;

/// Maximum number of stored keys. When it is reached, all keys are dropped.
const MAX_KEYS: usize = 1 << 16;
/// No chunk is expected to fit after `MANY` misfits, unless more than `FEW_FITS` times as many
/// chunks fit.
const MANY: u64 = 64;
const FEW_FITS: u64 = 4;

#[derive(Debug, Default)]
pub(super) struct Misfits {
    keys: FxHashSet<ChunkKey>,
    /// Number of chunks that did not fit, including dropped keys.
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

    /// Returns true if no chunk is expected to fit.
    pub(super) fn are_all(&self) -> bool {
        self.num_failed >= MANY && self.num_saved <= FEW_FITS * self.num_failed
    }

    /// Returns true if a chunk is expected to fit.
    pub(super) fn may_fit(&self, key: &ChunkKey) -> bool {
        !self.keys.contains(key)
    }

    /// Returns true if no keys are stored, so that no lookup is needed.
    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests;
